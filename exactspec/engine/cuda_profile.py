"""What captured rounds cost on a CUDA device, by their parts: the rounds that serving runs, timed by device events."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from exactspec.backend.cuda.graphs import GraphCache
from exactspec.draft.base import Drafter
from exactspec.engine.cuda_round import CudaRoundRunner
from exactspec.engine.cuda_stage import draft_levels
from exactspec.engine.profile import LEAST_SLOTS, made_up_request
from exactspec.engine.verify_policy import VerifyAll
from exactspec.model.target import TargetModel
from exactspec.sampling.sampler import Sampler
from exactspec.scheduler.plan import StepPlan

BUCKETS = (1, 4, 16, 64, 128, 256)  # of requests, each with every number of drafts that can be verified
REPEATS = 5
PAGE_SIZE = 16
Sizes = tuple[list[int], list[float]]


class _Clock(VerifyAll):
    """Verifies as many drafts as it is told, and keeps the times."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.places = 0
        self.took: list[tuple[float, float]] = []  # draft, verify

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        return self.places

    def note_times(self, rows: int, step_seconds: float, drafted: int, draft_seconds: float) -> None:
        self.took.append((draft_seconds, step_seconds))


class RoundBench:
    """Runs captured rounds of made-up requests on a pool of its own; what the pool holds does not matter.

    buckets: numbers of requests, each of them one of REQUEST_BUCKETS.
    """

    def __init__(self, target: TargetModel, drafter: Drafter, buckets: Sequence[int] = BUCKETS) -> None:
        valid = min(target.tokenizer.vocab_size, target.config.vocab_size)
        sampler = Sampler(target.backend, target.config.vocab_size, valid, frozenset(target.eos_ids))
        self.drafter = drafter
        self.policy = _Clock()
        self.runner = CudaRoundRunner(
            target, drafter, sampler, self.policy, target.make_pool(LEAST_SLOTS), PAGE_SIZE, max(buckets), GraphCache()
        )
        self.runner.patience = 0
        self.buckets = buckets
        self._measured: tuple[Sizes, Sizes] | None = None

    def steps(self) -> Sizes:
        return self._curves()[0]

    def drafts(self) -> Sizes:
        return self._curves()[1]

    def _curves(self) -> tuple[Sizes, Sizes]:
        """Median seconds of verifying by rows and of drafting by requests, of all rounds; measured once."""
        if self._measured is None:
            steps: dict[int, list[float]] = defaultdict(list)
            drafts: dict[int, list[float]] = defaultdict(list)
            for bucket in self.buckets:
                for places in draft_levels(bucket, self.drafter.gamma):
                    for draft_seconds, step_seconds in self._round(bucket, places):
                        steps[bucket + places].append(step_seconds)
                        if places:
                            drafts[bucket].append(draft_seconds)
            self._measured = (_medians(steps), _medians(drafts))
        return self._measured

    def _round(self, count: int, places: int) -> list[tuple[float, float]]:
        """(draft, verify) seconds of rounds of `count` requests; the first, which captures its graphs, is left out."""
        requests = [made_up_request(PAGE_SIZE, self.drafter.gamma) for _ in range(count)]
        self.policy.places, self.policy.took = places, []
        for _ in range(REPEATS + 1):
            self.runner.launch(requests).read(set())
        return self.policy.took[1:]


def _medians(times: dict[int, list[float]]) -> Sizes:
    return list(times), [statistics.median(seconds) for seconds in times.values()]
