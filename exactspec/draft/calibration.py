"""Calibration of a draft's confidence: what turns its logits into honest chances, and the file that holds it.

DSpark (arXiv 2607.05147, section 3.2) divides the logit of position k by a temperature. Here position k also has an
offset, and there are two sets: for greedy requests and for requests at temperature 1. In between both are mixed in
proportion to the temperature. The head learns the chance of rejection sampling at temperature 1; greedy matching and
coupled draws are accepted more, or less, often than that, which no temperature can mend.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from exactspec.errors import CheckpointError

CALIBRATION_FILE = "calibration.json"
_LEAST_CHANCE = 1e-9


@dataclass(frozen=True)
class PositionScales:
    """One number of each per draft position: a confidence is sigmoid(logit / temperature + offset)."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """Scales of greedy requests and of requests at temperature 1 (and above)."""

    greedy: PositionScales
    sampled: PositionScales

    def table(self, gamma: int) -> NDArray[np.float64]:
        """[2 sets, slope and offset, gamma]."""
        sets = (self.greedy, self.sampled)
        return np.array([[1.0 / np.array(s.temperatures[:gamma]), s.offsets[:gamma]] for s in sets])

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"temperatures": [round(t, 5) for t in s.temperatures], "offsets": [round(o, 5) for o in s.offsets]}
            for name, s in (("greedy", self.greedy), ("sampled", self.sampled))
        }


def scale_logits(logits: Tensor, table: Tensor, temperatures: Tensor) -> Tensor:
    """logits [R, G], temperatures of the requests [R] (0: greedy) -> calibrated logits. table: `Calibration.table`."""
    share = temperatures.clamp(0.0, 1.0)[:, None]
    slope, offset = (table[0] + share[:, :, None] * (table[1] - table[0])).unbind(1)
    return logits * slope + offset


def calibrated_chances(confidence: ArrayLike, calibration: Calibration, temperatures: ArrayLike) -> NDArray[np.float64]:
    """The same for recorded confidences [R, G] (not a number stays so) and temperatures [R]."""
    c = np.asarray(confidence, dtype=np.float64)
    table = calibration.table(c.shape[1])
    share = np.clip(np.asarray(temperatures, dtype=np.float64), 0.0, 1.0)[:, None]
    slope, offset = (table[0, i] + share * (table[1, i] - table[0, i]) for i in (0, 1))
    return 1.0 / (1.0 + np.exp(-(chance_logits(c) * slope + offset)))


def chance_logits(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(confidence, _LEAST_CHANCE, 1.0 - _LEAST_CHANCE)
    return np.log(inside) - np.log1p(-inside)


def read_calibration(folder: str | Path, gamma: int) -> Calibration | None:
    """calibration.json of a draft folder, or None without the file.

    {"greedy": {"temperatures": [gamma positive numbers], "offsets": [gamma numbers]}, "sampled": {...}, ...}, or
    {"temperatures": [...], ...}: the same temperatures for both and no offsets. Raises CheckpointError for any other
    content.
    """
    path = Path(folder) / CALIBRATION_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "greedy" not in content:
            plain = {"temperatures": content["temperatures"], "offsets": [0.0] * gamma}
            content = {"greedy": plain, "sampled": plain}
        sets = [(content[name]["temperatures"], content[name]["offsets"]) for name in ("greedy", "sampled")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected an object with 'temperatures', or 'greedy' and 'sampled' ({error})"
        ) from error
    heat, shift = f"{path}: temperatures", f"{path}: offsets"
    return Calibration(*(PositionScales(_numbers(t, gamma, heat, 0.0), _numbers(o, gamma, shift)) for t, o in sets))


def _numbers(values: Any, gamma: int, where: str, least: float = -math.inf) -> tuple[float, ...]:
    """gamma finite numbers above `least`."""
    if not isinstance(values, list) or len(values) != gamma:
        raise CheckpointError(f"{where}: expected {gamma} numbers, one per draft position, got {values!r}")
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= least:
            kind = "positive finite" if least == 0.0 else "finite"
            raise CheckpointError(f"{where}: must be {kind} numbers, got {value!r}")
    return tuple(float(value) for value in values)


def table_on(calibration: Calibration, gamma: int, device: torch.device) -> Tensor:
    """`Calibration.table` for `scale_logits`, float32."""
    return torch.from_numpy(calibration.table(gamma)).to(device, torch.float32)
