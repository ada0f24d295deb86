"""Row-exact operators in plain torch: the bits of a row do not depend on how many rows share the call.

Everything that could take another path for another row count runs on tiles of a fixed number of rows: the last
tile is padded with zeros. Elementwise additions and products are IEEE-exact and need no tiles; anything with a
reduction or a transcendental function does, because kernels treat the tail of a loop differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16  # rows of a linear, norm or activation tile
ALIGNED_COLUMNS = 16  # 64 bytes: MKL's sums over a row depend on where in a cache line the row starts
SINGLE_THREAD_ELEMENTS = 32768  # torch splits larger elementwise calls over threads, at any element


def by_tiles(f: Callable[[Tensor], Tensor], x: Tensor, rows: int = ROW_TILE) -> Tensor:
    """f over tiles of exactly `rows` rows of x [M, ...]; f maps [rows, ...] to [rows, ...]."""
    num_rows = x.shape[0]
    if num_rows == 0:
        return f(x.new_zeros((rows, *x.shape[1:])))[:0]
    padding = -num_rows % rows
    if padding:
        x = torch.cat([x, x.new_zeros((padding, *x.shape[1:]))])
    tiles = [f(tile.contiguous()) for tile in x.split(rows)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:num_rows]


def elementwise_rows(width: int) -> int:
    """Rows per tile of an elementwise function: few enough that no thread border falls inside a tile."""
    return ROW_TILE if ROW_TILE * width <= SINGLE_THREAD_ELEMENTS else 1


def pad_columns(x: Tensor) -> Tensor:
    """Zeros behind the last dimension, up to a multiple of ALIGNED_COLUMNS; x itself where none are needed."""
    padding = -x.shape[-1] % ALIGNED_COLUMNS
    return F.pad(x, (0, padding)) if padding else x


def linear(x: Tensor, weight: Tensor, weight_dtype: torch.dtype) -> Tensor:
    """x [M, in] float32, rounded to weight_dtype, times weight [out, in] (float32, pad_columns applied) -> [M, out]."""
    x = pad_columns(x.to(weight_dtype).float())
    return by_tiles(lambda tile: F.linear(tile, weight), x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019, eq. 4) of each row. x [M, H] float32."""

    def normalise(tile: Tensor) -> Tensor:
        return tile * torch.rsqrt(tile.pow(2).mean(-1, keepdim=True) + eps)

    return by_tiles(normalise, x, elementwise_rows(x.shape[1])) * weight


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up, elementwise. kind "silu" or "gelu_tanh"."""

    def activate(tile: Tensor) -> Tensor:
        return F.silu(tile) if kind == "silu" else F.gelu(tile, approximate="tanh")

    return by_tiles(activate, gate, elementwise_rows(gate.shape[1])) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, rotate-half form. x [T, heads, D]; cos, sin [T, D / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
