"""Which tile the exact GEMM uses for a number of rows: pure Python, deterministic, no device needed.

Every tile runs the same reduction over K (in order, 16 terms per matrix instruction, float32 accumulator), so the choice
changes speed and never a bit. `CudaBackend.self_check` proves that on the device for every tile of a shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel configuration. `wide` is the persistent kernel that loads through the tensor memory engine."""

    rows: int
    cols: int
    depth: int  # K per step
    warps: int
    stages: int
    wide: bool = False
    group: int = 8  # row tiles that share a stretch of columns while it is in the L2 cache


# (most rows, tile for narrow outputs, tile for wide outputs); "wide output" is at least WIDE_OUTPUT columns
WIDE_OUTPUT = 16384
_SMALL: tuple[tuple[int, Tile, Tile], ...] = (
    (16, Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 4, 5)),
    (32, Tile(32, 32, 128, 4, 5), Tile(32, 64, 128, 4, 4)),
    (64, Tile(64, 32, 128, 4, 5), Tile(64, 64, 128, 4, 4)),
    (128, Tile(64, 64, 64, 4, 5), Tile(128, 64, 64, 4, 4)),
    (256, Tile(128, 64, 64, 4, 4), Tile(128, 128, 64, 8, 4)),
)
# A short K leaves no room for a deep pipeline; a short N needs narrow tiles to fill the device.
_SHORT: tuple[tuple[int, Tile], ...] = (
    (16, Tile(16, 16, 128, 4, 4)),
    (32, Tile(32, 16, 128, 4, 4)),
    (64, Tile(64, 16, 128, 4, 4)),
    (128, Tile(64, 32, 64, 4, 4)),
    (256, Tile(64, 64, 64, 4, 4)),
)
_LARGE = Tile(128, 128, 64, 4, 4)
_PREFILL = Tile(128, 256, 64, 8, 3, wide=True)
_PREFILL_NARROW = Tile(128, 128, 64, 4, 4, wide=True)
SHORT_OUTPUT = 2048

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def choose_tile(rows: int, out_features: int, in_features: int) -> Tile:
    """The tile for x [rows, in_features] @ w [out_features, in_features].T; a pure function of its arguments."""
    if out_features <= SHORT_OUTPUT:
        for most, tile in _SHORT:
            if rows <= most:
                return tile
        return _LARGE if in_features % 8 else _PREFILL_NARROW
    for most, narrow, wide in _SMALL:
        if rows <= most:
            return wide if out_features >= WIDE_OUTPUT else narrow
    if in_features % 8:  # the tensor memory engine wants rows of whole 16-byte units
        return _LARGE
    return _PREFILL if rows > 512 else _PREFILL_NARROW


def tiles_of_shape(out_features: int, in_features: int) -> list[Tile]:
    """All tiles that `choose_tile` can return for a shape, without repetition, smallest row count first."""
    seen: dict[Tile, None] = {}
    for rows in (1, 17, 33, 65, 129, 257, 513):
        seen.setdefault(choose_tile(rows, out_features, in_features))
    return list(seen)


def bucket_rows(rows: int) -> int | None:
    """The smallest captured row count that holds `rows`, or None if it is over the largest."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return None


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
