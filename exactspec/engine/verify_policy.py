"""How many drafts are verified and which rule accepts them. With coupled acceptance no choice here can change a
token.
"""

from __future__ import annotations

from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.sampling.rows import RowGroup
from exactspec.sampling.sampler import SampleResult
from exactspec.scheduler.scheduler import StepPlan
from exactspec.types import Proposal
from exactspec.verify.accept import AcceptResult, accept_coupled, accept_rejection


class VerifyPolicy:
    """Verifies every draft and accepts by `acceptance`; subclasses choose shorter prefixes."""

    def __init__(self, acceptance: str, simulated: SimulatedAcceptance | None = None) -> None:
        self.acceptance = acceptance
        self.simulated = simulated

    @property
    def needs_draft_probs(self) -> bool:
        return self.acceptance == "rejection"

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        """Draft tokens to verify for each decoding request of the plan."""
        return list(proposal.lengths) if proposal is not None else [0] * len(plan.decodes)

    def accept(self, sampled: SampleResult, groups: list[RowGroup], proposal: Proposal | None) -> list[AcceptResult]:
        """One result per group. Decoding groups come first, in the order of the proposal's rows."""
        if self.acceptance == "rejection":
            return accept_rejection(sampled, groups, proposal.probs if proposal is not None else None)
        return accept_coupled(sampled.token_ids, groups)
