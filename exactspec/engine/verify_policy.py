"""How many drafts are verified and which rule accepts them.

With coupled acceptance no choice here can change a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    learns: bool  # wants to be told of rounds and their times

    @property
    def skips_drafts(self) -> bool:
        """Are the steps to come likely to want no drafts? Then a drafter may learn of the present one late."""
        ...

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


@dataclass(slots=True)
class _Decision:
    """What is done in steps at one load, until it is thought over again."""

    drafts: bool  # drafting is expected to pay
    places: int  # drafts that are then verified in all: the most of the numbers that are as good as any
    whole: bool  # which is all of them
    window: int = 1  # steps that it holds for
    steps_left: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What is known of a step before it is decided."""

    num_requests: int
    base_rows: int  # of a plain step without prefill
    prefill_rows: int = 0
    rows_behind: int = 0  # of context, at most, that the drafter has to catch up with first
    tokens_left: int = 0  # for the sake of which it would


class VerifyByConfidence:
    """Verifies the prefixes that are worth their rows (verify/plan.py) and drafts only while drafting pays.

    Prefix survival comes from the draft's confidence, or, where it has none, from the acceptance of past rounds. Costs
    come from `costs`, which follow the times of real steps. Every request keeps its bonus row.

    A round that is decided ahead knows the confidences of earlier rounds only: they say how many drafts are worth
    verifying in all. Which, is then chosen by its own.

    Beside prefill rows one plans on the convex curve below the measured one: stairs up there are noise.

    Thinking takes time, too. A decision holds for its load: for one step at first, for twice as many each time that it
    is confirmed, for LONGEST at most. Where verifying all drafts is expected to be as good as any number, all are
    verified, and confidence is read in the rounds that decide.
    """

    reads_confidence = True
    learns = True
    PROBE_EVERY = 512  # steps: while drafting does not pay, how often to look again
    HOPELESS = 0.6  # drafting that is expected to give less than this share of plain steps is not tried
    TRIALS = 0.005  # share of all decode time that may be lost by trying drafts where they are not expected to pay
    TRIALS_AT_START = 1.0  # and beyond that, in times of a step of one row
    CATCH_UP = 0.02  # what a drafter that learns late pays for a row of context, of what a row costs the target
    LONGEST = 32  # steps that a decision holds for
    ADVANTAGE = 1.05  # what drafting must be expected to gain before it begins; it goes on while it gains anything
    ALIKE = 0.95  # numbers of drafts whose expected speeds differ by less are alike: the most are verified
    ALIKE_AT_FIRST = 0.9  # the same, ahead, for the first FEW rounds with so many base rows: a device may have to
    FEW = 2048  # prepare each size of a round, which is time lost where a batch only passes through

    def __init__(self, acceptance: str, gamma: int, costs: LiveCosts) -> None:
        self.needs_draft_probs = acceptance == "rejection"
        self.costs = costs
        self.gamma = gamma
        self.estimate = AcceptanceEstimate(gamma)
        self.blocks = RecentBlocks()
        self.num_undrafted_steps = 0  # in a row, trials among them
        self._probe_at = self.PROBE_EVERY  # of these
        self._decisions: dict[tuple[int, ...], _Decision] = {}  # by load
        self.wants_confidence = True
        self._seconds = 0.0  # of all decode steps, as the costs say: ranks must decide alike
        self._uncounted: Counter[tuple[int, int]] = Counter()  # steps since, by rows and requests drafted for
        self._lost = 0.0  # of these, on trials
        self._confident: list[list[float]] = []  # survival of the present round's drafts by their confidence
        self._accept = VerifyAll(acceptance).accept
        self._num_rounds: Counter[int] = Counter()  # that were decided ahead, by base rows

    @property
    def skips_drafts(self) -> bool:
        return self.num_undrafted_steps > 0

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Compares the expected tokens per second with and without drafting, by the blocks of past rounds."""
        count, gamma = len(plan.decodes), self.gamma
        room = sum([min(gamma, request.draft_room) for request in plan.decodes])
        load = self._load(count, room // count) if not plan.prefills else ()
        decision = self._holding(load)
        if decision is not None:
            self.wants_confidence = not decision.whole
            return decision.drafts
        self.wants_confidence = True
        behind = left = 0
        if self.num_undrafted_steps:
            behind = sum(request.kv_len for request in plan.decodes)
            left = sum(request.max_tokens - len(request.token_ids) for request in plan.decodes)
        work = _Work(count, count, plan.num_prefill_rows, behind, left)
        return self._decide(load, work, range(room + 1), self.ALIKE).drafts

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        load = (base_rows,)  # one decision for all numbers of requests that share a size of round
        self._num_rounds[base_rows] += 1
        decision = self._holding(load)
        if decision is None:
            if not any(request.draft_room for request in plan.decodes):
                return 0
            alike = self.ALIKE if self._num_rounds[base_rows] > self.FEW else self.ALIKE_AT_FIRST
            decision = self._decide(load, _Work(len(plan.decodes), base_rows), choices, alike)
        return decision.places if decision.drafts else 0

    def _load(self, count: int, room_each: int) -> tuple[int, ...]:
        """Numbers of requests that differ by less than a quarter are alike: a batch that runs out passes through all.
        Near the end of an answer there is less to win, which is decided anew where more was found worth drafting."""
        unit = max(0, count.bit_length() - 3)
        size = count >> unit << unit
        full = (size, self.gamma)
        known = self._decisions.get(full)
        return full if known is not None and not known.drafts else (size, room_each)

    def _holding(self, load: tuple[int, ...]) -> _Decision | None:
        """The decision for this load, unless it is time to think again."""
        decision = self._decisions.get(load)
        if decision is None or not decision.steps_left:
            return None
        decision.steps_left -= 1
        self._count(decision.drafts)
        return decision

    def _decide(self, load: tuple[int, ...], work: _Work, places: Sequence[int], alike: float) -> _Decision:
        """Whether to draft, and to verify how many of `places` (rising from 0). It holds for steps at `load` to come
        (unless that is empty), where it is no trial."""
        step, count, rows = self.costs.step, work.num_requests, work.base_rows + work.prefill_rows
        spent = self._spent(count, work.base_rows, work.prefill_rows)
        rates = rates_ahead(self._survival(), count, rows, places, step, spent, convex=work.prefill_rows > 0)
        best = int(rates.argmax())
        chosen = places[int(np.flatnonzero(rates >= alike * rates[best])[-1])]
        gain = float(rates[best]) / (count * step.sps(work.base_rows))
        last = self._decisions.get(load)
        drafted = last.drafts if last is not None else not self.num_undrafted_steps
        pays = gain >= (1.0 if drafted else self.ADVANTAGE)
        catch_up = work.rows_behind * self.CATCH_UP / (step.sps(step.rows[-1]) * step.rows[-1])
        if catch_up:
            pays = pays and work.tokens_left * (gain - 1.0) / float(rates[best]) > catch_up
        self._count(pays)
        loss = max(0.0, 1.0 - gain) * (1.0 / step.sps(rows + places[best]) + spent) + catch_up
        if not pays and self._tries(gain, count, loss, work.prefill_rows):
            self._decisions.pop(load, None)
            return _Decision(True, chosen, chosen == places[-1])
        decision = _Decision(pays, chosen, chosen == places[-1])
        if last is not None and last.drafts == pays and (last.whole == decision.whole or not pays):
            decision.window = min(2 * last.window, self.LONGEST)
        decision.steps_left = decision.window - 1
        if load:
            self._decisions[load] = decision
        return decision

    def _spent(self, num_requests: int, base_rows: int, prefill_rows: int) -> float:
        """Seconds of drafting, less those of prefill rows in the step: they are due whatever is decided, and would make
        every draft look cheap beside them."""
        spent, step = self.costs.draft_seconds(num_requests), self.costs.step
        if prefill_rows:
            with_them = float(step.sps_range(base_rows + prefill_rows, 1, convex=True)[0])
            spent -= 1.0 / with_them - 1.0 / step.sps(base_rows)
        return spent

    def _count(self, drafted: bool) -> None:
        self.num_undrafted_steps = 0 if drafted else self.num_undrafted_steps + 1
        if drafted:
            self._probe_at = self.PROBE_EVERY

    def _tries(self, gain: float, num_requests: int, loss: float, prefill_rows: int) -> bool:
        """Whether drafts are tried that are not expected to pay. loss: seconds that this is expected to take."""
        is_time = self.num_undrafted_steps >= self._probe_at
        if is_time:
            self._probe_at += self.PROBE_EVERY
            self.blocks.forget_half()
        unknown = self.blocks.is_half_known or not self.costs.is_draft_known(num_requests)
        wonders = gain >= self.HOPELESS and (is_time or (unknown and not prefill_rows))
        return wonders and self._may_lose(loss)

    def _may_lose(self, loss: float) -> bool:
        """Whether the time for a trial is there; if so what it is expected to lose counts as spent."""
        step = self.costs.step
        for (rows, drafted), steps in self._uncounted.items():
            self._seconds += steps * (1.0 / step.sps(rows) + self.costs.draft_seconds(drafted))
        self._uncounted.clear()
        if self._lost + loss > self.TRIALS * self._seconds + self.TRIALS_AT_START / step.sps(1):
            return False
        self._lost += loss
        return True

    def _survival(self) -> Floats:
        """[W, G] of W blocks like those to come."""
        known = self.blocks.survival()
        return self.estimate.survival(1) if known is None else known

    def note_round(self, survival: Floats | None, verified: Sequence[int], accepted: Sequence[int]) -> None:
        if survival is None:
            self.estimate.update(verified, accepted)
        else:
            self.blocks.note(survival.tolist(), verified, accepted)

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        self.costs.note(rows, step_seconds, drafted, draft_seconds)
        self._uncounted[rows, drafted] += 1

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
            survival, proposal.lengths, rows, self.costs.step,
            stop_early=self.needs_draft_probs or rows > len(plan.decodes),
            draft_seconds=self._spent(len(plan.decodes), len(plan.decodes), plan.num_prefill_rows),
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
        self.learns = policy.learns

    @property
    def wants_confidence(self) -> bool:
        return self.policy.wants_confidence

    @property
    def skips_drafts(self) -> bool:
        return self.policy.skips_drafts

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
