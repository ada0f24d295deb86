"""Which rows of a step get logprobs, and from which rows of logits. The numbers come from the one logprob processor."""

from __future__ import annotations

from torch import Tensor

from exactspec.engine.batch import Block
from exactspec.engine.round import RoundResult
from exactspec.logprobs.processor import (
    LogprobPlan,
    compute_logprobs,
    lost_row,
    output_plan,
    prompt_plan,
    row_logprobs,
)
from exactspec.model.target import TargetModel
from exactspec.sampling.row_ops import row_ops
from exactspec.types import TokenLogprob

PROMPT_ROWS_AT_ONCE = 64  # bounds the memory of prompt logits: 64 x V float32


class Scorer:
    """Logprobs of prompt rows and of emitted rows."""

    def __init__(self, target: TargetModel, valid_vocab: int) -> None:
        self.target = target
        self.valid_vocab = valid_vocab
        self.ops = row_ops(target.backend)  # the sampler's own: prompt and output logprobs must share their bits

    def score_prompt(self, block: Block, hidden: Tensor) -> bool:
        """Adds the entries that a prefill chunk makes known to block.request.prompt_logprobs, in order. May be called
        again for the same chunk. False if one of them is of a row that is lost.

        The row at position p scores the prompt token at p + 1; position 0 has no row before it and gets a None.
        """
        request = block.request
        params = request.params
        plan = prompt_plan(params)
        if plan is None or request.num_output:
            return True
        if request.prompt_logprobs is None:
            request.prompt_logprobs = []
        entries = request.prompt_logprobs
        if params.prompt_logprob_start == 0 and not entries:
            entries.append(TokenLogprob(request.token_ids[0], None))
        next_scored = params.prompt_logprob_start + len(entries)
        first = max(next_scored - 1, block.start)
        last = min(block.start + block.num_rows, request.prompt_len - 1)
        for start in range(first, last, PROMPT_ROWS_AT_ONCE):
            end = min(start + PROMPT_ROWS_AT_ONCE, last)
            offset = block.first_row - block.start
            logits = self.target.logits(hidden[start + offset : end + offset])
            targets = request.token_ids[start + 1 : end + 1]
            entries.extend(compute_logprobs(logits, targets, [plan] * len(targets), self.valid_vocab, ops=self.ops))
        return lost_row(entries) is None

    def score_outputs(self, result: RoundResult) -> list[list[TokenLogprob] | None]:
        """Entries of all tokens that each sampled block may emit (None where none were asked for)."""
        emitted = [len(accept.tokens) for accept in result.accepted]
        scored: list[list[TokenLogprob] | None] = [None] * len(emitted)
        for number, entries in enumerate(result.scored):  # the round has scored them itself, by the same processor
            scored[number] = entries
        if result.sampled is None:
            return scored
        rows: list[int] = []
        tokens: list[int] = []
        plans: list[LogprobPlan] = []
        asked: list[int] = []
        for number, block in enumerate(result.sampled_blocks):
            plan = output_plan(block.request.params)
            if plan is not None and scored[number] is None:
                first = result.first_logit_row[number]
                rows.extend(range(first, first + emitted[number]))
                tokens.extend(result.accepted[number].tokens[: emitted[number]])
                plans.extend([plan] * emitted[number])
                asked.append(number)
        if not asked:
            return scored
        found = row_logprobs(result.sampled, rows, tokens, plans, self.valid_vocab)
        at = 0
        for number in asked:
            scored[number] = found[at : at + emitted[number]]
            at += emitted[number]
        return scored
