"""One round over a step's plan: draft -> choose verify lengths -> forward -> draw -> accept. Holds no request
state of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from exactspec.backend.base import KVPool
from exactspec.draft.base import DraftBatch, Drafter
from exactspec.engine.batch import Block, build_batch, page_rows
from exactspec.engine.verify_policy import VerifyPolicy
from exactspec.model.target import TargetModel
from exactspec.sampling.adjust import make_draft_adjust
from exactspec.sampling.rows import RowGroup
from exactspec.sampling.sampler import Sampler, SampleResult
from exactspec.scheduler.scheduler import StepPlan
from exactspec.types import ForwardBatch, Proposal, RunningRequest, TokenLogprob
from exactspec.verify.accept import AcceptResult


@dataclass(slots=True)
class RoundResult:
    """What a round found out. `accepted[i]` belongs to `sampled_blocks[i]`, whose first logit row is
    `first_logit_row[i]`. `scored[i]`, where it is given, are the logprob entries of all that block i may emit.
    """

    blocks: list[Block]
    hidden: Tensor  # [T, H] after the final norm
    logits: Tensor | None  # [N, V] float32, raw
    sampled: SampleResult | None
    sampled_blocks: list[Block]
    first_logit_row: list[int]
    accepted: list[AcceptResult]
    scored: list[list[TokenLogprob] | None] = field(default_factory=list)


@dataclass(slots=True)
class DecodedRound:
    """What a round of decodes alone found out, in columns, one entry for each request: most rounds are such, and with
    hundreds of requests the host has no time for objects that nobody keeps. Nobody wants its rows, and no request has
    penalties or a grammar.
    """

    requests: list[RunningRequest]
    tokens: list[list[int]]  # accepted drafts, then one token that the target drew; whoever commits them owns the lists
    accepted: list[int]  # drafts
    verified: list[int]
    drafted: list[int]
    scored: list[list[TokenLogprob] | None]  # logprob entries of the tokens, for those who asked


class Flight(Protocol):
    """A decode round that is launched and not yet read."""

    @property
    def requests(self) -> list[RunningRequest]: ...

    def read(self, live: Set[RunningRequest]) -> RoundResult | DecodedRound:
        """Waits for the round and tells what it found out about the requests that are live; the rest is dropped."""
        ...


class RoundRunner:
    """Runs rounds with one target, one drafter, one sampler and one verify policy."""

    postpones = True  # the drafter may learn of steps without drafts when it is next asked for some

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        sampler: Sampler,
        policy: VerifyPolicy,
        pool: KVPool,
        page_size: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.sampler = sampler
        self.policy = policy
        self.pool = pool
        self.page_size = page_size
        self.device = target.backend.device

    def can_launch(self, plan: StepPlan) -> bool:
        """Whether the plan's round, and those of any part of its requests after it, may be launched unread."""
        return False

    def launch(self, decodes: list[RunningRequest], behind: Flight | None = None) -> Flight:
        """Starts a decode round without waiting for it. Only after can_launch has agreed.

        behind: the unread round just before it, all of whose accepted tokens count as committed; `decodes` are among
        its requests, with pages for both rounds. At most one round may be unread.
        """
        raise NotImplementedError(f"{type(self).__name__} reads every round before the next")

    def run(self, plan: StepPlan) -> RoundResult:
        began, caught_up = time.perf_counter(), self.drafter.catch_up_seconds
        drafting = self._can_draft(plan.decodes) and self.policy.wants_drafts(plan)
        proposal = self._propose(plan.decodes) if drafting else None
        caught_up = self.drafter.catch_up_seconds - caught_up  # due to steps before: no part of what a draft costs
        blocks = self._build_blocks(plan, proposal)
        drafted = time.perf_counter()
        batch = build_batch(blocks, self.page_size, self.device)
        hidden, captured = self._forward(batch)
        if drafting or not (self.postpones and self.policy.skips_drafts):
            self.drafter.observe(batch, captured)
        else:
            self.drafter.postpone(batch, captured)
        result = self._draw(blocks, batch, hidden, proposal)
        if not plan.prefills:
            ended, rows = time.perf_counter(), sum(len(block.token_ids) for block in blocks)
            self.policy.note_times(rows, ended - drafted, len(plan.decodes) * drafting, drafted - began - caught_up)
        return result

    def forget(self) -> None:
        """A step has failed: what the runner believes a device to know may be false."""

    def _can_draft(self, decodes: Sequence[RunningRequest]) -> bool:
        """Somebody has a use for drafts. Else nothing is made and its time says nothing of what drafts cost."""
        return self.drafter.gamma > 0 and any(request.draft_room for request in decodes)

    def _forward(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        return self.target.forward(batch, self.pool, self.drafter.capture_layers)

    def _propose(self, decodes: Sequence[RunningRequest]) -> Proposal:
        anchors = [request.token_ids[-1] for request in decodes]
        positions = [request.kv_len for request in decodes]
        batch = DraftBatch(
            requests=decodes,
            anchor_ids=torch.tensor(anchors, dtype=torch.int64, device=self.device),
            anchor_positions=torch.tensor(positions, dtype=torch.int32, device=self.device),
            page_table=torch.from_numpy(page_rows(decodes)).to(self.device),
            page_size=self.page_size,
            max_kv_len=max(positions),
            want_probs=self.policy.needs_draft_probs,
            want_confidence=self.policy.wants_confidence,
            adjust=make_draft_adjust(decodes, self.sampler),
            noise=self.sampler.noise.rows,
        )
        return self.drafter.propose(batch)

    def _build_blocks(self, plan: StepPlan, proposal: Proposal | None) -> list[Block]:
        """Decodes first, in the order of the plan, so that block i is row i of the proposal."""
        lengths = self.policy.verify_lens(plan, proposal)
        drafts = proposal.token_ids.tolist() if proposal is not None else []
        blocks = []
        for number, request in enumerate(plan.decodes):
            verified = drafts[number][: lengths[number]] if drafts else []
            rows = [request.token_ids[-1], *verified]
            proposed = proposal.lengths[number] if proposal is not None else 0
            blocks.append(Block(request, request.kv_len, rows, len(rows), drafts=verified, num_drafted=proposed))
        for chunk in plan.prefills:
            request = chunk.request
            rows = request.token_ids[chunk.start : chunk.end]
            draws = int(chunk.emits and wants_draw(request))
            blocks.append(Block(request, chunk.start, rows, draws, is_prefill=True))
        return blocks

    def _draw(self, blocks: list[Block], batch: ForwardBatch, hidden: Tensor, proposal: Proposal | None) -> RoundResult:
        drawn = [block for block in blocks if block.num_sampled]
        if not drawn:
            return RoundResult(blocks, hidden, None, None, [], [], [])
        logits = self.target.logits(hidden[batch.logit_rows])
        groups = [
            RowGroup(
                request=block.request,
                first_position=block.request.num_output,
                draft_tokens=block.drafts,
                grammar_masks=block.request.grammar.masks(block.drafts) if block.request.grammar is not None else None,
            )
            for block in drawn
        ]
        sampled = self.sampler.sample(logits, groups)
        accepted = self.policy.accept(sampled, groups, proposal)
        starts, row = [], 0
        for block in drawn:
            starts.append(row)
            row += block.num_sampled
        return RoundResult(blocks, hidden, logits, sampled, drawn, starts, accepted)


def wants_draw(request: RunningRequest) -> bool:
    """Scoring requests (no output asked) draw a token only to report it."""
    return request.max_tokens > request.prompt_len or request.params.logprobs is not None
