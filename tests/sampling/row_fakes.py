"""A backend that offers noise only, and short ways to make row groups. Imported by several rooms' tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exactspec.sampling.adjust import OutputHistory
from exactspec.sampling.rows import RowGroup
from exactspec.types import Request, RunningRequest, SamplingParams


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HashBackend:
    """Gumbel noise by hashing (seed, position, stream, id): all rows at once, for tests with many draws."""

    name = "hash"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rows_made = 0

    def gumbel(self, seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
        self.rows_made += len(seeds)
        with np.errstate(over="ignore"):
            key = _mix(seeds.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
            key = _mix(key + positions.numpy().astype(np.uint64) * np.uint64(0xD1342543DE82EF95))
            key = _mix(key + np.uint64((stream + 1) * 0x2545F4914F6CDD1D))
            ids = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            bits = _mix(_mix(key[:, None] + ids[None]))
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))


def make_group(
    params: SamplingParams | None = None,
    seed: int = 0,
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
    masks: Tensor | None = None,
    **fields: object,
) -> RowGroup:
    """The rows of a request with committed `output` that verifies `drafts`. `fields` are SamplingParams fields."""
    if params is None:
        params = SamplingParams(**fields)
    request = Request("r", (0, 1, 2), params, seed)
    running = RunningRequest(request, [0, 1, 2, *output])
    running.history = OutputHistory(list(output)) if params.has_penalties else None
    return RowGroup(running, len(output), list(drafts), masks)


def chi_square_limit(cells: int, sigmas: float = 5.0) -> float:
    """A value that a chi-square of `cells` - 1 degrees of freedom exceeds with the odds of a normal `sigmas`-event
    (5: about 3e-7), by the Wilson-Hilferty cube-root approximation."""
    free = cells - 1
    return free * (1 - 2 / (9 * free) + sigmas * (2 / (9 * free)) ** 0.5) ** 3


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """(statistic, cells) of observed counts against probabilities; cells expecting less than 5 are pooled."""
    expected = (probs.double() / probs.double().sum() * counts.sum()).flatten()
    counts = counts.double().flatten()
    assert float(counts[expected == 0].sum()) == 0, "a token of probability zero was drawn"
    rare = expected < 5
    observed_cells = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected_cells = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected_cells > 0
    statistic = ((observed_cells - expected_cells)[used] ** 2 / expected_cells[used]).sum()
    return float(statistic), int(used.sum())
