"""Plain decoding as a drafter: proposes nothing, so that a round is one target row per request."""

from __future__ import annotations

from torch import Tensor

from exactspec.draft.base import DraftBatch, Drafter
from exactspec.types import ForwardBatch, Proposal


class NoDrafter(Drafter):
    """gamma is 0; every proposal is empty."""

    gamma = 0

    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        return None

    def propose(self, batch: DraftBatch) -> Proposal:
        num_requests = len(batch.requests)
        return Proposal(batch.anchor_ids.new_zeros((num_requests, 0)), [0] * num_requests)
