"""How many drafts are verified and which rule accepts them.

With coupled acceptance no choice here can change a token.
"""

from __future__ import annotations

from typing import Protocol

from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.live_costs import LiveCosts
from exactspec.sampling.rows import RowGroup, first_rows
from exactspec.sampling.sampler import SampleResult
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Proposal, TokenSource
from exactspec.verify.accept import AcceptResult, accept_coupled, accept_rejection
from exactspec.verify.plan import make_plan, plan_confidence
from exactspec.verify.survival import AcceptanceEstimate, prefix_survival


class VerifyPolicy(Protocol):
    """What a round asks of its policy."""

    needs_draft_probs: bool
    reads_confidence: bool  # the proposal's

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Is drafting worth its time in this step?"""
        ...

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        """Draft tokens to verify for each decoding request of the plan, at most the proposal's lengths."""
        ...

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        """One result per group. Decoding groups come first, in the order of the proposal's rows."""
        ...

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        """What a decode step without prefill took: `rows` of the target, and drafts for `drafted` requests."""
        ...


class VerifyAll:
    """Verifies every draft and accepts by `acceptance` ("coupled" or "rejection")."""

    reads_confidence = False

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

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        pass


class VerifyByConfidence:
    """Verifies the prefixes that are worth their rows (verify/plan.py) and drafts only while drafting pays.

    Prefix survival comes from the draft's confidence, or, where it has none, from the acceptance of past rounds. Costs
    come from `costs`, which follow the times of real steps. Every request keeps its bonus row.
    """

    reads_confidence = True
    PROBE_EVERY = 512  # steps: while drafting does not pay, how often to look again
    HOPELESS = 0.6  # drafting that is expected to give less than this share of plain steps is not tried
    DECIDE_EVERY = 8  # steps: plain steps at one load are decided together
    ADVANTAGE = 1.05  # what drafting must be expected to gain before it begins; it goes on while it gains anything

    def __init__(self, acceptance: str, gamma: int, costs: LiveCosts) -> None:
        self.needs_draft_probs = acceptance == "rejection"
        self.costs = costs
        self.estimate = AcceptanceEstimate(gamma)
        self.num_undrafted_steps = 0  # in a row
        self._plain_load: tuple[int, int] | None = None  # (requests, prefill rows) of the last decision for plain steps
        self._accept = VerifyAll(acceptance).accept

    def wants_drafts(self, plan: StepPlan) -> bool:
        """Compares the expected tokens per second with and without drafting, by the acceptance of past rounds."""
        count = len(plan.decodes)
        load = (count, plan.num_prefill_rows)
        if load == self._plain_load and self.num_undrafted_steps % self.DECIDE_EVERY:
            self.num_undrafted_steps += 1
            return False
        gain = self._gain(*load)
        looks = gain >= self.HOPELESS and not plan.prefills and not self.costs.is_draft_known(count)
        if looks or gain >= (self.ADVANTAGE if self.num_undrafted_steps else 1.0):
            self.num_undrafted_steps, self._plain_load = 0, None
            return True
        self.num_undrafted_steps, self._plain_load = self.num_undrafted_steps + 1, load
        return gain >= self.HOPELESS and self.num_undrafted_steps % self.PROBE_EVERY == 0

    def _gain(self, count: int, prefill_rows: int) -> float:
        """Expected tokens per second with drafts for `count` requests, over those of a plain step."""
        rows = count + prefill_rows
        best = make_plan(
            self.estimate.survival(count),
            [self.estimate.gamma] * count,
            rows,
            self.costs.step,
            stop_early=False,
            draft_seconds=self._spent(count, rows),
        )
        return best.tokens_per_second / (count * self.costs.step.sps(count))

    def _spent(self, count: int, rows: int) -> float:
        """Seconds of drafting, less those of prefill rows in the step: they are due whatever is decided, and would make
        every draft look cheap beside them."""
        step = self.costs.step
        return self.costs.draft_seconds(count) - (1.0 / step.sps(rows) - 1.0 / step.sps(count))

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        self.costs.note(rows, step_seconds, drafted, draft_seconds)

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        if proposal is None:
            return [0] * len(plan.decodes)
        if proposal.confidence is not None:
            survival = prefix_survival(proposal.confidence.tolist())
        else:
            survival = self.estimate.survival(len(plan.decodes))
        rows = len(plan.decodes) + plan.num_prefill_rows
        return plan_confidence(
            survival, proposal.lengths, rows, self.costs.step, stop_early=self.needs_draft_probs,
            draft_seconds=self._spent(len(plan.decodes), rows),
        )  # fmt: skip

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        results = self._accept(sampled, groups, proposal)
        drafted = [
            (len(g.draft_tokens), r.num_accepted) for g, r in zip(groups, results, strict=True) if g.draft_tokens
        ]
        # also with nothing verified: what was counted fades, so that a bad stretch is not believed for ever
        self.estimate.update([verified for verified, _ in drafted], [accepted for _, accepted in drafted])
        return results


class AcceptByDecree:
    """Benchmarks with random weights: accepts as many drafts as a given mean asks for, whatever the target drew."""

    needs_draft_probs = False

    def __init__(self, policy: VerifyPolicy, simulated: SimulatedAcceptance) -> None:
        self.policy = policy
        self.simulated = simulated
        self.reads_confidence = policy.reads_confidence

    def wants_drafts(self, plan: StepPlan) -> bool:
        return self.policy.wants_drafts(plan)

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        return self.policy.verify_lens(plan, proposal)

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
