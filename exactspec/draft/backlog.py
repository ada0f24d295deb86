"""What a block drafter has not learnt yet: the target features of context rows, kept at the target's own slots.

While drafting does not pay, making a draft's context K/V costs every row some percent of its target forward, for
nothing. Keeping the features is a copy; the K/V are made when a proposal wants them, each row's once.

A mark says of every slot whether the features kept there are those of its last target forward (else the K/V are). It
changes only when a forward has written the slot, so it holds for whoever owns the page next: prefix hits, shared pages,
retraction and eviction need no bookkeeping here either.

Looking at the marks of a whole context in every round would cost more than the rest of it. A request that was caught up
stays so until something is kept again, or it is retracted and may come back to other pages.

Nor is anything marked or copied in the round that asks for it: that is due when somebody looks, and a dozen rounds at
once cost little more than one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from exactspec.types import RunningRequest

MOST_DUE = 32  # rounds
MOST_ROWS_DUE = 256  # whose features are not copied yet


class Backlog:
    """Room for the features of every slot; memory is taken where something is kept (of a large pool untouched pages
    cost nothing).

    width: features of a row. dtype: what the drafter's first product rounds its input to.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._features = torch.empty(num_slots, width, dtype=dtype, device=device)
        self._kept = torch.zeros(num_slots, dtype=torch.bool, device=device)
        self._due: list[tuple[Tensor, Tensor | None]] = []  # slots just written; features to keep, or the K/V are made
        self._rows_due = 0
        self._num_keeps = 0
        self._done: dict[RunningRequest, tuple[int, int]] = {}  # keeps and retractions when it was last caught up

    def keep(self, slots: Tensor, features: Tensor) -> None:
        """features [T, width] float32 of the rows just written at `slots` [T]. Both must stay as they are."""
        self._num_keeps += 1
        self._rows_due += slots.shape[0]
        self._defer(slots, features)

    def is_done(self, requests: Sequence[RunningRequest]) -> bool:
        """Nothing is behind for any of these; a False may be overcautious."""
        return all(self._done.get(r) == (self._num_keeps, r.stats.num_retracted) for r in requests)

    def done(self, slots: Tensor, requests: Sequence[RunningRequest]) -> None:
        """All that `behind` found for these requests has been made: at `slots`."""
        self.strike(slots)
        for request in requests:
            self._done[request] = (self._num_keeps, request.stats.num_retracted)

    def forget(self, request: RunningRequest) -> None:
        """The request has left the engine."""
        self._done.pop(request, None)

    def strike(self, slots: Tensor) -> None:
        """The K/V of `slots` [T] have been made. They must stay as they are."""
        self._defer(slots, None)

    def _defer(self, slots: Tensor, features: Tensor | None) -> None:
        self._due.append((slots, features))
        if len(self._due) >= MOST_DUE or self._rows_due >= MOST_ROWS_DUE:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        """Does what is due, in its order."""
        due, self._due, self._rows_due = self._due, [], 0
        for keeps, rounds in itertools.groupby(due, key=lambda one: one[1] is not None):
            written = [(slots.long(), features) for slots, features in rounds]
            self._kept.index_fill_(0, torch.cat([slots for slots, _ in written]), keeps)
            for slots, features in written:
                if features is not None:
                    self._features.index_copy_(0, slots, features.to(self._features.dtype))

    def behind(self, page_table: Tensor, context_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """(positions, slots), int32 [N] each, of the context rows whose K/V are still to be made, each slot once.

        page_table [R, P] int32; context_lens [R]: rows of each request that count.
        """
        self._settle()
        offsets = torch.arange(page_size, dtype=torch.int32, device=page_table.device)
        slots = (page_table[:, :, None] * page_size + offsets).flatten(1)
        positions = torch.arange(slots.shape[1], dtype=torch.int32, device=slots.device)
        wanted = self._kept[slots.long()] & (positions < context_lens[:, None])
        owners, columns = wanted.nonzero(as_tuple=True)
        found = slots[owners, columns]
        if found.shape[0] == 0:
            return columns.int(), found
        # requests share the pages of a common prefix, at the same positions
        unique, where = torch.unique(found, return_inverse=True)
        at = columns.new_zeros(unique.shape[0]).scatter_(0, where, columns)
        return at.int(), unique

    def features(self, slots: Tensor) -> Tensor:
        """[N, width] float32 of kept rows, as `behind` has found them."""
        return self._features[slots.long()].float()
