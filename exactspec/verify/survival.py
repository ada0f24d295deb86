"""How likely is it that the first k drafts of a block are all accepted? From a confidence head, or from the past."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exactspec.errors import ConfigError

Floats = NDArray[np.float64]


def prefix_survival(confidence: ArrayLike) -> Floats:
    """a[r, j] = c[r, 0] * ... * c[r, j] for confidences c [R, G], the chances that j is accepted if all before it are.

    A confidence that is not a number counts as 0: a bad draft costs speed and is never worth an error.
    """
    c = np.fmax(np.asarray(confidence, dtype=np.float64), 0.0)  # fmax: of a NaN and a number the number
    return np.cumprod(np.minimum(c, 1.0), axis=-1, dtype=np.float64)


def survival_rows(confidence: Sequence[Sequence[float]]) -> list[list[float]]:
    """prefix_survival of a round's few rows, without numpy: in a round it would take several times as long."""
    rows = []
    for block in confidence:
        chance, row = 1.0, []
        for c in block:
            chance *= min(c, 1.0) if c > 0.0 else 0.0  # not greater than 0: a NaN too
            row.append(chance)
        rows.append(row)
    return rows


class AcceptanceEstimate:
    """Online conditional acceptance by draft position, for drafters without a confidence head.

    Counts fade with a half-life in steps. What is not known is filled in from the position before (the first: from
    `prior`), with the weight of `prior_count` tests. So a position that has not been verified for a while comes back
    to a hopeful value and is tried again. It knows past rounds only: a plan made from it is non-anticipating.

    Rounds are counted when somebody asks: in a round itself that would take several times as long.
    """

    COUNT_AT_ONCE = 64  # rounds, at most

    def __init__(self, gamma: int, *, prior: float = 0.7, prior_count: float = 4.0, half_life: float = 200.0) -> None:
        if gamma < 1 or not 0.0 < prior < 1.0 or prior_count <= 0 or half_life <= 0:
            raise ConfigError(
                f"acceptance estimate: gamma {gamma}, prior {prior}, prior_count {prior_count}, half_life {half_life} "
                "must be at least 1, inside (0, 1), positive and positive"
            )
        self.gamma = gamma
        self._prior, self._prior_count = prior, prior_count
        self._keep = 0.5 ** (1.0 / half_life)
        self._tested = [0.0] * gamma
        self._accepted = [0.0] * gamma
        self._uncounted: list[list[tuple[int, int]]] = []  # rounds: (verified, accepted) of each request
        self._is_empty = True  # nothing to fade

    def update(self, verify_lens: Sequence[int], num_accepted: Sequence[int]) -> None:
        """One step's rounds. Position k was tested where the k drafts before it were accepted and it was verified."""
        if not verify_lens and self._is_empty:
            return
        fits = len(verify_lens) == len(num_accepted)
        counts = [*zip(verify_lens, num_accepted, strict=fits)]
        if not fits or any(not 0 <= accepted <= verified <= self.gamma for verified, accepted in counts):
            raise ConfigError(f"num_accepted {num_accepted} do not fit verify_lens {verify_lens} of up to {self.gamma}")
        self._is_empty = False
        self._uncounted.append(counts)
        if len(self._uncounted) >= self.COUNT_AT_ONCE:
            self._count()

    def _count(self) -> None:
        rounds, self._uncounted = self._uncounted, []
        for counts in rounds:
            self._tested = [keep * self._keep for keep in self._tested]
            self._accepted = [keep * self._keep for keep in self._accepted]
            for verified, accepted in counts:
                for k in range(accepted):
                    self._accepted[k] += 1.0
                for k in range(min(accepted + 1, verified)):
                    self._tested[k] += 1.0

    def conditional(self) -> Floats:
        """[G]: chance that draft k is accepted, given that all before it were."""
        self._count()
        rates, expected = [], self._prior
        for tested, accepted in zip(self._tested, self._accepted, strict=True):
            expected = (accepted + self._prior_count * expected) / (tested + self._prior_count)
            rates.append(expected)
        return np.array(rates)

    def survival(self, num_requests: int) -> Floats:
        """[R, G], the same row for every request."""
        return np.broadcast_to(np.cumprod(self.conditional()), (num_requests, self.gamma))


class RecentBlocks:
    """The last blocks of a draft with a confidence head: what they said of themselves stands for the blocks to come.

    Counting acceptance would mislead here. Only what looks likely is verified, so what is verified is accepted more
    often than a draft is; of the others nobody knows. The survivals of whole blocks have no such choice in them. How
    far the head is to be believed is counted: accepted drafts over those that it promised among the verified.
    """

    KEEP = 256  # blocks
    ENOUGH = 32  # blocks from which something is known
    DOUBT = 16.0  # promised drafts that count as kept from the start
    HALF_LIFE = 4096.0  # promised drafts

    def __init__(self) -> None:
        self._rounds: deque[Sequence[Sequence[float]]] = deque()  # [R, G] each, newest last
        self._num_blocks = 0
        self._promised = self._kept = self.DOUBT

    def note(self, survival: Sequence[Sequence[float]], verified: Sequence[int], accepted: Sequence[int]) -> None:
        """One round: survival [R, G] of its drafts by their confidence; by request how many were verified, accepted."""
        promised = sum(sum(row[:count]) for row, count in zip(survival, verified, strict=True))
        fade = 0.5 ** (promised / self.HALF_LIFE)
        self._promised = self._promised * fade + promised
        self._kept = self._kept * fade + sum(accepted)
        self._rounds.append(survival)
        self._num_blocks += len(survival)
        while self._num_blocks - len(self._rounds[0]) >= self.KEEP:
            self._num_blocks -= len(self._rounds.popleft())

    def forget_half(self) -> None:
        """The older half of the rounds: they were long ago."""
        for _ in range(len(self._rounds) // 2):
            self._num_blocks -= len(self._rounds.popleft())

    @property
    def is_half_known(self) -> bool:
        """There are some, and not enough."""
        return 0 < self._num_blocks < self.ENOUGH

    def survival(self) -> Floats | None:
        """[W, G] of W blocks like those to come; None while too little is known."""
        if self._num_blocks < self.ENOUGH:
            return None
        return np.array([*itertools.chain(*self._rounds)]) * min(1.0, self._kept / self._promised)
