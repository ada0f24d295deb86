"""Top-k of rows with ties to the lowest id. torch.topk leaves the order of ties open, and a full sort is slow."""

from __future__ import annotations

import torch
from torch import Tensor

TOP_BLOCK = 64


def top_ids(rows: Tensor, k: int) -> Tensor:
    """Ids [N, k] int64 of the k greatest values of each row [N, W], falling, ties by rising id.

    The k greatest elements lie in the k greatest blocks (by their maximum, ties to the earlier block): each block
    ahead of an element's own holds an element that is ahead of it.
    """
    width = rows.shape[-1]
    blocks = -(-width // TOP_BLOCK)
    if k >= width or 4 * k >= blocks:
        return rows.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    maxima = _block_maxima(rows, TOP_BLOCK)
    best_blocks = maxima.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values
    ids = (best_blocks[:, :, None] * TOP_BLOCK + torch.arange(TOP_BLOCK, device=rows.device)).flatten(1)
    inside = ids < width
    values = torch.where(inside, rows.gather(1, ids.clamp(max=width - 1)), -torch.inf)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids.gather(1, order)


def _block_maxima(rows: Tensor, block: int) -> Tensor:
    """Maximum of each block of ids [N, ceil(W / block)]; the last block may be short."""
    width = rows.shape[-1]
    whole = width // block
    maxima = rows[:, : whole * block].unflatten(-1, (whole, block)).amax(dim=-1)
    if whole * block == width:
        return maxima
    return torch.cat([maxima, rows[:, whole * block :].amax(dim=-1, keepdim=True)], dim=-1)
