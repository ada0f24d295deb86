"""The choice of tiles is plain arithmetic and is tested without a device."""

from __future__ import annotations

import pytest

from exactspec.backend.cuda.tiles import (
    ROW_BUCKETS,
    bucket_rows,
    choose_tile,
    next_power_of_2,
    shape_kind,
    tiles_of_shape,
)

SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (151936, 4096),
    (960, 576),
    (3072, 576),
    (49152, 576),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_count_gets_a_tile_of_the_checked_set(shape: tuple[int, int]) -> None:
    checked = tiles_of_shape(*shape)
    for rows in range(1, 700):
        assert choose_tile(rows, *shape) in checked
    assert choose_tile(100_000, *shape) in checked


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_fit_the_device(shape: tuple[int, int]) -> None:
    for tile in tiles_of_shape(*shape):
        shared = (tile.rows + tile.cols) * tile.depth * 2 * tile.stages * tile.per_sm
        assert shared <= 227 * 1024, tile
        assert tile.rows == 128 or tile.rows in (16, 32, 64)
        assert tile.cols >= 16


def test_a_small_step_does_not_compute_many_rows_of_padding() -> None:
    assert all(choose_tile(rows, *shape).rows == 16 for shape in SHAPES for rows in (1, 8, 16))


def test_depths_that_are_no_multiple_of_16_bytes_avoid_the_tensor_memory_engine() -> None:
    assert not any(tile.wide for tile in tiles_of_shape(4096, 4100))


def test_kinds() -> None:
    assert [shape_kind(*shape) for shape in SHAPES] == [
        "plain", "plain", "wide", "deep", "wide", "small", "small", "vocabulary",
    ]  # fmt: skip


def test_row_buckets_round_up() -> None:
    assert [bucket_rows(n) for n in (1, 3, 8, 9, 512)] == [1, 4, 8, 16, 512]
    assert bucket_rows(513) is None
    assert list(ROW_BUCKETS) == sorted(set(ROW_BUCKETS))
    assert [next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
