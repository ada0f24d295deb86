"""The one seam for drafters. Nothing outside draft/ asks which kind it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from exactspec.sampling.noise import NoiseStream
from exactspec.types import ForwardBatch, Proposal, RunningRequest

# (k, logits [R, V], draft tokens before k [R, k]) -> adjusted logits: penalties, bias and grammar for draft position k.
DraftAdjust = Callable[[int, Tensor, Tensor], Tensor]
# (seeds, output positions, stream) -> Gumbel noise [N, V] float32, read-only (sampling.noise.NoiseCache.rows)
NoiseRows = Callable[[Sequence[int], Sequence[int], NoiseStream], Tensor]


@dataclass(slots=True)
class DraftBatch:
    """The decoding requests of a step, as a drafter sees them. Tensors are on the device."""

    requests: Sequence[RunningRequest]
    anchor_ids: Tensor  # [R] int64, the newest committed token
    anchor_positions: Tensor  # [R] int32 == number of tokens before the anchor, all observed
    page_table: Tensor  # [R, P] int32; slots for positions anchor .. anchor + gamma are reserved
    page_size: int
    max_kv_len: int  # host copy of max(anchor_positions)
    want_probs: bool = False  # rejection acceptance: fill Proposal.probs
    want_confidence: bool = True  # fill Proposal.confidence, if the drafter has any
    adjust: DraftAdjust | None = None
    noise: NoiseRows | None = None  # rows shared with the verify draw; None: the drafter asks the device


class Drafter(ABC):
    """Proposes tokens. A wrong proposal costs speed, never an output (contract C1).

    A drafter that keeps K/V writes it to its own pool at the target's slots, so that prefix hits, retraction
    and eviction need no bookkeeping here. Whatever it keeps per request goes away in `forget`.
    """

    gamma: int = 0  # most draft tokens per round, anchor not counted
    capture_layers: tuple[int, ...] = ()  # target layers whose outputs `observe` wants
    calibrated: bool = False  # its confidence, if it has any
    catch_up_seconds: float = 0.0  # of `propose`, ever: learning what was postponed

    @abstractmethod
    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        """Learn from a target forward. captured [T, len(capture_layers) * H] or None.

        Called with all rows of the step, also with rows that will be rejected: what is stored for them must
        be overwritten when their slot is observed again, before any proposal reads it.
        """

    def postpone(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        """Instead of `observe` after a step that was not drafted for: the same may be learnt later, in `propose`.

        Proposals are those of a drafter that observed at once, to the bit.
        """
        self.observe(batch, captured)

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Proposal:
        """Draft up to gamma tokens for each request. Must not change any request."""

    def forget(self, request: RunningRequest) -> None:
        """The request has left the engine."""
        return None
