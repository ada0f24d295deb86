"""Logprobs of rows: the token's own, the k most likely, and chosen ids. Knows nothing of speculation.

The same function serves prompt rows, single rows and block rows. All kinds (contract C4) use one formula, log-softmax
in float32 as x - logsumexp(x), on rows in the kind's domain; it reduces within a row, so a row's numbers do not depend
on its neighbours.
The normaliser runs over all V entries of a row, as the model's own softmax does; ids at and beyond valid_vocab are
padding and are never listed among the most likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exactspec.errors import ExactSpecError
from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowOps
from exactspec.types import LogprobsKind, SamplingParams, TokenLogprob

# What an impossible token's -inf becomes: JSON has no infinities. The most negative finite float32.
LOGPROB_FLOOR = torch.finfo(torch.float32).min
CHUNK_ROWS, CHUNK_ROWS_GPU = 16, 512
SMALL_TOP_K = 64  # rows that ask for more are worked on apart, so that they do not slow the others


@dataclass(frozen=True)
class LogprobPlan:
    """What one row must report: kind, number of most likely alternatives, chosen ids in the asked order."""

    kind: LogprobsKind
    top_k: int = 0
    token_ids: tuple[int, ...] = ()


class LogitRows(Protocol):
    """A step's logits in the domain of each kind (a SampleResult)."""

    logits: Tensor
    ops: RowOps

    def raw(self, rows: Sequence[int]) -> Tensor: ...
    def scaled(self, rows: Sequence[int]) -> Tensor: ...
    def processed(self, rows: Sequence[int]) -> Tensor: ...


def output_plan(params: SamplingParams) -> LogprobPlan | None:
    """Plan of a request's output rows; None when it asked for no logprobs."""
    if params.logprobs is None:
        return None
    return LogprobPlan(params.logprobs_kind, params.logprobs, tuple(params.logprob_token_ids or ()))


def prompt_plan(params: SamplingParams) -> LogprobPlan | None:
    """Plan of a request's prompt rows (always raw); None when it asked for none."""
    if params.prompt_logprobs is None:
        return None
    return LogprobPlan("raw", params.prompt_logprobs, tuple(params.logprob_token_ids or ()))


def rows_at_once(device: torch.device) -> int:
    """Rows of a chunk: few on a CPU, whose caches hold them; many on a GPU, where each chunk costs read-backs."""
    return CHUNK_ROWS if device.type == "cpu" else CHUNK_ROWS_GPU


def compute_logprobs(
    rows: Tensor,
    token_ids: Sequence[int] | Tensor,
    plans: Sequence[LogprobPlan],
    valid_vocab: int,
    chunk_rows: int | None = None,
    ops: RowOps = TORCH_ROW_OPS,
) -> list[TokenLogprob]:
    """rows [N, V] logits in the domain of the plans' kind; token_ids and plans one per row.

    Every number is finite: -inf is reported as LOGPROB_FLOOR. At most chunk_rows rows of intermediate results exist.
    `ops` are the device's row reductions (row_ops.row_ops(backend)); numbers are comparable, bit for bit, among calls
    with the same ones. Raises ExactSpecError when a row holds NaN or nothing but -inf.
    """
    ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
    if not len(ids) == len(plans) == rows.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows, {len(ids)} token_ids and {len(plans)} plans do not match")
    results: list[TokenLogprob] = []
    chunk_rows = chunk_rows or rows_at_once(rows.device)
    for start in range(0, len(ids), chunk_rows):
        stop = min(start + chunk_rows, len(ids))
        results += _chunk(rows[start:stop], ids[start:stop], plans[start:stop], valid_vocab, ops)
    return results


def row_logprobs(
    source: LogitRows,
    rows: Sequence[int],
    token_ids: Sequence[int],
    plans: Sequence[LogprobPlan],
    valid_vocab: int,
    chunk_rows: int | None = None,
) -> list[TokenLogprob]:
    """compute_logprobs for chosen rows of a step whose plans may differ in kind; results in the order of `rows`."""
    results: list[TokenLogprob | None] = [None] * len(rows)
    chunk_rows = chunk_rows or rows_at_once(source.logits.device)
    domains = {"raw": source.raw, "scaled": source.scaled, "processed": source.processed}
    for kind, domain in domains.items():
        places = [i for i, plan in enumerate(plans) if plan.kind == kind]
        for start in range(0, len(places), chunk_rows):
            part = places[start : start + chunk_rows]
            found = compute_logprobs(
                domain([rows[i] for i in part]),
                [token_ids[i] for i in part],
                [plans[i] for i in part],
                valid_vocab,
                chunk_rows,
                ops=source.ops,
            )
            for i, entry in zip(part, found, strict=True):
                results[i] = entry
    return [entry for entry in results if entry is not None]


def _chunk(
    rows: Tensor, token_ids: list[int], plans: Sequence[LogprobPlan], valid_vocab: int, ops: RowOps
) -> list[TokenLogprob]:
    """One read-back for the values: per row the token, then the top ids, then the chosen ids, padded to one width."""
    tops = _top_lists(rows, [min(plan.top_k, valid_vocab) for plan in plans], valid_vocab, ops)
    wanted = [[token, *top, *plan.token_ids] for token, top, plan in zip(token_ids, tops, plans, strict=True)]
    width = max(len(ids) for ids in wanted)
    index = torch.tensor([ids + ids[:1] * (width - len(ids)) for ids in wanted], device=rows.device)
    lse = ops.logsumexp_rows(rows)[1]
    values = (rows.gather(1, index) - lse[:, None]).clamp_(min=LOGPROB_FLOOR).tolist()
    return [_entry(ids, row_values, len(top)) for ids, row_values, top in zip(wanted, values, tops, strict=True)]


def _entry(ids: list[int], values: list[float], num_top: int) -> TokenLogprob:
    if math.isnan(values[0]):
        raise ExactSpecError(f"logits: the row of token {ids[0]} holds NaN or no finite entry")
    pairs = tuple(zip(ids, values, strict=False))
    return TokenLogprob(ids[0], values[0], pairs[1 : 1 + num_top], pairs[1 + num_top :])


def _top_lists(rows: Tensor, counts: list[int], valid_vocab: int, ops: RowOps) -> list[list[int]]:
    """Ids of the counts[i] most likely tokens of each row."""
    lists: list[list[int]] = [[] for _ in counts]
    small = [i for i, k in enumerate(counts) if 0 < k <= SMALL_TOP_K]
    large = [[i] for i, k in enumerate(counts) if k > SMALL_TOP_K]
    for part in ([small] if small else []) + large:
        picked = rows if len(part) == len(counts) else rows[torch.tensor(part, device=rows.device)]
        found = ops.topk_rows(picked[:, :valid_vocab], max(counts[i] for i in part))[1].tolist()
        for i, ids in zip(part, found, strict=True):
            lists[i] = ids[: counts[i]]
    return lists
