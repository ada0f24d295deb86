"""How many drafts are verified and which rule accepts them.

With coupled acceptance no choice here can change a token.
"""

from __future__ import annotations

from typing import Protocol

from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.sampling.rows import RowGroup, first_rows
from exactspec.sampling.sampler import SampleResult
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Proposal, TokenSource
from exactspec.verify.accept import AcceptResult, accept_coupled, accept_rejection


class VerifyPolicy(Protocol):
    """What a round asks of its policy."""

    needs_draft_probs: bool

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        """Draft tokens to verify for each decoding request of the plan, at most the proposal's lengths."""
        ...

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        """One result per group. Decoding groups come first, in the order of the proposal's rows."""
        ...


class VerifyAll:
    """Verifies every draft and accepts by `acceptance` ("coupled" or "rejection")."""

    def __init__(self, acceptance: str = "coupled") -> None:
        self.needs_draft_probs = acceptance == "rejection"

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        return list(proposal.lengths) if proposal is not None else [0] * len(plan.decodes)

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        if self.needs_draft_probs:
            return accept_rejection(sampled, groups, proposal.probs if proposal is not None else None)
        return accept_coupled(sampled.token_ids, groups)


class AcceptByDecree:
    """Benchmarks with random weights: accepts as many drafts as a given mean asks for, whatever the target drew."""

    needs_draft_probs = False

    def __init__(self, policy: VerifyPolicy, simulated: SimulatedAcceptance) -> None:
        self.policy = policy
        self.simulated = simulated

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        return self.policy.verify_lens(plan, proposal)

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
