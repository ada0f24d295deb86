"""Speed of the CUDA path: step times and engine rounds, with random weights of a published shape at a given acceptance,
or with a model, its draft and prompts.

    python -m exactspec.bench.device --shape qwen3-8b --steps 1x1 1x16 --draft-round --markov-rank 256 --streams
    python -m exactspec.bench.device --shape smollm2-135m --streams 1 64 256 --accept-length 4.05
    python -m exactspec.bench.device --model smollm2-135m --draft dspark --prompts FILE --steps --streams 1 64 256

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from exactspec.backend.base import KVPool
from exactspec.backend.select import select_backend
from exactspec.bench.prompts import read_prompts
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.none import NoDrafter
from exactspec.draft.random_weights import random_draft
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.build import assemble
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll, VerifyPolicy
from exactspec.errors import ConfigError, DeviceError
from exactspec.model.loader import load_target
from exactspec.model.random_weights import random_target
from exactspec.model.target import TargetModel
from exactspec.types import ForwardBatch, Request, SamplingParams

if TYPE_CHECKING:
    from exactspec.backend.cuda.graphs import GraphCache
    from exactspec.engine.cuda_round import CudaRoundRunner

PAGE = 16
COPY_BYTES_PER_SECOND = 4.3e12  # measured device-to-device copy of an H200, bytes read plus bytes written


@dataclass(frozen=True)
class EngineFigure:
    """Steady state of an engine run."""

    tokens_per_second: float
    step_seconds: float
    tokens_per_round: float
    host_seconds: float  # of a step, all work of the host: not counting the wait for the device
    launch_seconds: float  # of these: planning the next round and launching it; the rest is results and outputs
    num_captured: int  # graphs, while the clock ran
    busy_share: float  # of the time, by events around every round: 1 - idle time between rounds


@dataclass(frozen=True)
class Window:
    """What was counted while all streams of a group were running."""

    tokens: int
    steps: int
    seconds: float
    waited: float  # for the device
    launched: float  # seconds of planning and launching
    captured: int  # graphs
    busy_share: float


class Timeline:
    """Notes on the device when each round that a runner launches begins and ends."""

    def __init__(self, runner: CudaRoundRunner) -> None:
        self._runner, self._launch = runner, runner._launch
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

    def remove(self) -> None:
        """The runner is as it was."""
        del self._runner._launch

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


def graph_seconds(function: Callable[[], object], repeats: int = 15, together: int = 1) -> float:
    """Median time of one replay of the captured function, or of a replay among `together` without a pause: of several
    ranks none waits long for the others' hosts."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()

        def replay() -> None:
            for _ in range(together):
                graph.replay()

        return replay_seconds(replay, repeats) / together


def replay_seconds(replay: Callable[[], object], repeats: int) -> float:
    """Median time by device events on the current stream, after two that do not count."""
    times = []
    for _ in range(2 + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def step_seconds(target: TargetModel, requests: int, rows: int, context: int, together: int = 1) -> float:
    """One target step, LM head of all rows included; `together` as in graph_seconds."""
    batch, slots = decode_batch(requests, rows, context, target.backend.device)
    pool: KVPool = target.make_pool(slots)
    pool.k.normal_()
    pool.v.normal_()
    return graph_seconds(lambda: target.logits(target.forward(batch, pool)[0]), together=together)


def draft_round_seconds(engine: Engine, context: int) -> float:
    """The captured draft of one greedy request with `context` committed tokens: layers, LM head, sequential draw."""
    from exactspec.backend.cuda.seats import Field

    runner, drafter = cast("CudaRoundRunner", engine.runner), cast(BlockDrafter, engine.drafter)
    graph = runner._draft_graph(1, False)
    row = {Field.ACTIVE: 1, Field.ANCHOR: 5, Field.POSITION: context, Field.LIMIT: 1 << 30, Field.DECREE: -1}
    row |= {Field.MOST_DRAFTS: drafter.gamma, Field.PAGE_INDEX: -1}
    for number, value in row.items():
        runner.stage.message[number, 0] = value
    pages = drafter.pool.k.shape[1] // PAGE
    runner.stage.seats.page_table[0, :pages] = torch.randperm(pages, device=drafter.pool.k.device).int()
    drafter.pool.k.normal_()
    drafter.pool.v.normal_()
    return replay_seconds(graph.replay, 25)


def draft_bytes(drafter: BlockDrafter, target: TargetModel) -> int:
    """Weights that a draft round must read: layers and LM head once, W2 of the sequential head for each draft."""
    config = drafter.config
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layers = config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.hidden_size + drafter.gamma * config.markov_rank
    return (layers + head * target.config.vocab_size) * target.dtype.itemsize


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


def real_engine(target: TargetModel, options: argparse.Namespace, streams: int, tokens: int, overlap: bool) -> Engine:
    """As it is served, for a model with its draft."""
    config = EngineConfig(
        model=target.name, draft=options.draft, verify=options.verify, acceptance=options.acceptance,
        max_running_requests=streams,
        prefill_chunk=8192 if streams > 1 else 1024, prefix_cache=False, overlap=overlap,
    )  # fmt: skip
    return assemble(config, target, -(-tokens // PAGE))


def engine_figure(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams, seconds: float) -> Window:
    """Runs the prompts at once; measures from the end of the prefill until the first of them ends."""
    for i, ids in enumerate(prompts):
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
    graphs = cast("GraphCache", runner.graphs)
    waited, launched, captured = runner.stage.wait_seconds, engine.rounds.launch_seconds, len(graphs)
    start = time.perf_counter()
    while engine.scheduler.num_running == len(prompts) and time.perf_counter() - start < seconds:
        tokens += sum(len(output.token_ids) for output in engine.step())
        steps += 1
    elapsed = time.perf_counter() - start
    waited, launched = runner.stage.wait_seconds - waited, engine.rounds.launch_seconds - launched
    captured = len(graphs) - captured
    torch.cuda.synchronize()
    busy = timeline.busy_share() if steps else 0.0
    timeline.remove()
    for i in range(len(prompts)):
        engine.abort(f"r{i}")
    while engine.has_work():
        engine.step()
    return Window(tokens, steps, elapsed, waited, launched, captured, busy)


def summary(windows: Sequence[Window], streams: int) -> EngineFigure:
    tokens, steps = sum(w.tokens for w in windows), sum(w.steps for w in windows)
    seconds, waited = sum(w.seconds for w in windows), sum(w.waited for w in windows)
    busy = sum(w.busy_share * w.seconds for w in windows) / seconds
    return EngineFigure(
        tokens / seconds, seconds / steps, tokens / steps / streams, (seconds - waited) / steps,
        sum(w.launched for w in windows) / steps, sum(w.captured for w in windows), busy,
    )  # fmt: skip


def made_up_prompts(streams: int, length: int) -> list[tuple[int, ...]]:
    numbers = random.Random(0)
    return [tuple(numbers.randrange(6, 250) for _ in range(length + i % 7)) for i in range(streams)]


def file_prompts(target: TargetModel, path: Path, longest: int) -> list[tuple[int, ...]]:
    """Chat prompts of a file, in its order, without the long ones."""
    chats = ([{"role": "user", "content": text}] for text in read_prompts(path))
    prompts = (tuple(target.tokenizer.apply_chat_template(chat)) for chat in chats)
    return [ids for ids in prompts if len(ids) <= longest]


def block_drafter(target: TargetModel, options: argparse.Namespace, slots: int) -> BlockDrafter:
    with target.backend.device:  # where random numbers are made fast
        model = random_draft(target.config, markov_rank=options.markov_rank)
    return BlockDrafter(model, target, slots)


def print_draft_round(target: TargetModel, options: argparse.Namespace) -> None:
    tokens = options.context + 64
    engine = make_engine(target, lambda slots: block_drafter(target, options, slots), 1, tokens, 1.0)
    took = draft_round_seconds(engine, options.context)
    floor = draft_bytes(cast(BlockDrafter, engine.drafter), target) / COPY_BYTES_PER_SECOND
    ratio = f"{took / floor:.2f} floors of {floor * 1e6:.0f} us"
    print(f"draft round, context {options.context}: {took * 1e6:.0f} us = {ratio}")


def main() -> None:
    options = _options()
    backend = select_backend("cuda", "bfloat16", options.numerics)
    if backend.name != "cuda":
        raise DeviceError("bench.device measures the CUDA backend; EXACTSPEC_BACKEND chooses another")
    if options.model is None:
        target = TargetModel(backend, random_target(options.shape, device=backend.device, context_length=8192))
    else:
        target = TargetModel(backend, load_target(options.model, dtype="bfloat16", device=backend.device))
    floor = weight_bytes(target) / COPY_BYTES_PER_SECOND
    print(f"{target.name}: weights {weight_bytes(target) / 1e9:.2f} GB, {floor * 1e6:.0f} us to read", flush=True)
    for step in options.steps:
        requests, rows = map(int, step.split("x"))
        took = step_seconds(target, requests, rows, options.context)
        place = f"step {requests} x {rows} rows, context {options.context}"
        print(f"{place}: {took * 1e6:.0f} us = {took / floor:.2f} floors", flush=True)
    overlaps = {"on": [True], "off": [False], "both": [True, False]}[options.overlap]
    if options.draft_round:
        print_draft_round(target, options)

    for streams, overlap, logprobs in itertools.product(options.streams, overlaps, options.logprobs):
        _streams(target, options, streams, overlap, logprobs)


def _streams(target: TargetModel, options: argparse.Namespace, streams: int, overlap: bool, logprobs: int) -> None:
    tokens = streams * (options.context + options.new_tokens + 64)
    groups = [made_up_prompts(streams, options.context)]
    if options.model is None:
        engine = make_engine(target, lambda n: _random_draft(target, options, n), streams, tokens,
                             options.accept_length, overlap)  # fmt: skip
    else:
        engine = real_engine(target, options, streams, tokens, overlap)
        prompts = file_prompts(target, options.prompts, options.context)
        starts = range(0, len(prompts) - streams + 1, streams)
        groups = [prompts[start : start + streams] for start in starts][: options.groups + 1]
        if not groups:
            raise ConfigError(f"{options.prompts}: {len(prompts)} prompts of at most {options.context} tokens")
    params = SamplingParams(
        max_new_tokens=options.new_tokens,
        temperature=options.temperature,
        ignore_eos=True,
        logprobs=None if logprobs < 0 else logprobs,
    )
    windows = [engine_figure(engine, group, params, options.seconds) for group in groups]
    figure = summary(windows[1:] or windows, streams)  # the first of several groups is a warm-up
    stats = engine.stats()
    verified = f", {stats.num_verified / stats.num_drafted:.0%} of drafts verified" if stats.num_drafted else ""
    captured = f", {figure.num_captured} graphs captured" if figure.num_captured else ""
    print(
        f"{streams} streams, overlap {'on' if overlap else 'off'}, "
        f"{'no' if logprobs < 0 else f'top-{logprobs}'} logprobs: {figure.tokens_per_second:.0f} tok/s, "
        f"{figure.step_seconds * 1e3:.3f} ms/step, {figure.tokens_per_round:.2f} tokens per round, "
        f"host {figure.host_seconds * 1e3:.3f} ms/step ({figure.launch_seconds * 1e3:.3f} of it planning and "
        f"launching), device busy {figure.busy_share:.1%}{verified}{captured}",
        flush=True,
    )


def _random_draft(target: TargetModel, options: argparse.Namespace, slots: int) -> Drafter:
    if options.accept_length is None:
        return NoDrafter()
    return block_drafter(target, options, slots)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--model", help="instead of --shape: real weights, with --draft and --prompts")
    parser.add_argument("--draft", help="of the model; none without it")
    parser.add_argument("--verify", choices=("all", "confidence"), default="all", help="with --draft")
    parser.add_argument("--acceptance", choices=("coupled", "rejection"), default="coupled", help="with --draft")
    parser.add_argument("--prompts", type=Path, help="JSON-lines file for --model; prompts up to --context tokens")
    parser.add_argument("--groups", type=int, default=3, help="of prompts that count; one before them warms up")
    parser.add_argument("--numerics", choices=("exact", "fast"), default="exact")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", nargs="*", default=["1x1", "1x16"], help="requests x rows")
    parser.add_argument("--draft-round", action="store_true", help="time the draft of one request")
    parser.add_argument("--streams", nargs="*", type=int, default=[1])
    parser.add_argument("--accept-length", type=float, help="bonus included; without it nothing is drafted")
    parser.add_argument("--markov-rank", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--logprobs", nargs="*", type=int, default=[-1], help="alternatives; -1: no logprobs")
    parser.add_argument("--overlap", choices=("on", "off", "both"), default="on")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    if options.model is not None and options.prompts is None:
        parser.error("--model needs --prompts")
    return options


if __name__ == "__main__":
    main()
