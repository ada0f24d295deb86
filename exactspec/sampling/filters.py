"""top-k, top-p and min-p. The kept tokens are always a prefix of the row sorted by falling logit, ties by rising id.

Semantics, each on the distribution after temperature: top-k keeps exactly k tokens; top-p keeps the fewest tokens
whose probability, renormalised after top-k, sums to at least p (the token that crosses p is kept); min-p keeps
tokens whose probability is at least min_p times that of the most likely one.

Probabilities are exp(x - logsumexp), as the logprobs report them, summed in multiples of 2**-35 in float64. Such sums
are exact, so they do not depend on the order or the grouping in which a device adds them, and the kept set depends on
the row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactspec.sampling.order import top_ids
from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowOps
from exactspec.types import SamplingParams

FIXED_POINT = 2.0**35
LEADING = (128, 1024)  # a row's most likely tokens that are looked at first; then all
SHORT_ROW = 256  # entries: shorter rows are sorted at once


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


def filter_dense(scaled: Tensor, filters: Sequence[Filters], ops: RowOps = TORCH_ROW_OPS) -> Tensor:
    """scaled [N, V] -> a copy with -inf outside the kept sets."""
    if scaled.device.type != "cpu" or scaled.shape[1] < SHORT_ROW:
        return filter_by_sorting(scaled, filters, ops)
    out = scaled.clone()
    busy = [i for i, f in enumerate(filters) if not f.is_empty]
    if busy:
        index = torch.tensor(busy)
        out.index_fill_(0, index, -math.inf)
        for row, ids in zip(busy, kept_ids(scaled[index], [filters[i] for i in busy], ops), strict=True):
            out[row, ids] = scaled[row, ids]
    return out


def filter_by_sorting(scaled: Tensor, filters: Sequence[Filters], ops: RowOps = TORCH_ROW_OPS) -> Tensor:
    """filter_dense by one sort of all rows, without a read-back: for GPUs and short rows."""
    width = scaled.shape[1]
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    keep = _keep(values, ops.logsumexp_rows(scaled)[1], filters, width)
    return torch.empty_like(scaled).scatter_(1, order, torch.where(keep, values, -math.inf))


def kept_ids(scaled: Tensor, filters: Sequence[Filters], ops: RowOps = TORCH_ROW_OPS) -> list[Tensor]:
    """Ids int64, by falling logit, that the filters keep of each scaled row [N, V]. Reads sizes back: for CPUs.

    Sorting a whole vocabulary is slow and the kept sets are prefixes of the sorted row, so prefixes of growing length
    are looked at until one holds the kept set.
    """
    width = scaled.shape[1]
    needs_lse = any(f.top_p < 1.0 for f in filters)
    lse = ops.logsumexp_rows(scaled)[1] if needs_lse else scaled.new_zeros(len(filters))
    found: dict[int, Tensor] = {}
    for length in (*(n for n in LEADING if n < width), width):
        rows = [i for i, f in enumerate(filters) if i not in found and min(f.top_k, width) <= length]
        if not rows:
            continue
        index = torch.tensor(rows)
        part = [filters[i] for i in rows]
        picked = scaled if len(rows) == len(filters) else scaled[index]
        values, ids = _leading(picked, length, ops)
        sizes = _keep(values, lse[index], part, width).sum(dim=-1).tolist()
        for place, (i, f, size) in enumerate(zip(rows, part, sizes, strict=True)):
            if size < length or length == width or 0 < f.top_k <= length:
                found[i] = ids[place, :size]
    return [found[i] for i in range(len(filters))]


def _leading(rows: Tensor, length: int, ops: RowOps) -> tuple[Tensor, Tensor]:
    """The `length` greatest values of each row and their ids; the whole row is quicker by a sort than by a top-k."""
    if length < rows.shape[1]:
        return ops.topk_rows(rows, length)
    ids = top_ids(rows, length)
    return rows.gather(1, ids), ids


def _keep(values: Tensor, lse: Tensor, filters: Sequence[Filters], width: int) -> Tensor:
    """bool [N, L]: which of a row's L greatest values (falling) the filters keep; always a prefix.

    `lse` [N] is the logsumexp of the whole rows of `width` entries. Rows with top-k must have L >= k.
    """
    device = values.device
    ranks = torch.arange(values.shape[1], device=device)
    keep = torch.ones_like(values, dtype=torch.bool)
    if any(0 < f.top_k < width for f in filters):
        top_k = torch.tensor([f.top_k if 0 < f.top_k < width else width for f in filters], device=device)[:, None]
        keep = ranks < top_k
    else:
        top_k = torch.full((len(filters), 1), width, device=device)
    if any(f.top_p < 1.0 for f in filters):
        top_p = torch.tensor([f.top_p for f in filters], dtype=torch.float64, device=device)[:, None]
        mass = (values - lse[:, None]).exp().double().mul_(FIXED_POINT).round_() * keep
        total = torch.where(top_k < width, mass.sum(-1, keepdim=True), FIXED_POINT)
        keep = keep & ((mass.cumsum(-1) - mass < top_p * total) | (top_p >= 1.0))
    if any(f.min_p > 0.0 for f in filters):
        least = torch.tensor([f.least_gap for f in filters], dtype=torch.float32, device=device)[:, None]
        keep = keep & (values - values[:, :1] >= least)
    return keep | (ranks == 0)  # the most likely token always stays
