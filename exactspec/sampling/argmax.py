"""Row-wise argmax whose ties go to the lowest id, faster than the general operator on long rows of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

ARGMAX_BLOCK = 256  # ids: a maximum over blocks is vectorised, an argmax over a whole row is not


def lowest_argmax(rows: Tensor) -> Tensor:
    """Index of the greatest value of each row [N, W] -> [N] int64; ties to the lowest index.

    The first block that holds the maximum is found, then the first place in it: both steps keep the lowest index.
    """
    width = rows.shape[-1]
    blocks = width // ARGMAX_BLOCK
    if rows.device.type != "cpu" or blocks < 2:
        return rows.argmax(dim=-1)
    head = rows[:, : blocks * ARGMAX_BLOCK].unflatten(-1, (blocks, ARGMAX_BLOCK))
    block = head.amax(dim=-1).argmax(dim=-1)
    inside = head[torch.arange(rows.shape[0]), block]
    place = inside.argmax(dim=-1)
    best = block * ARGMAX_BLOCK + place
    if width == blocks * ARGMAX_BLOCK:
        return best
    tail_value, tail_place = rows[:, blocks * ARGMAX_BLOCK :].max(dim=-1)
    head_value = inside.gather(1, place[:, None])[:, 0]
    return torch.where(tail_value > head_value, tail_place + blocks * ARGMAX_BLOCK, best)
