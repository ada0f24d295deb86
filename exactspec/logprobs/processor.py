"""Logprobs of rows: the token's own, the k most likely, and chosen ids. Knows nothing of speculation.

The same function serves prompt rows, single rows and block rows. All kinds (contract C4) use one formula, log-softmax
in float32 as x - logsumexp(x), on rows in the kind's domain; it reduces within a row, so a row's numbers do not depend
on its neighbours.

Two halves: `pack_scores` stays on the device and may run inside a captured step, `unpack_scores` cuts what was read.
The normaliser runs over all V entries of a row, as the model's own softmax does; ids at and beyond valid_vocab are
padding and are never listed among the most likely.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowOps, RowScorer
from exactspec.types import LogprobsKind, SamplingParams, TokenLogprob

# What an impossible token's -inf becomes: JSON has no infinities. The most negative finite float32.
LOGPROB_FLOOR = torch.finfo(torch.float32).min
CHUNK_ROWS, CHUNK_ROWS_GPU = 16, 512
SMALL_TOP_K = 64  # rows that ask for more are worked on apart, so that they do not slow the others
Pairs = tuple[tuple[int, float], ...]  # (token id, logprob)


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

    Every number is finite: -inf is reported as LOGPROB_FLOOR; but a row that holds NaN or nothing but -inf is lost, its
    logprob NaN (`lost_row`). At most chunk_rows rows of intermediate results exist. `ops` are the device's row
    reductions (row_ops.row_ops(backend)); numbers are comparable, bit for bit, among calls with the same ones.
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


def pack_scores(
    rows: Tensor,
    token_ids: Tensor,
    top_k: int,
    valid_vocab: int,
    ops: RowOps,
    divisors: Tensor | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """The device's half of the processor, free of read-backs: all numbers of rows [N, V] that ask for at most top_k.

    token_ids [N] int64 -> [N, 1 + 2 * top_k] int32: the float32 bits of the logprobs of the token and of the top_k most
    likely (falling, ties by rising id, below valid_vocab), then the ids of those. `divisors` and `packed` (where the
    result goes) are for devices that are RowScorers: see there.
    """
    if isinstance(ops, RowScorer) and top_k <= ops.most_scored:
        return ops.score_rows(rows, token_ids, top_k, valid_vocab, divisors, packed)
    if divisors is not None or packed is not None:
        raise ValueError(f"divisors and packed need a device that scores rows itself, and top_k within it, got {top_k}")
    index = token_ids[:, None]
    if top_k:
        index = torch.cat([index, ops.topk_rows(rows[:, :valid_vocab], top_k)[1]], dim=1)
    values = (rows.gather(1, index) - ops.logsumexp_rows(rows)[1][:, None]).clamp_(min=LOGPROB_FLOOR)
    return torch.cat([values.view(torch.int32), index[:, 1:].int()], dim=1)


def unpack_scores(
    packed: np.ndarray, token_ids: Sequence[int], counts: Sequence[int], chosen: Sequence[Pairs] | None = None
) -> list[TokenLogprob]:
    """The host's half: entries from the rows of pack_scores, read back. counts[i] of row i's most likely are listed."""
    top_k = packed.shape[1] // 2
    numbers = packed[:, : 1 + top_k].view(np.float32)
    tops: Iterable[Pairs] = repeat(())
    if top_k:
        pairs = tuple(zip(packed[:, 1 + top_k :].flatten().tolist(), numbers[:, 1:].flatten().tolist(), strict=True))
        tops = [pairs[i * top_k : i * top_k + count] for i, count in enumerate(counts)]
    return list(map(TokenLogprob, token_ids, numbers[:, 0].tolist(), tops, chosen or repeat(())))


def lost_row(entries: Sequence[TokenLogprob]) -> int | None:
    """The first entry whose row held NaN or nothing finite: nothing from there on means anything."""
    for number, entry in enumerate(entries):
        if entry.logprob != entry.logprob:  # NaN
            return number
    return None


def _chunk(
    rows: Tensor, token_ids: list[int], plans: Sequence[LogprobPlan], valid_vocab: int, ops: RowOps
) -> list[TokenLogprob]:
    """One read-back for rows that ask for few alternatives, one for each that asks for many, one for chosen ids."""
    counts = [min(plan.top_k, valid_vocab) for plan in plans]
    small = [i for i, k in enumerate(counts) if k <= SMALL_TOP_K]
    large = [[i] for i, k in enumerate(counts) if k > SMALL_TOP_K]
    chosen = _chosen(rows, plans, ops)
    results: dict[int, TokenLogprob] = {}
    for part in ([small] if small else []) + large:
        picked = rows if len(part) == len(counts) else rows[torch.tensor(part, device=rows.device)]
        ids = [token_ids[i] for i in part]
        index = torch.tensor(ids, dtype=torch.int64, device=rows.device)
        packed = pack_scores(picked, index, max(counts[i] for i in part), valid_vocab, ops).cpu().numpy()
        found = unpack_scores(packed, ids, [counts[i] for i in part], [chosen[i] for i in part])
        results.update(zip(part, found, strict=True))
    return [results[i] for i in range(len(counts))]


def _chosen(rows: Tensor, plans: Sequence[LogprobPlan], ops: RowOps) -> list[Pairs]:
    """The asked ids of each row with their logprobs, in the asked order."""
    width = max(len(plan.token_ids) for plan in plans)
    if not width:
        return [()] * len(plans)
    index = torch.tensor(
        [[*plan.token_ids, *[0] * (width - len(plan.token_ids))] for plan in plans], device=rows.device
    )
    values = (rows.gather(1, index) - ops.logsumexp_rows(rows)[1][:, None]).clamp_(min=LOGPROB_FLOOR).tolist()
    return [tuple(zip(plan.token_ids, row, strict=False)) for plan, row in zip(plans, values, strict=True)]
