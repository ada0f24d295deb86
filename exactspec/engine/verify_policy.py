"""How many drafts are verified and which rule accepts them.

With coupled acceptance no choice here can change a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.live_costs import LiveCosts
from exactspec.sampling.rows import RowGroup, first_rows
from exactspec.sampling.sampler import SampleResult
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Proposal, TokenSource
from exactspec.verify.accept import AcceptResult, accept_coupled, accept_rejection
from exactspec.verify.plan import plan_confidence, rates_ahead
from exactspec.verify.survival import AcceptanceEstimate, Floats, RecentBlocks, survival_rows


class VerifyPolicy(Protocol):
    """What a round asks of its policy.

    A round that is read before the next begins asks `wants_drafts` and, knowing the drafts, `verify_lens`. One that is
    launched unread asks `drafts_ahead`, and tells with `note_round` what came of it.
    """

    needs_draft_probs: bool
    reads_confidence: bool  # the proposal's, in some rounds at least
    skips_drafts: bool  # wants_drafts is not always True
    learns: bool  # wants to be told of rounds and their times

    @property
    def wants_confidence(self) -> bool:
        """Does `verify_lens` read the confidence of the drafts that `wants_drafts` has just asked for?"""
        ...

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Is drafting worth its time in this step?"""
        ...

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        """Draft tokens to verify for each decoding request of the plan, at most the proposal's lengths."""
        ...

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        """One result per group. Decoding groups come first, in the order of the proposal's rows."""
        ...

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        """How many drafts the plan's decode round verifies in all, the likeliest of the batch: one of `choices`, which
        rise from 0 (nothing is drafted). base_rows: rows that the round has anyway, padding included."""
        ...

    def note_round(self, survival: Floats | None, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """A drafted round that was decided ahead, by request: survival [R, G] of its drafts by their confidence (None:
        there is none), how many were verified, how many accepted."""
        ...

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        """What a decode step without prefill took: `rows` of the target, and drafts for `drafted` requests."""
        ...


class VerifyAll:
    """Verifies every draft and accepts by `acceptance` ("coupled" or "rejection")."""

    reads_confidence = wants_confidence = False
    skips_drafts = False
    learns = False

    def __init__(self, acceptance: str = "coupled") -> None:
        self.needs_draft_probs = acceptance == "rejection"

    def wants_drafts(self, plan: StepPlan) -> bool:
        return True

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        return list(proposal.lengths) if proposal is not None else [0] * len(plan.decodes)

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        if self.needs_draft_probs:
            return accept_rejection(sampled, groups, proposal.probs if proposal is not None else None)
        return accept_coupled(sampled.token_ids, groups)

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        return choices[-1]

    def note_round(self, survival: Floats | None, verified: Sequence[int], accepted: Sequence[int]) -> None:
        pass

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        pass


class VerifyByConfidence:
    """Verifies the prefixes that are worth their rows (verify/plan.py) and drafts only while drafting pays.

    Prefix survival comes from the draft's confidence, or, where it has none, from the acceptance of past rounds. Costs
    come from `costs`, which follow the times of real steps. Every request keeps its bonus row.

    A round that is decided ahead knows the confidences of earlier rounds only: they say how many drafts are worth
    verifying in all. Which, is then chosen by its own.

    Where verifying all of them is expected to be as good as any number, all are verified, and confidence is read in one
    round of DECIDE_EVERY: asking and planning take their time, too.
    """

    reads_confidence = True
    skips_drafts = True
    learns = True
    PROBE_EVERY = 512  # steps: while drafting does not pay, how often to look again
    HOPELESS = 0.6  # drafting that is expected to give less than this share of plain steps is not tried
    TRIALS = 0.005  # share of all decode time that may be lost by trying drafts where they are not expected to pay
    TRIALS_AT_START = 1.0  # and beyond that, in times of a step of one row
    DECIDE_EVERY = 8  # steps at one load that are decided together
    ADVANTAGE = 1.05  # what drafting must be expected to gain before it begins; it goes on while it gains anything
    ALIKE = 0.97  # numbers of drafts whose expected speeds differ by less are alike: the most are verified
    ALIKE_AT_FIRST = 0.9  # the same, ahead, for the first FEW rounds with so many base rows: a device may have to
    FEW = 2048  # prepare each size of a round, which is time lost where a batch only passes through

    def __init__(self, acceptance: str, gamma: int, costs: LiveCosts) -> None:
        self.needs_draft_probs = acceptance == "rejection"
        self.costs = costs
        self.gamma = gamma
        self.estimate = AcceptanceEstimate(gamma)
        self.blocks = RecentBlocks()
        self.num_undrafted_steps = 0  # in a row, trials among them
        self._num_drafted_steps = 0  # in a row
        self._load: tuple[int, int] | None = None  # (requests, prefill rows) of the last decision
        self._all_alike = False  # by it: verifying all drafts is as good as any number
        self.wants_confidence = True
        self._seconds = 0.0  # of all decode steps, as the costs say: ranks must decide alike
        self._lost = 0.0  # of these, on trials
        self._confident: list[list[float]] = []  # survival of the present round's drafts by their confidence
        self._accept = VerifyAll(acceptance).accept
        self._ahead: tuple[int, int] | None = None  # base rows and drafts: the last decision ahead
        self._num_ahead = 0  # rounds that it has served
        self._num_rounds: Counter[int] = Counter()  # drafted ones that were decided ahead, by base rows

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Compares the expected tokens per second with and without drafting, by the blocks of past rounds."""
        load = (len(plan.decodes), plan.num_prefill_rows)
        if load == self._load and self._is_settled():
            self._count(self._num_drafted_steps > 0)
            self.wants_confidence = not self._all_alike
            return self._num_drafted_steps > 0
        self._load, self.wants_confidence = load, True
        gain, seconds = self._expected(plan)
        pays = gain >= (self.ADVANTAGE if self.num_undrafted_steps else 1.0)
        is_time = self.num_undrafted_steps % self.PROBE_EVERY == self.PROBE_EVERY - self.DECIDE_EVERY
        self._count(pays)
        if is_time and not pays:
            self.blocks.forget_half()
        unknown = self.blocks.is_half_known or not self.costs.is_draft_known(load[0])
        wonders = gain >= self.HOPELESS and (is_time or (unknown and not plan.prefills))
        return pays or (wonders and self._may_lose(gain, seconds))

    def _is_settled(self) -> bool:
        """Steps at one load are decided together; not those with which drafting begins: it might be a mistake."""
        drafted = self._num_drafted_steps
        if drafted:
            return drafted >= self.DECIDE_EVERY and drafted % self.DECIDE_EVERY > 0
        return self.num_undrafted_steps % self.DECIDE_EVERY > 0

    def _count(self, drafted: bool) -> None:
        self._num_drafted_steps = self._num_drafted_steps + 1 if drafted else 0
        self.num_undrafted_steps = 0 if drafted else self.num_undrafted_steps + 1

    def _may_lose(self, gain: float, seconds: float) -> bool:
        """Whether the time for a trial is there; if so what it is expected to lose counts as spent."""
        loss = max(0.0, 1.0 - gain) * seconds
        if self._lost + loss > self.TRIALS * self._seconds + self.TRIALS_AT_START / self.costs.step.sps(1):
            return False
        self._lost += loss
        return True

    def _expected(self, plan: StepPlan) -> tuple[float, float]:
        """Of a step with drafts for the plan's requests: tokens per second, over those of a plain step, and its
        seconds."""
        count, step = len(plan.decodes), self.costs.step
        rows, room = count + plan.num_prefill_rows, sum(min(self.gamma, r.draft_room) for r in plan.decodes)
        spent = self._spent(count, rows)
        rates = rates_ahead(self._survival(), count, rows, range(room + 1), step, spent)
        best = int(rates.argmax())
        self._all_alike = bool(rates[-1] >= self.ALIKE * rates[best])
        return float(rates[best]) / (count * step.sps(count)), 1.0 / step.sps(rows + best) + spent

    def _survival(self) -> Floats:
        """[W, G] of W blocks like those to come."""
        known = self.blocks.survival()
        return self.estimate.survival(1) if known is None else known

    def _spent(self, count: int, rows: int) -> float:
        """Seconds of drafting, less those of prefill rows in the step: they are due whatever is decided, and would make
        every draft look cheap beside them."""
        step = self.costs.step
        return self.costs.draft_seconds(count) - (1.0 / step.sps(rows) - 1.0 / step.sps(count))

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        count = len(plan.decodes)
        self._num_rounds[base_rows] += 1
        if self._ahead is not None and self._ahead[0] == base_rows and self._num_ahead < self.DECIDE_EVERY:
            self._num_ahead += 1
            return self._ahead[1]
        self._ahead = None
        if not self.wants_drafts(plan):
            return 0
        drafting, spent = choices[1:], self._spent(count, base_rows)
        alike = self.ALIKE if self._num_rounds[base_rows] > self.FEW else self.ALIKE_AT_FIRST
        rates = rates_ahead(self._survival(), count, base_rows, drafting, self.costs.step, spent)
        chosen = drafting[np.flatnonzero(rates >= alike * rates.max())[-1]]
        if not self.num_undrafted_steps:  # else it is a trial of one round
            self._ahead, self._num_ahead = (base_rows, chosen), 1
        return chosen

    def note_round(self, survival: Floats | None, verified: Sequence[int], accepted: Sequence[int]) -> None:
        if survival is None:
            self.estimate.update(verified, accepted)
        else:
            self.blocks.note(survival.tolist(), verified, accepted)

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        self.costs.note(rows, step_seconds, drafted, draft_seconds)
        self._seconds += 1.0 / self.costs.step.sps(rows) + self.costs.draft_seconds(drafted)

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        if proposal is None:
            return [0] * len(plan.decodes)
        if not self.wants_confidence:
            return list(proposal.lengths)
        if proposal.confidence is not None:
            survival = self._confident = survival_rows(proposal.confidence.tolist())
        else:
            survival = self.estimate.survival(len(plan.decodes)).tolist()
        rows = len(plan.decodes) + plan.num_prefill_rows
        return plan_confidence(
            survival, proposal.lengths, rows, self.costs.step, stop_early=self.needs_draft_probs,
            draft_seconds=self._spent(len(plan.decodes), rows),
        )  # fmt: skip

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        results = self._accept(sampled, groups, proposal)
        if proposal is None or proposal.confidence is None or not self.wants_confidence:
            drafted = [
                (len(g.draft_tokens), r.num_accepted) for g, r in zip(groups, results, strict=True) if g.draft_tokens
            ]
            # also with nothing verified: what was counted fades, so that a bad stretch is not believed for ever
            self.estimate.update([verified for verified, _ in drafted], [accepted for _, accepted in drafted])
            return results
        wanted = [row for row, length in enumerate(proposal.lengths) if length]
        verified = [len(groups[row].draft_tokens) for row in wanted]
        accepted = [results[row].num_accepted for row in wanted]
        self.blocks.note([self._confident[row] for row in wanted], verified, accepted)
        return results


class AcceptByDecree:
    """Benchmarks with random weights: accepts as many drafts as a given mean asks for, whatever the target drew."""

    needs_draft_probs = False

    def __init__(self, policy: VerifyPolicy, simulated: SimulatedAcceptance) -> None:
        self.policy = policy
        self.simulated = simulated
        self.reads_confidence = policy.reads_confidence
        self.skips_drafts = policy.skips_drafts
        self.learns = policy.learns

    @property
    def wants_confidence(self) -> bool:
        return self.policy.wants_confidence

    def wants_drafts(self, plan: StepPlan) -> bool:
        return self.policy.wants_drafts(plan)

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        return self.policy.verify_lens(plan, proposal)

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        return self.policy.drafts_ahead(plan, base_rows, choices)

    def note_round(self, survival: Floats | None, verified: Sequence[int], accepted: Sequence[int]) -> None:
        self.policy.note_round(survival, verified, accepted)

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        self.policy.note_times(rows, step_seconds, drafted, draft_seconds)

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        drawn = sampled.token_ids.tolist()
        results = []
        for group, row in zip(groups, first_rows(groups), strict=False):
            request, verified = group.request, len(group.draft_tokens)
            count = self.simulated.num_accepted(request.request.request_id, request.stats.rounds, verified)
            last = TokenSource.BONUS if count == verified else TokenSource.CORRECTION
            tokens = [*group.draft_tokens[:count], drawn[row + count]]
            results.append(AcceptResult(count, tokens, [TokenSource.ACCEPTED] * count + [last]))
        return results
