"""top-k, top-p and min-p. The kept tokens are always a prefix of the row sorted by falling logit, ties by rising id.

Semantics, each on the distribution after temperature: top-k keeps exactly k tokens; top-p keeps the fewest tokens
whose probability, renormalised after top-k, sums to at least p (the token that crosses p is kept); min-p keeps
tokens whose probability is at least min_p times that of the most likely one.

Probability sums are taken in fixed point (multiples of 2**-35 in float64): such sums are exact, so they do not depend
on the order or the grouping in which a device adds them, and the kept set depends on the row alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exactspec.sampling.order import top_ids
from exactspec.types import SamplingParams

FIXED_POINT = 2.0**35
PROBABILITY_CUTS = (1e-3, 1e-5, 0.0)  # tried in turn by the nucleus search


@dataclass(frozen=True, slots=True)
class Filters:
    """top_k <= 0 means all, top_p 1.0 all, min_p 0.0 all."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def least_gap(self) -> float:
        """min_p in the log domain: kept are logits within this (negative) distance of the greatest one."""
        return math.log(self.min_p) if self.min_p > 0.0 else -math.inf

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        return cls(params.top_k, params.top_p, params.min_p)


def filter_dense(scaled: Tensor, filters: list[Filters]) -> Tensor:
    """scaled [N, V] -> the same with -inf outside the kept sets. One sort of all rows, no read-back: for GPUs.

    Also the plain statement of the semantics: `kept_ids` gives the same sets.
    """
    width = scaled.shape[1]
    device = scaled.device
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(width, device=device)
    top_k = torch.tensor([f.top_k if 0 < f.top_k < width else width for f in filters], device=device)[:, None]
    top_p = torch.tensor([f.top_p for f in filters], dtype=torch.float64, device=device)[:, None]
    least = torch.tensor([f.least_gap for f in filters], dtype=torch.float32, device=device)[:, None]
    keep = ranks < top_k
    mass = _fixed_point(torch.softmax(scaled, dim=-1).gather(1, order)).masked_fill_(~keep, 0.0)
    total = torch.where(top_k < width, mass.sum(-1, keepdim=True), FIXED_POINT)
    keep &= (mass.cumsum(-1) - mass < top_p * total) | (top_p >= 1.0)
    keep &= values - values[:, :1] >= least
    keep |= ranks == 0  # the most likely token always stays
    return torch.empty_like(scaled).scatter_(1, order, torch.where(keep, values, -math.inf))


def kept_ids(row: Tensor, filters: Filters) -> Tensor:
    """Ids [m] int64, rising, that the filters keep of one scaled row [V]; never empty. Reads sizes back: for CPUs."""
    if 0 < filters.top_k < row.shape[0]:
        ids = top_ids(row[None], filters.top_k)[0]
        if filters.top_p < 1.0:
            mass = _fixed_point(torch.softmax(row, dim=-1)[ids])
            ids = ids[: _prefix(mass, filters.top_p * float(mass.sum()))]
    elif filters.top_p < 1.0:
        ids = _nucleus(row, filters.top_p * FIXED_POINT)
    else:
        ids = (row - row.amax() >= filters.least_gap).nonzero()[:, 0]
        return ids
    if filters.min_p > 0.0:
        values = row[ids]
        ids = ids[values - values[0] >= filters.least_gap]
    return ids.sort().values


def _nucleus(row: Tensor, target: float) -> Tensor:
    """Ids, falling by logit, of the fewest tokens whose fixed-point mass reaches the target.

    Sorting a whole vocabulary is slow, so tokens above a probability cut are tried first. They are a prefix of the
    sorted row, so if their mass reaches the target the rest cannot matter.
    """
    probs = torch.softmax(row, dim=-1)
    for cut in PROBABILITY_CUTS:
        ids = (probs >= cut).nonzero()[:, 0]
        mass = _fixed_point(probs[ids])
        if cut > 0.0 and float(mass.sum()) < target:
            continue
        order = row[ids].sort(descending=True, stable=True).indices
        ids = ids[order]
        return ids[: _prefix(mass[order], target)]
    raise AssertionError("the last cut keeps everything")


def _fixed_point(probs: Tensor) -> Tensor:
    return probs.double().mul_(FIXED_POINT).round_()


def _prefix(mass: Tensor, target: float) -> int:
    """How many leading entries (at least one) it takes to reach the target; all if it is never reached."""
    return max(1, int((mass.cumsum(0) - mass < target).sum()))
