"""Load on one HTTP server: streaming clients in closed loops (clients at once) or open ones (requests a second)."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Prompt = str | Sequence[int]
ASLEEP_BYTES = 1 << 16  # a sleeping client wakes for this much, or for the end
EVENT = re.compile(rb"data: (\{.*\})\r?\n\r?\n")  # servers put an event into one chunk, so no chunk head is inside


@dataclass(slots=True)
class Timing:
    """One request: seconds to the first text and to the last, tokens, seconds between events."""

    first: float
    total: float
    tokens: int
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Loop:
    """What a loop of requests gave. `seconds` runs from its first request to its last answer."""

    timings: list[Timing] = field(default_factory=list)
    failures: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(timing.tokens for timing in self.timings)


def one_request(
    url: str, prompt: Prompt, new_tokens: int, temperature: float, seed: int, *, asleep: bool = False
) -> Timing:
    """Streams one completion. Raises OSError or ValueError when the server does not answer as it should.

    While it runs, what arrives is only stamped and kept; it is read afterwards: the client shares the machine with
    the server. `asleep`: it is not even stamped; the system wakes this client when the answer has ended, so that it
    costs the machine nothing meanwhile, and all its events count as arrived then.
    """
    parts = urlsplit(url)
    body = {
        "model": "default", "prompt": prompt, "max_tokens": new_tokens, "temperature": temperature, "seed": seed,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    pieces: list[tuple[float, bytes]] = []
    began = time.perf_counter()
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=600) as connection:
        if asleep:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, ASLEEP_BYTES)
        connection.sendall(head.encode() + data)
        while piece := connection.recv(1 << 16):
            pieces.append((time.perf_counter(), piece))
    return _read(pieces, began)


def _read(pieces: Sequence[tuple[float, bytes]], began: float) -> Timing:
    """An event counts as arrived with the piece that holds its end."""
    whole = b"".join(piece for _, piece in pieces)
    status, _, rest = whole.partition(b"\r\n")
    if b" 200 " not in status + b" ":
        raise ValueError(f"{status!r} {rest[-300:]!r}")
    ends = list(itertools.accumulate(len(piece) for _, piece in pieces))
    tokens, times = 0, []
    for match in EVENT.finditer(whole):
        event = json.loads(match[1])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        if event.get("choices") and event["choices"][0].get("text"):
            times.append(pieces[bisect_left(ends, match.end())][0])
    if not times:
        raise ValueError("an answer without text")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Timing(times[0] - began, times[-1] - began, tokens, gaps)


class _Clients:
    """Threads that send requests and note what comes of them."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self.options = options
        self.loop = Loop()
        self.lock = threading.Lock()

    def send(self, number: int, prompt: Prompt) -> None:
        try:
            timing = one_request(self.url, prompt, seed=number, **self.options)
        except (OSError, ValueError):
            with self.lock:
                self.loop.failures += 1
        else:
            with self.lock:
                self.loop.timings.append(timing)

    def run(self, clients: Sequence[Callable[[], None]]) -> Loop:
        threads = [threading.Thread(target=client) for client in clients]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.loop.seconds = time.perf_counter() - began
        return self.loop


def closed_loop(url: str, prompts: Sequence[Prompt], concurrency: int, **options: Any) -> Loop:
    """`concurrency` clients, each sending its next request when the last is answered."""
    queue = list(enumerate(prompts))[::-1]
    clients = _Clients(url, **options)

    def client() -> None:
        while True:
            with clients.lock:
                if not queue:
                    return
                number, prompt = queue.pop()
            clients.send(number, prompt)

    return clients.run([client] * concurrency)


def open_loop(url: str, prompts: Sequence[Prompt], rate: float, **options: Any) -> Loop:
    """Requests arrive at random (Poisson) `rate` a second, whether or not the server keeps up."""
    rng = random.Random(1)
    clients = _Clients(url, **options)

    def client(delay: float, number: int, prompt: Prompt) -> Callable[[], None]:
        def send_later() -> None:
            time.sleep(delay)
            clients.send(number, prompt)

        return send_later

    at, senders = 0.0, []
    for number, prompt in enumerate(prompts):
        senders.append(client(at, number, prompt))
        at += rng.expovariate(rate)
    return clients.run(senders)
