"""What one step does, as the scheduler decided it."""

from __future__ import annotations

from dataclasses import dataclass, field

from exactspec.types import RunningRequest


@dataclass(slots=True)
class PrefillChunk:
    """Rows start .. end - 1 of a request's known tokens (start == kv_len), pages reserved."""

    request: RunningRequest
    start: int
    end: int
    is_first: bool  # first chunk since (re)admission: anything collected over an earlier, retracted prefill is void
    is_last: bool  # the prefill ends here

    @property
    def num_rows(self) -> int:
        return self.end - self.start

    @property
    def emits(self) -> bool:
        """The prompt ends in this chunk: its last row gives the first output token. Never so after a resume with
        output, whose anchor is known already and decodes in the next step."""
        return self.is_last and self.end == len(self.request.token_ids)


@dataclass(slots=True)
class StepPlan:
    """Requests of a step; every request is in at most one place. Decodes have room for kv_len + gamma_rows tokens."""

    prefills: list[PrefillChunk] = field(default_factory=list)
    decodes: list[RunningRequest] = field(default_factory=list)
    retracted: list[RunningRequest] = field(default_factory=list)  # sent back to the queue while planning

    @property
    def empty(self) -> bool:
        return not self.prefills and not self.decodes

    @property
    def num_prefill_rows(self) -> int:
        return sum(chunk.num_rows for chunk in self.prefills)
