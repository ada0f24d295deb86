"""Which tile the exact GEMM uses for a number of rows: pure Python, deterministic, no device needed.

Every tile runs the same reduction over K (in order, 16 terms per matrix instruction, float32 accumulator), so a choice
changes speed and never a bit. `CudaBackend.self_check` proves that on the device for every tile of a shape.
The table holds the best of a sweep on one H200 (bfloat16, graph-timed, weights rotated through more than the L2 cache).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Shape = tuple[int, int]  # out_features, in_features


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel configuration. `wide` is the persistent kernel that loads through the tensor memory engine."""

    rows: int
    cols: int
    depth: int  # K per step
    warps: int
    stages: int
    wide: bool = False
    per_sm: int = 1  # programs of a wide kernel for each multiprocessor
    group: int = 8  # row tiles that share a stretch of columns while it is in the L2 cache


ANY = 1 << 30  # rows
_PREFILL = Tile(128, 256, 64, 8, 4, wide=True)
_TABLE: dict[str, tuple[tuple[int, Tile], ...]] = {
    # matrices of small models: too few tiles to fill the device, so narrow ones
    "small": (
        (16, Tile(16, 16, 128, 2, 5)),
        (32, Tile(32, 16, 128, 4, 5)),
        (64, Tile(64, 16, 128, 4, 5)),
        (512, Tile(64, 64, 64, 4, 6)),
        (ANY, Tile(128, 128, 64, 8, 4, wide=True)),
    ),
    # LM heads over a short K: the stores of the logits weigh as much as the product
    "vocabulary": (
        (16, Tile(16, 128, 64, 4, 5)),
        (32, Tile(32, 64, 128, 4, 4)),
        (64, Tile(64, 64, 64, 4, 6)),
        (ANY, Tile(128, 128, 64, 8, 3)),
    ),
    "wide": (
        (16, Tile(16, 64, 128, 4, 4)),
        (32, Tile(32, 64, 128, 4, 4)),
        (64, Tile(64, 128, 64, 4, 4, wide=True, per_sm=2)),
        (128, _PREFILL),
        (256, Tile(128, 128, 64, 4, 4, wide=True)),
        (ANY, _PREFILL),
    ),
    "deep": (
        (16, Tile(16, 16, 256, 2, 5)),
        (32, Tile(32, 32, 128, 4, 5)),
        (64, Tile(64, 32, 128, 4, 5, wide=True)),
        (128, Tile(64, 64, 128, 4, 4)),
        (256, Tile(128, 64, 64, 4, 6, wide=True)),
        (ANY, _PREFILL),
    ),
    "plain": (
        (16, Tile(16, 16, 256, 2, 4)),
        (32, Tile(32, 32, 128, 4, 5)),
        (64, Tile(64, 32, 128, 4, 5, wide=True)),
        (128, Tile(64, 64, 64, 4, 6, wide=True, per_sm=2)),
        (256, Tile(128, 64, 64, 4, 6, wide=True)),
        (ANY, _PREFILL),
    ),
}

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def shape_kind(out_features: int, in_features: int) -> str:
    """Which column of the table a weight matrix belongs to."""
    if out_features >= 32768 and in_features < 2048:
        return "vocabulary"
    if out_features * in_features < 8 << 20:
        return "small"
    if out_features >= 16384:
        return "wide"
    return "deep" if in_features >= 8192 else "plain"


def choose_tile(rows: int, out_features: int, in_features: int) -> Tile:
    """The tile for x [rows, in_features] @ w [out_features, in_features].T; a pure function of its arguments."""
    for most, tile in _TABLE[shape_kind(out_features, in_features)]:
        if rows <= most:
            # the tensor memory engine wants matrix rows of whole 16-byte units
            return replace(tile, wide=False, stages=3) if tile.wide and in_features % 8 else tile
    raise ValueError(f"rows must be below {ANY}, got {rows}")


def tiles_of_shape(out_features: int, in_features: int) -> list[Tile]:
    """All tiles that `choose_tile` can return for a shape, without repetition, smallest row count first."""
    bounds = [most for most, _ in _TABLE[shape_kind(out_features, in_features)]]
    return list(dict.fromkeys(choose_tile(rows, out_features, in_features) for rows in bounds))


def bucket_rows(rows: int) -> int | None:
    """The smallest captured row count that holds `rows`, or None if it is over the largest."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return None


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
