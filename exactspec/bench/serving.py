"""`exactspec bench serve`: load on running servers, closed loop (clients at once) or open (requests a second).

    exactspec bench serve --model smollm2-135m --draft none,dspark --gguf MODEL.gguf --concurrency 1,8,32
    exactspec bench serve --url http://127.0.0.1:30000 [--url NAME=URL ...] --rate 2,4
    exactspec bench serve --model smollm2-135m --draft none,dspark --overhead --concurrency 1,8

Every server gets the same requests over /v1/completions, streamed, in turns. With --model our server is started once
for each draft, with --gguf llama.cpp's (xllamacpp), all with as many slots as the largest concurrency. Every loop has
prompts that no cache has seen. With --overhead our server is compared with the engine alone instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from exactspec.bench.load import Loop, closed_loop, open_loop
from exactspec.bench.overhead import OwnServer, measure, show
from exactspec.bench.peers import llama_cpp_server
from exactspec.bench.prompts import read_prompts
from exactspec.errors import ConfigError

N = TypeVar("N", int, float)
SLOT_TOKENS = 1024  # K/V tokens set aside for each slot of a server that is started here


@dataclass(slots=True)
class Report:
    """One server under one load. Times in seconds: (median, 95th percentile) over requests."""

    name: str
    load: str
    requests: int
    failures: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token: tuple[float, float]
    inter_token: tuple[float, float]  # time from the first to the last text over the tokens after the first
    total: tuple[float, float]


def report(name: str, load: str, loops: Sequence[Loop]) -> Report:
    """All rounds of a load as one."""
    timings = [timing for loop in loops for timing in loop.timings]
    tokens, seconds = sum(loop.tokens for loop in loops), sum(loop.seconds for loop in loops)
    return Report(
        name=name,
        load=load,
        requests=len(timings),
        failures=sum(loop.failures for loop in loops),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        first_token=_spread([t.first for t in timings]),
        inter_token=_spread([(t.total - t.first) / (t.tokens - 1) for t in timings if t.tokens > 1]),
        total=_spread([t.total for t in timings]),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, 95th percentile)"""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="exactspec bench serve",
        usage="exactspec bench serve [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="[NAME=]URL", help="a running server; may be given several times"
    )
    parser.add_argument("--model", metavar="MODEL", help="start our server on this model")
    parser.add_argument(
        "--draft", default="none", metavar="DRAFT,DRAFT", help="once for each of these drafts (default: none)"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="also measure llama.cpp's server on this file")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="llama.cpp's threads (default: 2)")
    parser.add_argument(
        "--concurrency", type=_numbers(int), default="1,8", metavar="N,N",
        help="closed loops: clients at once (default: 1,8)",
    )  # fmt: skip
    parser.add_argument("--rate", type=_numbers(float), default="", metavar="X,X", help="open loops: requests a second")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="requests of each loop (default: 32)")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="loops of each kind, servers in turns (default: 1)"
    )
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="of each request (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines (default: the built-in set)")
    parser.add_argument("--overhead", action="store_true", help="our server against the engine alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures here")
    return parser


def _numbers(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def numbers(text: str) -> list[N]:  # argparse calls an option that fails by this name
        return [kind(part) for part in text.split(",") if part]

    return numbers


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    known = read_prompts(options.prompts)
    if options.overhead:
        return _overhead(options, known)
    with ExitStack() as stack:
        servers = _servers(options, max(options.concurrency, default=8), stack)
        reports = _measure(options, servers, known)
    if options.json:
        _write(options.json, reports)
    return 1 if any(item.failures for item in reports) else 0


def _overhead(options: argparse.Namespace, prompts: Sequence[str]) -> int:
    if not options.model:
        raise ConfigError("model: --overhead starts the server itself and needs to know on which model")
    results = {}
    for draft in options.draft.split(","):
        results[draft] = measure(
            options.model, None if draft == "none" else draft, prompts, options.concurrency, rounds=options.rounds,
            new_tokens=options.new_tokens, temperature=options.temperature,
        )  # fmt: skip
        print(f"draft {draft}, milliseconds a token\n{show(results[draft])}", flush=True)
    if options.json:
        _write(options.json, [item for items in results.values() for item in items])
    return 0


def _servers(options: argparse.Namespace, slots: int, stack: ExitStack) -> list[tuple[str, str]]:
    """(name, URL) of every server, those to be started running."""
    servers = [tuple(item.split("=", 1)) if "=" in item.split("//")[0] else (item, item) for item in options.url]
    for draft in options.draft.split(",") if options.model else []:
        flags = ["--draft", draft, "--max-running-requests", str(slots), "--max-total-tokens", str(SLOT_TOKENS * slots)]
        own = OwnServer(options.model, flags)
        stack.callback(own.stop)
        own.wait()
        servers.append((f"ours, {draft}", own.url))
    if options.gguf:
        peer = llama_cpp_server(options.gguf, slots=slots, slot_tokens=SLOT_TOKENS, threads=options.threads)
        stack.callback(lambda: peer)  # it serves as long as somebody holds it
        servers.append(("llama.cpp", str(peer.listening_address)))
    if not servers:
        raise ConfigError("url: which server? Give --url, --model or --gguf")
    return servers


def _measure(options: argparse.Namespace, servers: Sequence[tuple[str, str]], known: Sequence[str]) -> list[Report]:
    settings = {"new_tokens": options.new_tokens, "temperature": options.temperature}
    loads: list[tuple[str, Callable[..., Loop]]] = [
        (f"{clients} at once", partial(closed_loop, concurrency=clients)) for clients in options.concurrency
    ]
    loads += [(f"{rate:g} a second", partial(open_loop, rate=rate)) for rate in options.rate]
    for _, url in servers:
        closed_loop(url, known[:2], concurrency=1, **settings)  # warm
    print(_HEADER, flush=True)
    reports: list[Report] = []
    for number, (load, run) in enumerate(loads):
        loops: dict[str, list[Loop]] = {name: [] for name, _ in servers}
        for turn in range(options.rounds):
            mark = number * options.rounds + turn + 1
            prompts = [f"{mark}. {known[i % len(known)]}" for i in range(options.requests)]  # in no cache yet
            first = turn % len(servers)  # a drifting machine hits all alike
            for name, url in (*servers[first:], *servers[:first]):
                loops[name].append(run(url, prompts, **settings))
        for name, _ in servers:
            reports.append(report(name, load, loops[name]))
            print(_line(reports[-1]), flush=True)
    return reports


def _write(path: Path, items: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(item) for item in items], indent=1))


_HEADER = (
    f"{'server':<16}{'load':<14}{'ok':>5}{'failed':>7}{'tok/s':>8}{'first ms':>9}{'p95':>7}{'ms/tok':>8}{'p95':>8}"
)


def _line(item: Report) -> str:
    first, inter = item.first_token, item.inter_token
    return (
        f"{item.name:<16}{item.load:<14}{item.requests:>5}{item.failures:>7}{item.tokens_per_second:>8.1f}"
        f"{first[0] * 1e3:>9.0f}{first[1] * 1e3:>7.0f}{inter[0] * 1e3:>8.2f}{inter[1] * 1e3:>8.2f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
