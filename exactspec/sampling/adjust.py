"""Per-request changes to logits: penalties, logit bias, min_new_tokens and grammar masks, row by row of a block.

Row j of a block is adjusted as if the draft tokens before j had been accepted, so a block gives the very numbers
that decoding one token at a time would give. Order, as in SGLang: frequency and presence penalty, repetition
penalty, logit bias; then the -inf of min_new_tokens and of the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from exactspec.sampling.rows import RowGroup
from exactspec.types import RunningRequest, SamplingParams

NEG_INF = float("-inf")


class OutputHistory:
    """How often each token occurs in the committed output of one request (penalties read it)."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.num_tokens = 0
        self._counts: dict[int, int] = {}
        self.advance(tokens)

    def advance(self, tokens: Iterable[int]) -> None:
        """Add committed tokens."""
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
            self.num_tokens += 1

    def count(self, token: int) -> int:
        return self._counts.get(token, 0)

    def block_counts(self, draft_tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(ids [U] int64, counts [len(draft_tokens) + 1, U] float32): row j counts the drafts before j as well."""
        columns = {token: i for i, token in enumerate(self._counts)}
        for token in draft_tokens:
            columns.setdefault(token, len(columns))
        ids = torch.tensor(list(columns), dtype=torch.int64)
        counts = torch.zeros(len(draft_tokens) + 1, len(columns))
        for row, token in enumerate(draft_tokens):
            counts[row + 1, columns[token]] = 1.0
        counts = counts.cumsum(0)
        counts[:, : len(self._counts)] += torch.tensor(list(self._counts.values()), dtype=torch.float32)
        return ids, counts


def banned_until_min(params: SamplingParams, eos_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Ids that min_new_tokens holds back: EOS and stop ids. Stop ids outside the vocabulary can never come."""
    ids = {*eos_ids, *(params.stop_token_ids or ())}
    return sorted(i for i in ids if 0 <= i < vocab_size)


class AdjustedRows:
    """The step's logits [N, V] with some blocks of rows replaced. Tensors given out are read-only: they may be the
    logits themselves."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._blocks: dict[int, Tensor] = {}  # first row -> changed rows [n, V]
        self._all: Tensor | None = None

    def replace(self, first_row: int, block: Tensor) -> None:
        """Blocks must come in the order of their rows."""
        self._blocks[first_row] = block

    def all(self) -> Tensor:
        """All rows; the logits object itself when nothing was changed."""
        if self._all is None:
            self._all = self._assemble()
        return self._all

    def _assemble(self) -> Tensor:
        if not self._blocks:
            return self.logits
        pieces, at = [], 0
        for first, block in self._blocks.items():
            pieces += [self.logits[at:first], block]
            at = first + block.shape[0]
        pieces = [piece for piece in (*pieces, self.logits[at:]) if piece.shape[0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def select(self, rows: Sequence[int]) -> Tensor:
        """Adjusted rows [len(rows), V]. Rows next to each other are not copied."""
        return select_rows(self.all(), rows)


def select_rows(rows: Tensor, indexes: Sequence[int]) -> Tensor:
    """rows[indexes]; a view where the indexes are consecutive, the object itself where they are all."""
    count = len(indexes)
    first = indexes[0] if count else 0
    if all(index == first + i for i, index in enumerate(indexes)):
        return rows if count == rows.shape[0] else rows.narrow(0, first, count)
    return rows.index_select(0, torch.tensor(list(indexes), device=rows.device))


def _needs_adjusting(params: SamplingParams, first_position: int, has_mask: bool) -> bool:
    return has_mask or bool(params.logit_bias) or params.has_penalties or first_position < params.min_new_tokens


def adjust_rows(logits: Tensor, groups: Sequence[RowGroup], eos_ids: Iterable[int]) -> AdjustedRows:
    """Apply each request's penalties, bias and masks to its rows of logits [N, V] float32 (left as they are)."""
    adjusted = AdjustedRows(logits)
    eos = tuple(eos_ids)
    start = 0
    for group in groups:
        stop = start + group.num_rows
        params = group.params
        if _needs_adjusting(params, group.first_position, group.grammar_masks is not None):
            block = logits[start:stop].clone()
            if params.has_penalties:
                history = _history_of(group.request, group.first_position)
                _apply_penalties(block, params, *history.block_counts(group.draft_tokens))
            _apply_bias(block, params)
            _apply_masks(block, params, group.first_position, eos, group.grammar_masks)
            adjusted.replace(start, block)
        start = stop
    return adjusted


def _history_of(request: RunningRequest, first_position: int) -> OutputHistory:
    history = request.history
    if not isinstance(history, OutputHistory) or history.num_tokens != first_position:
        held = history.num_tokens if isinstance(history, OutputHistory) else None
        raise RuntimeError(
            f"request {request.request.request_id}: penalties need the history of {first_position} output tokens, "
            f"it holds {held}"
        )
    return history


def _apply_penalties(block: Tensor, params: SamplingParams, ids: Tensor, counts: Tensor) -> None:
    """In place. block [n, V], ids [U], counts [n, U]. Presence counts once; repetition divides positive logits and
    multiplies negative ones."""
    if not ids.numel():
        return
    ids, counts = ids.to(block.device), counts.to(block.device)
    seen = counts > 0
    values = block.index_select(1, ids)
    linear = counts * params.frequency_penalty + seen.to(counts.dtype) * params.presence_penalty
    penalised = values - linear
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        penalised = torch.where(penalised > 0, penalised / factor, penalised * factor)
    block.index_copy_(1, ids, torch.where(seen, penalised, values))


def _apply_bias(block: Tensor, params: SamplingParams) -> None:
    if not params.logit_bias:
        return
    ids = torch.tensor([int(i) for i in params.logit_bias], dtype=torch.int64, device=block.device)
    bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=block.device)
    block.index_copy_(1, ids, block.index_select(1, ids) + bias)


def _apply_masks(
    block: Tensor, params: SamplingParams, first_position: int, eos_ids: Iterable[int], grammar_masks: Tensor | None
) -> None:
    """In place: -inf where min_new_tokens or the grammar forbids.

    Where the grammar allows nothing but what min_new_tokens holds back, the grammar wins: the output cannot be
    continued, and an end before min_new_tokens is better than a token that breaks the grammar.
    """
    held_rows = min(block.shape[0], max(0, params.min_new_tokens - first_position))
    banned = banned_until_min(params, eos_ids, block.shape[1]) if held_rows else []
    if grammar_masks is None:
        if banned:
            block[:held_rows].index_fill_(1, torch.tensor(banned, device=block.device), NEG_INF)
        return
    allowed = grammar_masks.to(block.device)
    if banned:
        held = allowed[:held_rows].index_fill(1, torch.tensor(banned, device=block.device), False)
        can_go_on = held.any(dim=1, keepdim=True)
        allowed = torch.cat([torch.where(can_go_on, held, allowed[:held_rows]), allowed[held_rows:]])
    block.copy_(torch.where(allowed, block, NEG_INF))


class HasEosIds(Protocol):
    """A Sampler."""

    eos_ids: frozenset[int]


def make_draft_adjust(
    requests: Sequence[RunningRequest], sampler: HasEosIds
) -> Callable[[int, Tensor, Tensor], Tensor] | None:
    """The hook by which drafters see penalties, bias and grammar; None when no request needs one.

    The returned function maps (k, logits [R, V], draft tokens before k [R, k]) to adjusted logits [R, V]. It follows
    the target's own adjustment of row k; the input is left as it is.
    """
    eos = tuple(sampler.eos_ids)
    indexes = [r for r, request in enumerate(requests) if _draft_needs(request)]
    if not indexes:
        return None
    reads_drafts = any(requests[r].params.has_penalties or requests[r].grammar is not None for r in indexes)

    def adjust(k: int, logits: Tensor, before: Tensor) -> Tensor:
        adjusted = logits.clone()
        prefixes = before.tolist() if reads_drafts and k else [[]] * len(requests)
        for r in indexes:
            _adjust_draft_row(adjusted[r : r + 1], requests[r], k, prefixes[r], eos)
        return adjusted

    return adjust


def _draft_needs(request: RunningRequest) -> bool:
    return _needs_adjusting(request.params, request.num_output, request.grammar is not None)


def _adjust_draft_row(row: Tensor, request: RunningRequest, k: int, prefix: list[int], eos_ids: Iterable[int]) -> None:
    params = request.params
    if params.has_penalties:
        ids, counts = _history_of(request, request.num_output).block_counts(prefix)
        _apply_penalties(row, params, ids, counts[-1:])
    _apply_bias(row, params)
    mask = request.grammar.masks(prefix)[-1:] if request.grammar is not None else None
    _apply_masks(row, params, request.num_output + k, eos_ids, mask)
