"""Counters of the engine: what a dashboard or a bench wants to know. Reading them costs nothing the step would
notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exactspec.types import StepOutput

if TYPE_CHECKING:
    from exactspec.cache.manager import CacheManager
    from exactspec.engine.round import RoundResult
    from exactspec.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `accept_length` is tokens per round, bonus included, since the last flush; None before any round."""

    num_running: int
    num_waiting: int
    num_pages: int
    free_pages: int
    cached_pages: int
    num_steps: int
    prompt_tokens: int  # rows prefilled
    cached_tokens: int  # prompt tokens taken from the prefix cache
    output_tokens: int
    num_finished: int
    num_retractions: int
    num_rounds: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    accept_length: float | None
    accepted_histogram: dict[int, int] = field(default_factory=dict)  # drafts accepted in a round -> rounds
    verified_histogram: dict[int, int] = field(default_factory=dict)  # drafts verified in a round -> rounds


class EngineMetrics:
    """Running totals."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.num_finished = 0
        self.reset_averages()

    def reset_averages(self) -> None:
        """Forgets the acceptance figures (cache flush)."""
        self.num_drafted = 0
        self.accepted: Counter[int] = Counter()
        self.verified: Counter[int] = Counter()
        self.committed = 0

    def note_step(self, result: RoundResult, outputs: Sequence[StepOutput]) -> None:
        accepted, verified, drafted = [], [], 0
        for block, accept in zip(result.sampled_blocks, result.accepted, strict=True):
            if not block.is_prefill:
                accepted.append(accept.num_accepted)
                verified.append(len(block.drafts))
                drafted += block.num_drafted
        self.note_rounds(accepted, verified, drafted)
        if len(result.blocks) > len(accepted):
            self.prompt_tokens += sum(block.num_rows for block in result.blocks if block.is_prefill)
        self.note_outputs(outputs)

    def note_rounds(self, accepted: Sequence[int], verified: Sequence[int], drafted: int) -> None:
        """The drafts of a step: how many were accepted and verified, by decoding request; drafted in all."""
        self.accepted.update(accepted)
        self.verified.update(verified)
        self.num_drafted += drafted
        self.committed += sum(accepted) + len(accepted)  # and one token of the target's own each

    def note_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """The end of a step."""
        self.num_steps += 1
        self.output_tokens += sum([len(output.token_ids) for output in outputs])
        for output in outputs:
            if output.finish is not None:
                self.num_finished += 1
                self.cached_tokens += output.stats.cached_tokens

    def snapshot(self, scheduler: Scheduler, cache: CacheManager) -> EngineStats:
        rounds = sum(self.accepted.values())
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_pages=cache.num_pages,
            free_pages=cache.num_free,
            cached_pages=cache.num_cached,
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            num_finished=self.num_finished,
            num_retractions=scheduler.num_retractions,
            num_rounds=rounds,
            num_drafted=self.num_drafted,
            num_verified=sum(length * rounds for length, rounds in self.verified.items()),
            num_accepted=sum(length * rounds for length, rounds in self.accepted.items()),
            accept_length=self.committed / rounds if rounds else None,
            accepted_histogram=dict(self.accepted),
            verified_histogram=dict(self.verified),
        )
