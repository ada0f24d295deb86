"""Tensor parallelism measured: one stream of a shape with random weights, for each number of ranks, and whether its
answers stay the same bits from run to run and among other requests.

    python -m exactspec.bench.ranks --shape qwen3-8b --tp-size 1 2
    python -m exactspec.bench.ranks --shape qwen3-8b --draft random --accept-length 4 --tp-size 1 2

Speed is output tokens after the first over the time since the first, best of the runs; graphs are captured before.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from exactspec.engine.build import build_engine
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.types import Request, SamplingParams

Answer = list[tuple[int, float]]  # (token id, its raw logprob)


@dataclass(frozen=True)
class RanksFigure:
    """One stream with `num_ranks` ranks."""

    num_ranks: int
    tokens_per_second: float
    same_again: bool  # the second run gave the same tokens and logprobs, as floats
    same_among_others: bool


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
    parser.add_argument("--streams", type=int, default=8, help="requests of the run among others")
    options = parser.parse_args(argv)
    base = 0.0
    for size in options.tp_size:
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
