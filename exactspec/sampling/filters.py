"""top-k, top-p and min-p. The kept tokens are always a prefix of the row sorted by falling logit, ties by rising id.

Semantics, each on the distribution after temperature: top-k keeps exactly k tokens; top-p keeps the fewest tokens
whose probability, renormalised after top-k, sums to at least p (the token that crosses p is kept); min-p keeps
tokens whose probability is at least min_p times that of the most likely one.

Probabilities are summed as multiples of 2**-35 of the greatest one, in float64. Such sums are exact, so they do not
depend on the order or the grouping in which a device adds them, and the kept set depends on the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactspec.sampling.order import BLOCK, ID_BITS, block_maxima, sort_keys
from exactspec.types import SamplingParams

FIXED_POINT = 2.0**35
ROW_SHIFT = 32 + ID_BITS  # a row number above the bits of a sort key
CANDIDATE_ROWS = 32  # rows that are worked on together
# How far below the greatest logit candidates for top-p are looked for: tried in turn, the last keeps everything.
NUCLEUS_GAPS = (-7.0, -11.0, -math.inf)


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

    @property
    def is_empty(self) -> bool:
        return self.top_k <= 0 and self.top_p >= 1.0 and self.min_p <= 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        return cls(params.top_k, params.top_p, params.min_p)


def filter_dense(scaled: Tensor, filters: Sequence[Filters]) -> Tensor:
    """scaled [N, V] -> a copy with -inf outside the kept sets."""
    if scaled.device.type != "cpu" or scaled.shape[1] < 4 * BLOCK:
        return filter_by_sorting(scaled, filters)
    out = scaled.clone()
    busy = [i for i, f in enumerate(filters) if not f.is_empty]
    if busy:
        index = torch.tensor(busy)
        out.index_fill_(0, index, -math.inf)
        for row, ids in zip(busy, kept_ids(scaled[index], [filters[i] for i in busy]), strict=True):
            out[row, ids] = scaled[row, ids]
    return out


def filter_by_sorting(scaled: Tensor, filters: Sequence[Filters]) -> Tensor:
    """filter_dense by one sort of all rows, without a read-back: for GPUs and short rows, and the plain statement of
    the semantics."""
    width = scaled.shape[1]
    device = scaled.device
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(width, device=device)
    top_k = torch.tensor([f.top_k if 0 < f.top_k < width else width for f in filters], device=device)[:, None]
    top_p = torch.tensor([f.top_p for f in filters], dtype=torch.float64, device=device)[:, None]
    least = torch.tensor([f.least_gap for f in filters], dtype=torch.float32, device=device)[:, None]
    gaps = values - values[:, :1]
    keep = ranks < top_k
    mass = _fixed_point(gaps) * keep
    total = torch.where(top_k < width, mass.sum(-1, keepdim=True), _row_mass(scaled)[:, None])
    keep &= (mass.cumsum(-1) - mass < top_p * total) | (top_p >= 1.0)
    keep &= gaps >= least
    keep |= ranks == 0  # the most likely token always stays
    return torch.empty_like(scaled).scatter_(1, order, torch.where(keep, values, -math.inf))


def kept_ids(scaled: Tensor, filters: Sequence[Filters]) -> list[Tensor]:
    """Ids int64, by falling logit, that the filters keep of each scaled row [N, V]. Reads sizes back: for CPUs.

    Sorting a whole vocabulary is slow. Here only candidates are sorted: tokens above a cut that surely holds the kept
    set (top-k, min-p) or probably does (top-p; rows whose candidates fall short of p are tried again with a lower cut).
    """
    kept: list[Tensor] = []
    for start in range(0, len(filters), CANDIDATE_ROWS):
        part = filters[start : start + CANDIDATE_ROWS]
        rows = scaled[start : start + len(part)]
        found: dict[int, Tensor] = {}
        open_rows = list(range(len(part)))
        for gap in NUCLEUS_GAPS:
            if open_rows:
                picked = rows if len(open_rows) == len(part) else rows[torch.tensor(open_rows)]
                results = _kept_by_candidates(picked, [part[i] for i in open_rows], gap)
                found.update((i, ids) for i, ids in zip(open_rows, results, strict=True) if ids is not None)
                open_rows = [i for i in open_rows if i not in found]
        kept += [found[i] for i in range(len(part))]
    return kept


def _kept_by_candidates(rows: Tensor, filters: Sequence[Filters], nucleus_gap: float) -> list[Tensor | None]:
    """Kept ids of each row; None for a row whose candidates within `nucleus_gap` do not reach top_p."""
    width = rows.shape[1]
    maxima = block_maxima(rows)
    greatest = maxima.amax(dim=-1)
    cuts, is_final = _cuts(maxima, greatest, filters, nucleus_gap, width)
    row, ids, values = _candidates(rows, maxima, cuts)
    keys, order = ((row << ROW_SHIFT) + sort_keys(values, ids)).sort()
    row, ids, gaps = keys >> ROW_SHIFT, ids[order], (values - greatest[row])[order]

    counts = torch.bincount(row, minlength=len(filters))
    starts = counts.cumsum(0) - counts
    rank = torch.arange(row.shape[0]) - starts[row]
    keep = torch.ones_like(row, dtype=torch.bool)
    if any(0 < f.top_k < width for f in filters):
        keep &= rank < torch.tensor([f.top_k if 0 < f.top_k < width else width for f in filters])[row]
    short = [False] * len(filters)
    if any(f.top_p < 1.0 for f in filters):
        mass = _fixed_point(gaps) * keep
        row_mass = torch.zeros(len(filters), dtype=torch.float64).index_add_(0, row, mass)
        total = _total_mass(rows, row_mass, filters, width)
        top_p = torch.tensor([f.top_p for f in filters], dtype=torch.float64)
        target = top_p * total
        before = mass.cumsum(0) - mass - (row_mass.cumsum(0) - row_mass)[row]
        keep &= before < torch.where(top_p < 1.0, target, math.inf)[row]
        short = ((row_mass < target) & ~torch.tensor(is_final)).tolist()
    if any(f.min_p > 0.0 for f in filters):
        keep &= gaps >= torch.tensor([f.least_gap for f in filters])[row]
    keep |= rank == 0  # the most likely token always stays
    sizes = torch.bincount(row[keep], minlength=len(filters)).tolist()
    return [None if s else part for s, part in zip(short, ids[keep].split(sizes), strict=True)]


def _cuts(
    maxima: Tensor, greatest: Tensor, filters: Sequence[Filters], nucleus_gap: float, width: int
) -> tuple[Tensor, list[bool]]:
    """Logit [N] at and above which a row's candidates lie, and whether they surely hold the kept set.

    At least k elements reach the k-th greatest block maximum, so it is a cut for top-k.
    """
    blocks = maxima.shape[1]
    ks = [f.top_k if 0 < f.top_k < width else 0 for f in filters]
    largest = min(max(ks), blocks)
    leading = maxima.topk(largest, dim=-1).values if largest else maxima
    gaps = [nucleus_gap if k == 0 and f.top_p < 1.0 else -math.inf for k, f in zip(ks, filters, strict=True)]
    for i, f in enumerate(filters):
        if ks[i] == 0 and f.min_p > 0.0:
            gaps[i] = f.least_gap - 1e-3 * (1.0 - f.least_gap)  # rounding must not lose a token that min-p keeps
    cuts = greatest + torch.tensor(gaps)
    for i, k in enumerate(ks):
        if 0 < k <= blocks:
            cuts[i] = leading[i, k - 1]
    is_final = [k > 0 or gap != nucleus_gap or gap == -math.inf for k, gap in zip(ks, gaps, strict=True)]
    return cuts, is_final


def _candidates(rows: Tensor, maxima: Tensor, cuts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers, ids and values of all entries at or above their row's cut, end to end."""
    width = rows.shape[1]
    row, block = (maxima >= cuts[:, None]).nonzero().unbind(1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK)
    inside = ids.clamp(max=width - 1)
    values = rows.reshape(-1)[(row[:, None] * width + inside).flatten()].view(ids.shape)
    chosen = (values >= cuts[row, None]) & (ids < width)
    place, column = chosen.nonzero().unbind(1)
    return row[place], ids[place, column], values[place, column]


def _total_mass(rows: Tensor, candidate_mass: Tensor, filters: Sequence[Filters], width: int) -> Tensor:
    """What top-p's p is a share of [N]: the mass that top-k left, or the whole row's."""
    whole = [i for i, f in enumerate(filters) if f.top_p < 1.0 and not 0 < f.top_k < width]
    if not whole:
        return candidate_mass
    total = candidate_mass.clone()
    index = torch.tensor(whole)
    total[index] = _row_mass(rows if len(whole) == len(filters) else rows[index])
    return total


def _row_mass(rows: Tensor) -> Tensor:
    """Sum over each row [N, V] of exp(x - max), in fixed-point units, float64 [N]."""
    return FIXED_POINT / torch.softmax(rows, dim=-1).amax(dim=-1).double()


def _fixed_point(gaps: Tensor) -> Tensor:
    """exp(gap) in multiples of 2**-35."""
    return gaps.exp().double().mul_(FIXED_POINT).round_()
