"""Tensor parallelism measured: one stream of a shape with random weights, for each number of ranks, and whether its
answers stay the same bits from run to run and among other requests.

    python -m exactspec.bench.ranks --shape qwen3-8b --tp-size 1 2
    python -m exactspec.bench.ranks --shape qwen3-8b --draft random --accept-length 4 --tp-size 1 2
    python -m exactspec.bench.ranks --shape qwen3-8b --tp-size 1 2 --steps 1x1 1x16

Speed is output tokens after the first over the time since the first, best of the runs; graphs are captured before.
With --steps no stream runs: a target step of requests x rows is timed (replays of a captured graph, by device events),
and all of its sums over the ranks alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from exactspec.backend.parallel import SINGLE, Parallel, join_group, leave_group
from exactspec.backend.select import select_backend
from exactspec.bench.device import graph_seconds, step_seconds
from exactspec.engine.build import build_engine
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.model.loader import load_target
from exactspec.model.target import TargetModel
from exactspec.types import Request, SamplingParams

if TYPE_CHECKING:
    from exactspec.backend.cuda.stack import CudaLayer, CudaStack

REPLAYS = 20  # without a pause: so the ranks' hosts need not agree on when one begins
Answer = list[tuple[int, float]]  # (token id, its raw logprob)


@dataclass(frozen=True)
class RanksFigure:
    """One stream with `num_ranks` ranks."""

    num_ranks: int
    tokens_per_second: float
    same_again: bool  # the second run gave the same tokens and logprobs, as floats
    same_among_others: bool


def step_figures(options: argparse.Namespace, parallel: Parallel) -> list[str]:
    """This rank's part of timed steps, one line for each; the ranks call this together."""
    backend = select_backend("cuda", options.dtype, "exact", parallel)
    model = f"random:{options.shape}"
    loaded = load_target(model, options.dtype, 8192, backend.device, parallel)
    target = TargetModel(backend, loaded)
    loaded.release_layers()
    lines = []
    for step in options.steps:
        requests, rows = map(int, step.split("x"))
        torch.manual_seed(0)
        took = step_seconds(target, requests, rows, options.context, REPLAYS) * 1e6
        line = f"step {step} rows: {took:.0f} us"
        if parallel.size > 1:
            joined = sum_seconds(cast("CudaStack", target.stack).layers, requests * rows) * 1e6
            line += f", of which {2 * target.config.num_layers} sums over the ranks take {joined:.0f}"
        lines.append(line)
    return lines


def sum_seconds(layers: Sequence[CudaLayer], rows: int) -> float:
    """All sums of a step alone, in the order of the step, in one graph."""
    width = layers[0].o.out_features
    part, residual = (torch.randn((rows, width), device=layers[0].o.weight.device) for _ in range(2))
    out = torch.empty_like(part)

    def sums() -> None:
        for layer in layers:
            for slot in (0, 1):
                layer.add_ranks(slot, part, residual, out)

    return graph_seconds(sums, together=REPLAYS)


def step_ranks(options: argparse.Namespace, size: int) -> list[str]:
    """Rank 0's lines; the other ranks are processes that run the same command line."""
    if size == 1:
        return step_figures(options, SINGLE)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        command = [sys.executable, "-m", "exactspec.bench.ranks", *sys.argv[1:], "--join"]
        others = [subprocess.Popen([*command, str(rank), str(size), store]) for rank in range(1, size)]
        try:
            lines = step_figures(options, join_group(0, size, store, is_cuda=True))
        finally:
            leave_group()
            for process in others:
                process.wait()
    return lines


def measure(options: argparse.Namespace, num_ranks: int) -> RanksFigure:
    """Builds an engine, runs one prompt alone twice and once among others, and closes it."""
    config = EngineConfig(
        model=f"random:{options.shape}", draft=options.draft, device=options.device, dtype=options.dtype,
        kv_tokens=(options.streams + 1) * (options.context + options.new_tokens + 64), prefix_cache=False,
        max_running_requests=options.streams, simulate_accept_length=options.accept_length, tensor_parallel=num_ranks,
    )  # fmt: skip
    engine = build_engine(config)
    try:
        numbers = random.Random(0)
        prompts = [
            [numbers.randrange(6, 250) for _ in range(options.context + 7 * i)] for i in range(max(options.streams, 1))
        ]
        _run(engine, prompts[:1], options.new_tokens)
        alone = [_run(engine, prompts[:1], options.new_tokens) for _ in range(2)]
        among = _run(engine, prompts, options.new_tokens)[0]
    finally:
        engine.close()
    speed = max(speed for _, speed in alone)
    return RanksFigure(num_ranks, speed, alone[0][0] == alone[1][0], among[0] == alone[0][0][0])


def _run(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
    """The answers, and tokens per second after each first token."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), params, seed=number))
    answers: list[Answer] = [[] for _ in prompts]
    began, after_first = 0.0, 0
    while engine.has_work():
        for output in engine.step():
            if began:
                after_first += len(output.token_ids)
            entries = output.logprobs or ()
            answers[int(output.request_id)] += [(entry.token_id, entry.logprob or 0.0) for entry in entries]
        if not began and all(answers):
            began = time.perf_counter()
    return answers, after_first / (time.perf_counter() - began)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b", help="a published shape or a config.json")
    parser.add_argument("--draft", help="random: a draft of the shape")
    parser.add_argument("--accept-length", type=float, help="decreed for the random draft, bonus included")
    parser.add_argument("--tp-size", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--steps", nargs="*", help="instead of a stream: requests x rows")
    parser.add_argument("--join", nargs=3, help=argparse.SUPPRESS)  # rank, ranks, file where they meet
    parser.add_argument("--streams", type=int, default=8, help="requests of the run among others")
    options = parser.parse_args(argv)
    if options.join:
        rank, size, store = options.join
        step_figures(options, join_group(int(rank), int(size), store, is_cuda=True))
        leave_group()
        return
    base = 0.0
    for size in options.tp_size:
        if options.steps:
            for line in step_ranks(options, size):
                print(f"{options.shape}, {size} ranks: {line}", flush=True)
            continue
        figure = measure(options, size)
        base = base or figure.tokens_per_second
        print(
            f"{options.shape}, {size} ranks: {figure.tokens_per_second:.1f} tok/s, "
            f"{figure.tokens_per_second / base:.2f} of the first; "
            f"same bits again: {figure.same_again}, among others: {figure.same_among_others}",
            flush=True,
        )


if __name__ == "__main__":
    main()
