"""What a step and a draft cost on this device, measured once and kept in a file: the confidence policy plans
with it.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import exactspec
from exactspec.backend.base import KVPool
from exactspec.draft.base import DraftBatch, Drafter
from exactspec.engine.batch import Block, build_batch, page_rows
from exactspec.errors import ConfigError
from exactspec.model.hub import cache_folder
from exactspec.model.target import TargetModel
from exactspec.types import Request, RunningRequest, SamplingParams
from exactspec.verify.sps import SpsKey, SpsTable, measure_steps

logger = logging.getLogger(__name__)
CONTEXT = 256  # tokens of K/V behind each measured row
STEP_ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
DRAFT_REQUESTS = (1, 2, 4, 8, 16, 32, 48, 64)
MEASURED_ROWS_PER_REQUEST = 8
LEAST_SLOTS = CONTEXT + 64  # pool that measuring needs, at page size 16


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a target step by its rows, and of a draft by its requests (None: drafting is free, e.g. n-gram)."""

    step: SpsTable
    draft: SpsTable | None

    def draft_seconds(self, num_requests: int) -> float:
        return 1.0 / self.draft.sps(num_requests) if self.draft is not None and num_requests else 0.0


def load_or_measure(
    target: TargetModel, drafter: Drafter, draft_name: str, *, max_requests: int, num_slots: int
) -> StepCosts:
    """The curves of this engine: from the cache folder, or measured now (seconds) and written there."""
    if num_slots < LEAST_SLOTS:
        raise ConfigError(f"kv_tokens: verify='confidence' measures step costs on {LEAST_SLOTS}, got {num_slots}")
    folder = cache_folder() / "sps"
    step_key = _key(target, "step")
    draft_key = _key(target, f"draft {draft_name} gamma {drafter.gamma}")
    if target.backend.parallel.size > 1:
        return _measure_together(target, drafter, max_requests, step_key, draft_key)
    step = _load(folder, step_key)
    draft = _load(folder, draft_key) if drafter.capture_layers else None
    if draft is not None and not _reaches(draft, max_requests):
        step = draft = None
    if step is not None and (draft is not None or not drafter.capture_layers):
        return StepCosts(step, draft)
    logger.info("measuring step costs of %s on %s (kept for later starts)", target.name, target.backend.device)
    bench = _make_bench(target, drafter, max_requests)
    if step is None:
        step = SpsTable.from_measurements(step_key, *bench.steps())
        step.save(_path(folder, step_key))
    if drafter.capture_layers:
        draft = SpsTable.from_measurements(draft_key, *bench.drafts())
        draft.save(_path(folder, draft_key))
    return StepCosts(step, draft)


def _reaches(draft: SpsTable, max_requests: int) -> bool:
    """Whether a kept curve is of an engine for as many requests: one measured for a single request says nothing of 64,
    and all that real steps correct would be that one point."""
    return draft.rows[-1] >= max(count for count in DRAFT_REQUESTS if count <= max_requests)


def _measure_together(
    target: TargetModel, drafter: Drafter, max_requests: int, step_key: SpsKey, draft_key: SpsKey
) -> StepCosts:
    """Ranks measure in step, at every start, and all plan with rank 0's curves: equal plans need equal numbers."""
    bench, parallel = _make_bench(target, drafter, max_requests), target.backend.parallel
    rows, seconds = bench.steps()
    step = SpsTable.from_measurements(step_key, rows, parallel.from_first(seconds))
    if not drafter.capture_layers:
        return StepCosts(step, None)
    counts, seconds = bench.drafts()
    return StepCosts(step, SpsTable.from_measurements(draft_key, counts, parallel.from_first(seconds)))


class CostBench(Protocol):
    """Measures on this device: sizes, and the median seconds of each."""

    def steps(self) -> tuple[list[int], list[float]]:
        """Target steps by their rows."""
        ...

    def drafts(self) -> tuple[list[int], list[float]]:
        """Drafts by the requests they are made for."""
        ...


def _make_bench(target: TargetModel, drafter: Drafter, max_requests: int) -> CostBench:
    """What is measured is what will be run: steps as they are, or the captured rounds of a device that has them."""
    if target.backend.name != "cuda":
        return _Bench(target, drafter, min(max_requests, DRAFT_REQUESTS[-1]))
    from exactspec.engine.cuda_profile import RoundBench

    return RoundBench(target, drafter)  # for any number of requests: it takes little longer


def _key(target: TargetModel, what: str) -> SpsKey:
    backend = target.backend
    device = torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "cpu"
    threads = getattr(backend, "num_threads", 1)
    name = f"{device}, backend {backend.name}, {threads} threads"
    name += ", captured rounds" if backend.name == "cuda" else ""
    return SpsKey(name, str(target.dtype), f"{target.name}: {what}", exactspec.__version__)


def _path(folder: Path, key: SpsKey) -> Path:
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.json"


def _load(folder: Path, key: SpsKey) -> SpsTable | None:
    path = _path(folder, key)
    if not path.exists():
        return None
    try:
        return SpsTable.load(path, key)
    except ConfigError as error:
        logger.warning("%s; measuring again", error)
        return None


class _Bench:
    """Runs single target steps and single drafts on a pool of its own; what the pool holds does not matter."""

    def __init__(self, target: TargetModel, drafter: Drafter, max_requests: int) -> None:
        self.target = target
        self.drafter = drafter
        self.max_requests = max_requests
        self.page_size = 16
        self.pool: KVPool = target.make_pool(LEAST_SLOTS)

    def steps(self) -> tuple[list[int], list[float]]:
        return list(STEP_ROWS), measure_steps(self._step, STEP_ROWS, repeats=3)

    def drafts(self) -> tuple[list[int], list[float]]:
        counts = [count for count in DRAFT_REQUESTS if count <= self.max_requests]
        return counts, measure_steps(self._draft, counts, repeats=3)

    def _step(self, num_rows: int) -> None:
        """Blocks of a verify's usual size that share their pages: the work is that of so many rows."""
        starts = range(0, num_rows, MEASURED_ROWS_PER_REQUEST)
        sizes = [min(MEASURED_ROWS_PER_REQUEST, num_rows - start) for start in starts]
        blocks = [
            Block(made_up_request(self.page_size, self.drafter.gamma), CONTEXT, [1] * size, size) for size in sizes
        ]
        batch = build_batch(blocks, self.page_size, self.target.backend.device)
        hidden, _ = self.target.forward(batch, self.pool, self.drafter.capture_layers)
        self._wait(self.target.logits(hidden).argmax(dim=-1))

    def _draft(self, num_requests: int) -> None:
        device = self.target.backend.device
        requests = [made_up_request(self.page_size, self.drafter.gamma) for _ in range(num_requests)]
        batch = DraftBatch(
            requests=requests,
            anchor_ids=torch.ones(num_requests, dtype=torch.int64, device=device),
            anchor_positions=torch.full((num_requests,), CONTEXT, dtype=torch.int32, device=device),
            page_table=torch.from_numpy(page_rows(requests)).to(device),
            page_size=self.page_size,
            max_kv_len=CONTEXT,
        )
        self._wait(self.drafter.propose(batch).token_ids)

    @staticmethod
    def _wait(result: torch.Tensor) -> None:
        """Reading one number back waits for the device."""
        result.flatten()[-1].item()


def made_up_request(page_size: int, gamma: int) -> RunningRequest:
    """A greedy request with CONTEXT tokens behind its anchor. All such requests have the same pages, 0 and on."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1024)
    request = Request("profile", (1,) * CONTEXT, params, seed=0)
    pages = list(range(-(-(CONTEXT + MEASURED_ROWS_PER_REQUEST + gamma + 1) // page_size)))
    return RunningRequest(request, [1] * (CONTEXT + 1), kv_len=CONTEXT, pages=pages, max_tokens=CONTEXT + 1024)
