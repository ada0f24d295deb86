"""`exactspec bench serve`: load on running servers, closed loop (clients at once) or open (requests a second).

    python -m exactspec.bench.serving --url http://127.0.0.1:30000 [--url NAME=URL ...] --concurrency 1,8,32

Every server gets the same requests over /v1/completions, streamed. With --gguf, llama.cpp's server (xllamacpp) is
started on that file with as many slots, and measured in the same run, in turns.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exactspec.bench.prompts import read_prompts
from exactspec.errors import ConfigError


@dataclass(slots=True)
class Timing:
    """One request: seconds to the first token and in all, tokens, gaps between events divided by their tokens."""

    first: float
    total: float
    tokens: int
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """One server under one load. Times in seconds, medians and 95th percentiles over requests (gaps: over events)."""

    name: str
    load: str
    requests: int
    failures: int
    tokens: int
    seconds: float
    tokens_per_second: float
    first_token: tuple[float, float]
    inter_token: tuple[float, float]
    total: tuple[float, float]


def one_request(url: str, prompt: str, new_tokens: int, temperature: float, seed: int) -> Timing:
    """Streams one completion. Raises OSError or ValueError when the server does not answer as it should."""
    parts = urlsplit(url)
    body = {
        "model": "default", "prompt": prompt, "max_tokens": new_tokens, "temperature": temperature, "seed": seed,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=600)
    began = last = time.perf_counter()
    timing = Timing(0.0, 0.0, 0)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {response.read(300)!r}")
        events = 0
        for event in _events(response):
            now = time.perf_counter()
            if event.get("usage"):
                timing.tokens = event["usage"]["completion_tokens"]
            if not event.get("choices") or not event["choices"][0].get("text"):
                continue
            if not events:
                timing.first = now - began
            else:
                timing.gaps.append(now - last)
            events, last = events + 1, now
    finally:
        connection.close()
    timing.total = last - began
    return timing


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def closed_loop(url: str, prompts: Sequence[str], concurrency: int, **options: Any) -> tuple[list[Timing], int, float]:
    """`concurrency` clients, each sending its next request when the last is answered. (timings, failures, seconds)"""
    queue = list(enumerate(prompts))[::-1]
    timings: list[Timing] = []
    failures = 0
    lock = threading.Lock()

    def client() -> None:
        nonlocal failures
        while True:
            with lock:
                if not queue:
                    return
                number, prompt = queue.pop()
            try:
                timing = one_request(url, prompt, seed=number, **options)
                with lock:
                    timings.append(timing)
            except (OSError, ValueError):
                with lock:
                    failures += 1

    began = time.perf_counter()
    _join([threading.Thread(target=client) for _ in range(concurrency)])
    return timings, failures, time.perf_counter() - began


def open_loop(url: str, prompts: Sequence[str], rate: float, **options: Any) -> tuple[list[Timing], int, float]:
    """Requests arrive at random (Poisson) `rate` a second, whether or not the server keeps up."""
    rng = random.Random(1)
    timings: list[Timing] = []
    failures = 0
    lock = threading.Lock()

    def client(delay: float, number: int, prompt: str) -> None:
        nonlocal failures
        time.sleep(delay)
        try:
            timing = one_request(url, prompt, seed=number, **options)
            with lock:
                timings.append(timing)
        except (OSError, ValueError):
            with lock:
                failures += 1

    at, threads = 0.0, []
    for number, prompt in enumerate(prompts):
        threads.append(threading.Thread(target=client, args=(at, number, prompt)))
        at += rng.expovariate(rate)
    began = time.perf_counter()
    _join(threads)
    return timings, failures, time.perf_counter() - began


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report(name: str, load: str, timings: Sequence[Timing], failures: int, seconds: float) -> Report:
    per_token = [(t.total - t.first) / (t.tokens - 1) for t in timings if t.tokens > 1]
    tokens = sum(t.tokens for t in timings)
    return Report(
        name=name,
        load=load,
        requests=len(timings),
        failures=failures,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        first_token=_spread([t.first for t in timings]),
        inter_token=_spread(per_token),
        total=_spread([t.total for t in timings]),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, 95th percentile)"""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def start_llama_cpp(gguf: Path, slots: int, threads: int) -> tuple[Any, str]:
    """llama.cpp's own HTTP server in this process: (keep it, its URL)."""
    try:
        import xllamacpp
    except ImportError:
        raise ConfigError("gguf: comparing with llama.cpp needs xllamacpp: pip install 'exactspec[bench]'") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = 2048 * slots
    params.n_parallel = slots
    params.verbosity = 0
    params.port = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    return server, str(server.listening_address)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="exactspec bench serve", description=__doc__)
    parser.add_argument("--url", action="append", default=[], help="[NAME=]URL of a running server; repeatable")
    parser.add_argument("--gguf", type=Path, help="also measure llama.cpp's server on this file")
    parser.add_argument("--threads", type=int, default=2, help="llama.cpp's threads")
    parser.add_argument("--concurrency", default="1,8", help="closed loops: clients at once, comma-separated")
    parser.add_argument("--rate", default="", help="open loops: requests per second, comma-separated")
    parser.add_argument("--requests", type=int, default=32, help="requests of each loop")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="JSON lines [default: the built-in set]")
    parser.add_argument("--json", type=Path, help="write figures here")
    return parser


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    servers = [tuple(item.split("=", 1)) if "=" in item.split("//")[0] else (item, item) for item in options.url]
    concurrency = [int(part) for part in options.concurrency.split(",") if part]
    rates = [float(part) for part in options.rate.split(",") if part]
    keep = None
    if options.gguf:
        keep, url = start_llama_cpp(options.gguf, max(concurrency, default=8), options.threads)
        servers.append(("llama.cpp", url))
    if not servers:
        raise ConfigError("url: which server?")
    known = read_prompts(options.prompts)
    prompts = [known[i % len(known)] for i in range(options.requests)]
    settings = {"new_tokens": options.new_tokens, "temperature": options.temperature}
    reports: list[Report] = []
    print(
        f"{'server':<16}{'load':<16}{'ok':>5}{'failed':>8}{'tok/s':>9}{'first ms':>10}{'p95':>8}{'ms/tok':>9}{'p95':>8}"
    )
    for clients in concurrency:
        for name, url in servers:
            closed_loop(url, prompts[: min(2, len(prompts))], 1, **settings)  # warm
            reports.append(report(name, f"{clients} at once", *closed_loop(url, prompts, clients, **settings)))
            _print(reports[-1])
    for rate in rates:
        for name, url in servers:
            reports.append(report(name, f"{rate:g} a second", *open_loop(url, prompts, rate, **settings)))
            _print(reports[-1])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(item) for item in reports], indent=1))
    del keep
    return 1 if any(item.failures for item in reports) else 0


def _print(item: Report) -> None:
    first, inter = item.first_token, item.inter_token
    print(
        f"{item.name:<16}{item.load:<16}{item.requests:>5}{item.failures:>8}{item.tokens_per_second:>9.1f}"
        f"{first[0] * 1e3:>10.0f}{first[1] * 1e3:>8.0f}{inter[0] * 1e3:>9.2f}{inter[1] * 1e3:>8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
