"""Speed of the CUDA path with random weights of a published shape: step times, and engine rounds at a given acceptance.

    python -m exactspec.bench.device --shape qwen3-8b --steps 1x1 1x16 --streams 1
    python -m exactspec.bench.device --shape smollm2-135m --streams 1 64 256 --accept-length 4.05

Step times are medians of replays of a captured graph, by device events, over contexts full of random K/V. Engine
figures are wall time of whole steps in the steady state, scheduling and output included; `--overlap both` and
`--logprobs -1 5` repeat them with and without.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from exactspec.backend.base import KVPool
from exactspec.backend.select import select_backend
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.none import NoDrafter
from exactspec.draft.random_weights import random_draft
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll, VerifyPolicy
from exactspec.errors import DeviceError
from exactspec.model.random_weights import random_target
from exactspec.model.target import TargetModel
from exactspec.types import ForwardBatch, Request, SamplingParams

if TYPE_CHECKING:
    from exactspec.engine.cuda_round import CudaRoundRunner

PAGE = 16
COPY_BYTES_PER_SECOND = 4.3e12  # measured device-to-device copy of an H200, bytes read plus bytes written


@dataclass(frozen=True)
class EngineFigure:
    """Steady state of an engine run."""

    tokens_per_second: float
    step_seconds: float
    tokens_per_round: float
    host_seconds: float  # of a step, not counting the wait for the device
    busy_share: float  # of the time, by events around every round: 1 - idle time between rounds


class Timeline:
    """Notes on the device when each round that a runner launches begins and ends."""

    def __init__(self, runner: CudaRoundRunner) -> None:
        self._launch = runner._launch
        self._rounds: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        runner._launch = self._timed  # type: ignore[method-assign]

    def _timed(self, *args: Any, **options: Any) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        flight = self._launch(*args, **options)
        end.record()
        self._rounds.append((start, end))
        return flight

    def clear(self) -> None:
        self._rounds = []

    def busy_share(self) -> float:
        """Of the time from the first round's begin to the last one's end. The device must be idle."""
        whole = self._rounds[0][0].elapsed_time(self._rounds[-1][1])
        pairs = itertools.pairwise(self._rounds)
        return 1.0 - sum(before[1].elapsed_time(after[0]) for before, after in pairs) / whole


def decode_batch(requests: int, rows: int, context: int, device: torch.device) -> tuple[ForwardBatch, int]:
    """`rows` rows at the end of each of `requests` contexts, pages shuffled; and the slots that takes."""
    pages = -(-context // PAGE)
    table = torch.randperm(requests * pages, device=device).int().view(requests, pages)
    at = torch.arange(context - rows, context, device=device)
    slots = table.long()[:, at // PAGE] * PAGE + at % PAGE
    batch = ForwardBatch(
        token_ids=torch.randint(0, 1000, (requests * rows,), device=device),
        positions=at.int().repeat(requests), slots=slots.flatten().int(),
        q_start=torch.arange(requests + 1, device=device, dtype=torch.int32) * rows,
        kv_len=torch.full((requests,), context, device=device, dtype=torch.int32), page_table=table,
        logit_rows=torch.arange(requests * rows, device=device), page_size=PAGE, max_kv_len=context, max_q_len=rows,
    )  # fmt: skip
    return batch, requests * pages * PAGE


def graph_seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """Median time of one replay of the captured function."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def step_seconds(target: TargetModel, requests: int, rows: int, context: int) -> float:
    """One target step, LM head of all rows included."""
    batch, slots = decode_batch(requests, rows, context, target.backend.device)
    pool: KVPool = target.make_pool(slots)
    pool.k.normal_()
    pool.v.normal_()
    return graph_seconds(lambda: target.logits(target.forward(batch, pool)[0]))


def weight_bytes(target: TargetModel) -> int:
    """All weights, the embedding table included although a step reads only rows of it."""
    config = target.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size * (1 if config.tied else 2)
    return (config.num_layers * layer + head) * target.dtype.itemsize


def make_engine(
    target: TargetModel,
    drafter: Callable[[int], Drafter],
    streams: int,
    tokens: int,
    accept_length: float | None,
    overlap: bool = True,
) -> Engine:
    num_pages = -(-tokens // PAGE)
    drafting = drafter(num_pages * PAGE)
    policy: VerifyPolicy = VerifyAll("coupled")
    if accept_length is not None and drafting.gamma:
        policy = AcceptByDecree(policy, SimulatedAcceptance(accept_length, drafting.gamma, 0))
    config = EngineConfig(
        model=target.name, max_running_requests=streams, prefill_chunk=8192 if streams > 1 else 1024,
        kv_tokens=tokens, prefix_cache=False, overlap=overlap,
    )  # fmt: skip
    return Engine(config, target, drafting, num_pages, policy)


def engine_figure(engine: Engine, streams: int, prompt: int, params: SamplingParams, seconds: float) -> EngineFigure:
    """Runs `streams` equal requests; measures from the end of the prefill until the first of them ends."""
    numbers = random.Random(0)
    for i in range(streams):
        ids = tuple(numbers.randrange(6, 250) for _ in range(prompt + i % 7))
        engine.add(Request(f"r{i}", ids, params, seed=i + 1))
    warm = 0
    while warm < 4 or engine.scheduler.num_waiting or any(r.is_prefilling for r in engine.scheduler.running()):
        engine.step()
        warm += 1
    gc.collect()
    gc.freeze()  # as the server's engine process does: no long collections among the steps
    runner = cast("CudaRoundRunner", engine.runner)
    timeline = Timeline(runner)
    for _ in range(4):  # the first overlapped rounds
        engine.step()
    torch.cuda.synchronize()
    timeline.clear()
    tokens = steps = 0
    waited, start = runner.stage.wait_seconds, time.perf_counter()
    while engine.scheduler.num_running == streams and time.perf_counter() - start < seconds:
        tokens += sum(len(output.token_ids) for output in engine.step())
        steps += 1
    elapsed = time.perf_counter() - start
    waited = runner.stage.wait_seconds - waited
    torch.cuda.synchronize()
    return EngineFigure(
        tokens / elapsed, elapsed / steps, tokens / steps / streams, (elapsed - waited) / steps, timeline.busy_share()
    )


def main() -> None:
    options = _options()
    backend = select_backend("cuda", "bfloat16", options.numerics)
    if backend.name != "cuda":
        raise DeviceError("bench.device measures the CUDA backend; EXACTSPEC_BACKEND chooses another")
    target = TargetModel(backend, random_target(options.shape, device=backend.device, context_length=8192))
    floor = weight_bytes(target) / COPY_BYTES_PER_SECOND
    print(f"{options.shape}: weights {weight_bytes(target) / 1e9:.2f} GB, {floor * 1e6:.0f} us to read")
    for step in options.steps:
        requests, rows = map(int, step.split("x"))
        took = step_seconds(target, requests, rows, options.context)
        print(
            f"step {requests} x {rows} rows, context {options.context}: {took * 1e6:.0f} us = {took / floor:.2f} floors"
        )

    def draft(slots: int) -> Drafter:
        if options.accept_length is None:
            return NoDrafter()
        return BlockDrafter(random_draft(target.config, markov_rank=options.markov_rank), target, slots)

    overlaps = {"on": [True], "off": [False], "both": [True, False]}[options.overlap]
    for streams, overlap, logprobs in itertools.product(options.streams, overlaps, options.logprobs):
        tokens = streams * (options.context + options.new_tokens + 64)
        engine = make_engine(target, draft, streams, tokens, options.accept_length, overlap)
        params = SamplingParams(
            max_new_tokens=options.new_tokens,
            temperature=options.temperature,
            ignore_eos=True,
            logprobs=None if logprobs < 0 else logprobs,
        )
        figure = engine_figure(engine, streams, options.context, params, options.seconds)
        print(
            f"{streams} streams, overlap {'on' if overlap else 'off'}, "
            f"{'no' if logprobs < 0 else f'top-{logprobs}'} logprobs: {figure.tokens_per_second:.0f} tok/s, "
            f"{figure.step_seconds * 1e3:.3f} ms/step, {figure.tokens_per_round:.2f} tokens per round, "
            f"host {figure.host_seconds * 1e3:.3f} ms/step, device busy {figure.busy_share:.1%}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", nargs="*", default=["1x1", "1x16"], help="requests x rows")
    parser.add_argument("--streams", nargs="*", type=int, default=[1])
    parser.add_argument("--accept-length", type=float, help="bonus included; without it nothing is drafted")
    parser.add_argument("--markov-rank", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--logprobs", nargs="*", type=int, default=[-1], help="alternatives; -1: no logprobs")
    parser.add_argument("--overlap", choices=("on", "off", "both"), default="on")
    parser.add_argument("--seconds", type=float, default=3.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
