"""Rows sorted by falling value, ties by rising id: top-k lists and sort keys.

torch.topk leaves the order of ties open, and a stable sort of a long row is slow. Both are avoided by sorting unique
int64 keys, which have only one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # ids whose maximum stands for them in a first look
ID_BITS = 20  # ids of a key are below 2 ** 20
LARGEST_INT32 = 0x7FFFFFFF


def sort_keys(values: Tensor, ids: Tensor) -> Tensor:
    """Unique int64 keys, smallest first for the greatest float32 value, ties by the smallest id (below 2 ** 20).

    The bits of a float, read as an integer, are ordered like the float (negative ones in reverse); + 0.0 makes -0.0
    equal to 0.0.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = torch.where(bits >= 0, bits, bits ^ LARGEST_INT32).to(torch.int64)
    return ((LARGEST_INT32 - ordered) << ID_BITS) + ids


def block_maxima(rows: Tensor) -> Tensor:
    """Maximum of each block of ids [N, ceil(W / BLOCK)]; the last block may be short."""
    width = rows.shape[-1]
    whole = width // BLOCK
    maxima = rows[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).amax(dim=-1)
    if whole * BLOCK == width:
        return maxima
    return torch.cat([maxima, rows[:, whole * BLOCK :].amax(dim=-1, keepdim=True)], dim=-1)


def top_ids(rows: Tensor, k: int) -> Tensor:
    """Ids [N, k] int64 of the k greatest values of each row [N, W] float32, falling, ties by rising id.

    The k greatest elements lie in the k greatest blocks (by their maximum, ties to the earlier block): each block
    ahead of an element's own holds an element that is ahead of it.
    """
    width = rows.shape[-1]
    device = rows.device
    blocks = -(-width // BLOCK)
    if 4 * k >= blocks:
        keys = sort_keys(rows, torch.arange(width, device=device))
        return keys.sort(dim=-1).values[:, :k] & ((1 << ID_BITS) - 1)
    maxima = block_maxima(rows)
    best = _smallest(sort_keys(maxima, torch.arange(blocks, device=device)), k)
    ids = (best[:, :, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
    values = rows.gather(1, ids.clamp(max=width - 1))
    if blocks * BLOCK != width:
        values = torch.where(ids < width, values, -torch.inf)
    return _smallest(sort_keys(values, ids), k)


def _smallest(keys: Tensor, k: int) -> Tensor:
    """Ids of the k smallest keys of each row, in order."""
    return keys.topk(k, largest=False, sorted=True).values & ((1 << ID_BITS) - 1)
