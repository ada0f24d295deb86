"""What serving costs: the same requests through our server and through the engine alone, in turns, on one machine.

Three times per token are compared: the client's, the seconds that the server's engine process spends inside steps, and
the engine's alone in a process without HTTP. The first over the third is the whole cost of serving; the second over
the third is the part of it that comes from sharing the processor's cores, the first over the second the rest.

The client is on the same cores, where a user's would not be: it sleeps until an answer has ended, and the processor
time that it takes all the same is told.
"""

from __future__ import annotations

import http.client
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exactspec.bench.load import closed_loop
from exactspec.engine.build import build_engine
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.errors import ConfigError
from exactspec.types import Request, SamplingParams

SNAPSHOT_S = 0.7  # the engine process tells its counters twice a second


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds a token, medians over rounds. `share`: quartiles of served / alone - 1, paired by round."""

    concurrency: int
    served_ms: float
    in_steps_ms: float
    alone_ms: float
    http_cpu_ms: float  # processor time of the HTTP process
    client_cpu_ms: float  # processor time of the bench's own clients, which is in served_ms too
    share: tuple[float, float, float]


class OwnServer:
    """`exactspec serve` as users start it, for as long as the measurement lasts."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "exactspec",
            "serve",
            model,
            "--port",
            str(self.port),
            "--log-level",
            "warning",
        ]
        self.process = subprocess.Popen([*command, *flags])
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Raises ConfigError when it ends instead of starting."""
        while self.get("/health") is None:
            if self.process.poll() is not None:
                raise ConfigError("the server ended: see its messages above")
            time.sleep(0.2)

    def get(self, path: str) -> str | None:
        """The answer of a GET; None unless it is a 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode()
            return text if response.status == 200 else None
        except OSError:
            return None
        finally:
            connection.close()

    def counters(self) -> dict[str, float]:
        """Metrics without labels, by name. Waits for a fresh snapshot of the engine's."""
        time.sleep(SNAPSHOT_S)
        lines = re.findall(r"^(\w+) (\S+)$", self.get("/metrics") or "", re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def engine_loop(
    engine: Engine, prompts: Sequence[Sequence[int]], concurrency: int, new_tokens: int, temperature: float
) -> float:
    """Seconds that the engine alone takes for the closed loop of `closed_loop`."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    waiting = [Request(f"r{i}", tuple(ids), params, seed=i) for i, ids in enumerate(prompts)][::-1]
    began = time.perf_counter()
    for _ in range(min(concurrency, len(waiting))):
        engine.add(waiting.pop())
    while engine.has_work():
        for output in engine.step():
            if output.finish is not None and waiting:
                engine.add(waiting.pop())
    return time.perf_counter() - began


def measure(
    model: str,
    draft: str | None,
    prompts: Sequence[str],
    concurrency: Sequence[int],
    *,
    rounds: int,
    new_tokens: int,
    temperature: float,
) -> list[Overhead]:
    """Takes turns, in either order, `rounds` times for each concurrency; caches are emptied before."""
    engine = build_engine(EngineConfig(model=model, draft=draft, kv_tokens=32768))
    tokenized = [engine.target.tokenizer.encode(prompt) for prompt in prompts]
    server = OwnServer(model, ["--draft", draft or "none", "--max-total-tokens", "32768"])
    options = {"new_tokens": new_tokens, "temperature": temperature}
    try:
        server.wait()
        engine_loop(engine, tokenized[:2], 1, 8, temperature)
        closed_loop(server.url, tokenized[:2], 1, new_tokens=8, temperature=temperature)
        results = []
        for clients in concurrency:
            chosen = [tokenized[i % len(tokenized)] for i in range(max(2 * clients, 4))]
            results.append(_compare(engine, server, chosen, clients, rounds, options))
        return results
    finally:
        server.stop()


def _compare(
    engine: Engine,
    server: OwnServer,
    prompts: Sequence[Sequence[int]],
    clients: int,
    rounds: int,
    options: dict[str, Any],
) -> Overhead:
    alone, served, steps, cpu, client = [], [], [], [], []
    tokens = len(prompts) * options["new_tokens"]
    for turn in range(rounds):
        if turn % 2 == 0:
            alone.append(_alone(engine, prompts, clients, options) / tokens)
        server.get("/flush_cache?timeout=5")
        before = server.counters()
        own = time.process_time()
        loop = closed_loop(server.url, prompts, clients, asleep=True, **options)
        client.append((time.process_time() - own) / tokens)
        if loop.failures or loop.tokens != tokens:
            raise ConfigError(f"the server failed {loop.failures} requests; {loop.tokens} tokens of {tokens} came")
        after = server.counters()
        served.append(loop.seconds / tokens)
        steps.append((after["exactspec_step_seconds_total"] - before["exactspec_step_seconds_total"]) / tokens)
        cpu.append((after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / tokens)
        if turn % 2:
            alone.append(_alone(engine, prompts, clients, options) / tokens)
    ratios = [a / b - 1 for a, b in zip(served, alone, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    served_ms, steps_ms, alone_ms, cpu_ms, client_ms = (
        statistics.median(values) * 1e3 for values in (served, steps, alone, cpu, client)
    )
    return Overhead(clients, served_ms, steps_ms, alone_ms, cpu_ms, client_ms, (low, middle, high))


def _alone(engine: Engine, prompts: Sequence[Sequence[int]], clients: int, options: dict[str, Any]) -> float:
    """Seconds of the engine's own loop, after a pause as long as the one before the server's loop."""
    engine.flush_cache()
    time.sleep(SNAPSHOT_S)
    return engine_loop(engine, prompts, clients, **options)


def show(results: Sequence[Overhead]) -> str:
    lines = [
        f"{'clients':>8}{'served':>10}{'in steps':>10}{'alone':>10}{'HTTP cpu':>10}{'client':>10}  overhead (quartiles)"
    ]
    for item in results:
        low, middle, high = item.share
        lines.append(
            f"{item.concurrency:>8}{item.served_ms:>10.3f}{item.in_steps_ms:>10.3f}{item.alone_ms:>10.3f}"
            f"{item.http_cpu_ms:>10.3f}{item.client_cpu_ms:>10.3f}  {middle:.1%} ({low:.1%} to {high:.1%})"
        )
    return "\n".join(lines)
