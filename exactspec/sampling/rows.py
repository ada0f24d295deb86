"""The logit rows of a step, seen as blocks of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from exactspec.types import RunningRequest, SamplingParams


@dataclass(slots=True)
class RowGroup:
    """Consecutive logit rows of one request in one step.

    Row j decides output position first_position + j and assumes that draft tokens before j were accepted, so there
    are len(draft_tokens) + 1 rows. `grammar_masks` is bool [rows, V], True = allowed, or None.
    """

    request: RunningRequest
    first_position: int
    draft_tokens: list[int] = field(default_factory=list)
    grammar_masks: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.draft_tokens) + 1

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def seed(self) -> int:
        return self.request.request.seed

    @property
    def positions(self) -> range:
        """Output position of each row's draw."""
        return range(self.first_position, self.first_position + self.num_rows)


def first_rows(groups: Sequence[RowGroup]) -> list[int]:
    """Index of each group's first row in the step's rows, and the total number of rows at the end."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + group.num_rows)
    return starts
