"""Which rows of a step get logprobs, and from which rows of logits. The numbers come from the one logprob processor."""

from __future__ import annotations

import torch
from torch import Tensor

from exactspec.engine.batch import Block
from exactspec.engine.round import RoundResult
from exactspec.logprobs.processor import LogprobPlan, compute_logprobs
from exactspec.model.target import TargetModel
from exactspec.types import RunningRequest, TokenLogprob

PROMPT_ROWS_AT_ONCE = 64  # bounds the memory of prompt logits: 64 x V float32


def output_plan(request: RunningRequest) -> LogprobPlan | None:
    params = request.params
    if params.logprobs is None:
        return None
    return LogprobPlan(params.logprobs_kind, params.logprobs, tuple(params.logprob_token_ids or ()))


class Scorer:
    """Logprobs of prompt rows and of emitted rows."""

    def __init__(self, target: TargetModel, valid_vocab: int) -> None:
        self.target = target
        self.valid_vocab = valid_vocab

    def score_prompt(self, block: Block, hidden: Tensor) -> None:
        """Adds the entries that a prefill chunk makes known to block.request.prompt_logprobs, in order.

        The row at position p scores the prompt token at p + 1; position 0 has no row before it and gets a None.
        """
        request = block.request
        params = request.params
        if params.prompt_logprobs is None or request.num_output:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = []
        entries = request.prompt_logprobs
        if params.prompt_logprob_start == 0 and not entries:
            entries.append(TokenLogprob(request.token_ids[0], None))
        next_scored = params.prompt_logprob_start + len(entries)
        first = max(next_scored - 1, block.start)
        last = min(block.start + block.num_rows, request.prompt_len - 1)
        plan = LogprobPlan("raw", params.prompt_logprobs, tuple(params.logprob_token_ids or ()))
        for start in range(first, last, PROMPT_ROWS_AT_ONCE):
            end = min(start + PROMPT_ROWS_AT_ONCE, last)
            offset = block.first_row - block.start
            logits = self.target.logits(hidden[start + offset : end + offset])
            targets = request.token_ids[start + 1 : end + 1]
            entries.extend(compute_logprobs(logits, targets, [plan] * (end - start), self.valid_vocab))

    def score_outputs(self, result: RoundResult, emitted: list[int]) -> list[list[TokenLogprob] | None]:
        """Entries of the first emitted[i] tokens of each sampled block (None where none were asked for)."""
        scored: list[list[TokenLogprob] | None] = [None] * len(emitted)
        by_kind: dict[str, list[int]] = {}
        for number, block in enumerate(result.sampled_blocks):
            if block.request.params.logprobs is not None:
                by_kind.setdefault(block.request.params.logprobs_kind, []).append(number)
        for kind, numbers in by_kind.items():
            self._score_kind(kind, numbers, result, emitted, scored)
        return scored

    def _score_kind(
        self,
        kind: str,
        numbers: list[int],
        result: RoundResult,
        emitted: list[int],
        scored: list[list[TokenLogprob] | None],
    ) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        plans: list[LogprobPlan] = []
        for number in numbers:
            plan = output_plan(result.sampled_blocks[number].request)
            assert plan is not None
            first = result.first_logit_row[number]
            rows.extend(range(first, first + emitted[number]))
            tokens.extend(result.accepted[number].tokens[: emitted[number]])
            plans.extend([plan] * emitted[number])
        entries = compute_logprobs(self._domain(kind, rows, result), tokens, plans, self.valid_vocab)
        at = 0
        for number in numbers:
            scored[number] = entries[at : at + emitted[number]]
            at += emitted[number]

    def _domain(self, kind: str, rows: list[int], result: RoundResult) -> Tensor:
        assert result.logits is not None
        assert result.sampled is not None
        if kind == "scaled":
            return result.sampled.scaled(rows)
        if kind == "processed":
            return result.sampled.processed(rows)
        if len(rows) == result.logits.shape[0]:
            return result.logits
        return result.logits[torch.tensor(rows, dtype=torch.int64, device=result.logits.device)]
