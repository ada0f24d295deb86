"""Acceptance by decree, for speed measurements with weights that have nothing to say (random targets or drafts)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from exactspec.errors import ConfigError


@dataclass(frozen=True)
class SimulatedAcceptance:
    """How many draft tokens to accept, whatever the tokens are. Answers are then meaningless: benchmarks only.

    mean_length: tokens committed per round, bonus included, 1 .. gamma + 1. Each request accepts
    floor(x) or ceil(x) drafts a round (x = mean_length - 1), spread as evenly as Bresenham's line, so that the mean
    over any stretch of rounds is within one token of the wish; `seed` and the request's id choose where a line starts.
    """

    mean_length: float
    gamma: int
    seed: int = 0
    _phases: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        most = self.gamma + 1
        if not math.isfinite(self.mean_length) or not 1.0 <= self.mean_length <= most:
            raise ConfigError(
                f"simulate_accept_length: must be between 1 and gamma + 1 = {most} (bonus included), "
                f"got {self.mean_length!r}"
            )

    def num_accepted(self, request_id: str, round_index: int, verify_len: int) -> int:
        """Draft tokens to accept in round `round_index` (from 0) of a request, at most verify_len."""
        wish = self.mean_length - 1.0
        phase = self._phase(request_id)
        planned = math.floor(phase + (round_index + 1) * wish) - math.floor(phase + round_index * wish)
        return min(planned, verify_len)

    def _phase(self, request_id: str) -> float:
        phase = self._phases.get(request_id)
        if phase is None:
            digest = hashlib.blake2b(f"{self.seed}:{request_id}".encode(), digest_size=8).digest()
            phase = self._phases[request_id] = int.from_bytes(digest, "little") / 2.0**64
        return phase
