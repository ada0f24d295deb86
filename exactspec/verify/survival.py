"""How likely is it that the first k drafts of a block are all accepted? From a confidence head, or from the past."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exactspec.errors import ConfigError

Floats = NDArray[np.float64]


def prefix_survival(confidence: ArrayLike) -> Floats:
    """a[r, j] = c[r, 0] * ... * c[r, j] for confidences c [R, G], the chances that j is accepted if all before it are.

    A confidence that is not a number counts as 0: a bad draft costs speed and is never worth an error.
    """
    c = np.nan_to_num(np.asarray(confidence, dtype=np.float64), nan=0.0)
    return np.cumprod(np.clip(c, 0.0, 1.0), axis=-1, dtype=np.float64)


class AcceptanceEstimate:
    """Online conditional acceptance by draft position, for drafters without a confidence head.

    Counts fade with a half-life in steps. What is not known is filled in from the position before (the first: from
    `prior`), with the weight of `prior_count` tests. So a position that has not been verified for a while comes back
    to a hopeful value and is tried again. It knows past rounds only: a plan made from it is non-anticipating.
    """

    def __init__(self, gamma: int, *, prior: float = 0.7, prior_count: float = 4.0, half_life: float = 200.0) -> None:
        if gamma < 1 or not 0.0 < prior < 1.0 or prior_count <= 0 or half_life <= 0:
            raise ConfigError(
                f"acceptance estimate: gamma {gamma}, prior {prior}, prior_count {prior_count}, half_life {half_life} "
                "must be at least 1, inside (0, 1), positive and positive"
            )
        self.gamma = gamma
        self._prior, self._prior_count = prior, prior_count
        self._keep = 0.5 ** (1.0 / half_life)
        self._tested = np.zeros(gamma)
        self._accepted = np.zeros(gamma)

    def update(self, verify_lens: Sequence[int], num_accepted: Sequence[int]) -> None:
        """One step's rounds. Position k was tested where the k drafts before it were accepted and it was verified."""
        verified = np.asarray(verify_lens, dtype=np.int64)
        accepted = np.asarray(num_accepted, dtype=np.int64)
        if verified.shape != accepted.shape or (accepted > verified).any() or (verified > self.gamma).any():
            raise ConfigError(f"num_accepted {num_accepted} do not fit verify_lens {verify_lens} of up to {self.gamma}")
        self._tested *= self._keep
        self._accepted *= self._keep
        if verified.size:
            self._tested += self._at_least(np.minimum(accepted + 1, verified))
            self._accepted += self._at_least(accepted)

    def _at_least(self, lengths: NDArray[np.int64]) -> Floats:
        """For k = 1 .. gamma the number of `lengths` that are >= k."""
        counts = np.bincount(lengths, minlength=self.gamma + 1)[: self.gamma + 1]
        return np.cumsum(counts[::-1])[::-1][1:].astype(np.float64)

    def conditional(self) -> Floats:
        """[G]: chance that draft k is accepted, given that all before it were."""
        rates, expected = np.empty(self.gamma), self._prior
        for k in range(self.gamma):
            weight = self._tested[k] + self._prior_count
            expected = (self._accepted[k] + self._prior_count * expected) / weight
            rates[k] = expected
        return rates

    def survival(self, num_requests: int) -> Floats:
        """[R, G], the same row for every request."""
        return np.broadcast_to(np.cumprod(self.conditional()), (num_requests, self.gamma))
