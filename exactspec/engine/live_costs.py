"""Step costs kept true while serving: the measured curves, corrected by what real steps take.

A curve is measured once, perhaps while the machine was busy, and without what a request adds (sampling, filters, longer
contexts). So every decode step reports its times. The ratio of real to measured time is kept for each measured point;
points that no step has come near yet take the ratio between those of their nearest neighbours that were seen: one slow
point must not look like a stair whose other end is near. A machine that is slower altogether so changes no decision,
and a wrong curve is right after some steps.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exactspec.engine.profile import StepCosts
from exactspec.verify.sps import SpsTable

_MEMORY = 20  # steps: a point's ratio is a mean over about so many
_WIDEST = 4.0  # one step may look so many times slower or faster than expected; more is a hiccup
_REBUILD_EVERY = 16  # steps, where none is a first look
_READ_AT_ONCE = 64  # notes, at most
_FIRST_LOOKS = 3  # times that make a draft's cost known


class _Curve:
    """A table and the ratios of real times to it."""

    def __init__(self, table: SpsTable) -> None:
        self.table = table
        self.current = table
        self.ratios = [1.0] * len(table.rows)
        self.counts = [0] * len(table.rows)
        self._sizes = np.log(table.rows)
        self._borders = [math.sqrt(a * b) for a, b in itertools.pairwise(table.rows)]

    def point(self, size: int) -> int:
        """The measured point nearest to a size, by their ratio."""
        return bisect.bisect_left(self._borders, size)

    def note(self, size: int, seconds: float) -> bool:
        """Whether this was one of the first looks at a point. There its neighbours count as one look."""
        point = self.point(size)
        ratio = seconds * self.table.sps(size)
        looks = self.counts[point]
        believed = self.ratios[point]
        if not looks:
            believed = float(self._all_ratios()[point]) if any(self.counts) else ratio
        ratio = min(max(ratio, believed / _WIDEST), believed * _WIDEST)
        self.counts[point] = looks + 1
        self.ratios[point] = believed + (ratio - believed) / min(looks + 2, _MEMORY)
        return looks < _FIRST_LOOKS

    def _all_ratios(self) -> NDArray[np.float64]:
        seen = np.flatnonzero(self.counts)
        return np.exp(np.interp(self._sizes, self._sizes[seen], np.log(np.array(self.ratios)[seen])))

    def mean_ratio(self) -> float | None:
        """Over the points that were seen; None before the first."""
        seen = [math.log(ratio) for ratio, looks in zip(self.ratios, self.counts, strict=True) if looks]
        return math.exp(sum(seen) / len(seen)) if seen else None

    def rebuild(self, otherwise: float) -> None:
        """`otherwise`: the ratio where no point was seen."""
        ratios = self._all_ratios() if any(self.counts) else otherwise
        seconds = np.array(self.table.seconds) * ratios
        self.current = SpsTable.from_measurements(self.table.key, self.table.rows, seconds.tolist())


class LiveCosts:
    """What a policy plans with. `fixed`: the measured curves as they are (ranks must plan alike).

    A note costs a step next to nothing: notes are read when somebody asks for a cost.
    """

    def __init__(self, costs: StepCosts, fixed: bool = False) -> None:
        self.fixed = fixed
        self._step = _Curve(costs.step)
        self._draft = _Curve(costs.draft) if costs.draft is not None else None
        self._unread: list[tuple[int, float, int, float]] = []
        self._num_read = 0  # since the curves were last rebuilt

    @property
    def step(self) -> SpsTable:
        self._read()
        return self._step.current

    def draft_seconds(self, num_requests: int) -> float:
        """0 where drafting is free."""
        self._read()
        return 1.0 / self._draft.current.sps(num_requests) if self._draft is not None and num_requests else 0.0

    def is_draft_known(self, num_requests: int) -> bool:
        """Whether drafts for about so many requests were timed in real steps (or need not be)."""
        if self.fixed or self._draft is None:
            return True
        self._read()
        return self._draft.counts[self._draft.point(num_requests)] >= _FIRST_LOOKS

    def note(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        """One decode step without prefill: rows of the target and its time; requests drafted for (0: none) and that."""
        if self.fixed:
            return
        self._unread.append((rows, step_seconds, drafted, draft_seconds))
        if len(self._unread) >= _READ_AT_ONCE:
            self._read()

    def _read(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        is_new = False
        for rows, step_seconds, drafted, draft_seconds in unread:
            is_new |= self._step.note(rows, step_seconds)
            if drafted and self._draft is not None:
                is_new |= self._draft.note(drafted, draft_seconds)
        self._num_read += len(unread)
        if is_new or self._num_read >= _REBUILD_EVERY:
            self._num_read = 0
            common = self._step.mean_ratio() or 1.0
            self._step.rebuild(common)
            if self._draft is not None:
                self._draft.rebuild(common)

    def ratios(self) -> Sequence[float]:
        """Real time over measured time by point of the step curve (1 where none was seen)."""
        self._read()
        return list(self._step.ratios)
