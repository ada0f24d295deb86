"""An abort reaches a request wherever it is: being tokenised, waiting, running."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeTokenizer

from exactspec.server.app import make_app
from exactspec.server.generation import rid_of
from exactspec.server.metrics import Metrics
from exactspec.server.options import ServeOptions
from exactspec.server.state import Server
from exactspec.types import FinishReason, RequestStats, StepOutput


class SlowTokenizer(FakeTokenizer):
    """Texts that say "slow" take until `go` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if "slow" in text:
            self.begun.set()
            assert self.go.wait(20)
        return super().encode(text)


class Client:
    """An engine that answers every request with one token at once, and notes which ones it was given."""

    status, paused, last_output_at = "ready", False, 0.0
    info: dict[str, Any] = {}  # noqa: RUF012
    stats: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def check_available(self) -> None:
        pass

    def active(self) -> list[str]:
        return ["health-1", "running#7"]

    def abort(self, request_ids: Any, message: str = "Aborted", *, silent: bool = False) -> None:
        self.aborted += () if silent else request_ids

    def submit(self, request: Any, mailbox: Any) -> None:
        self.submitted.append(rid_of(request.request_id) or "")
        end = FinishReason("length")
        mailbox.put((request.request_id, StepOutput(request.request_id, [97], None, [], end, RequestStats())))


LONG = "slow" + "x" * 3000  # too long to be tokenised on the loop itself
BODIES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/generate", {"text": LONG, "rid": "r"}, ["r"]),
    ("/generate", {"text": ["a", LONG], "rid": ["r-1", "other"]}, ["r-1", "other"]),
    ("/generate", {"text": LONG, "rid": "r", "sampling_params": {"n": 2}}, ["r_0", "r_1"]),
    ("/v1/completions", {"prompt": LONG, "rid": "r", "n": 2}, ["r_0", "r_1"]),
    ("/v1/completions", {"prompt": ["a", LONG], "rid": "r"}, ["r_0", "r_1"]),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "rid": "r"}, ["r"]),
]
Aborting = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@cache
def made() -> tuple[Server, Any]:
    server = Server(ServeOptions("fake"), Client(), Metrics(dict))  # type: ignore[arg-type]
    return server, make_app(server)


async def exchange(path: str, body: dict[str, Any], aborting: Aborting) -> tuple[list[str], Client, Server]:
    """The finish reasons of a request that is aborted while it is being tokenised."""
    server, app = made()
    client, tokenizer = Client(), SlowTokenizer()
    server.client = client  # type: ignore[assignment]
    server.set_tokenizer(tokenizer)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        asked = asyncio.create_task(http.post(path, json=body))
        assert await asyncio.to_thread(tokenizer.begun.wait, 20)
        assert (await aborting(http)).status_code == 200
        tokenizer.go.set()
        answer = await asked
    assert answer.status_code == 200, answer.text
    return [reason async for reason in _reasons(answer, bool(body.get("stream")))], client, server


async def _reasons(answer: httpx.Response, stream: bool) -> AsyncIterator[str]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] if stream else answer.json()
    for part in parts if isinstance(parts, list) else [parts]:
        for end in part.get("choices", [part.get("meta_info")]):
            reason = end["finish_reason"]
            if reason is not None:
                yield reason["type"] if isinstance(reason, dict) else reason


def by_rid(prefix: str) -> Aborting:
    return lambda http: http.post("/abort_request", json={"rid": prefix})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "rids"), BODIES, ids=lambda value: str(value)[:24])
def test_what_is_aborted_while_it_is_tokenised_never_queues(
    path: str, body: dict[str, Any], rids: list[str], stream: bool
) -> None:
    async def run(aborting: Aborting) -> tuple[list[str], list[str]]:
        reasons, client, server = await exchange(path, body | {"stream": stream}, aborting)
        gc.collect()
        assert not server.arrivals  # nothing is left behind
        return sorted(reasons), client.submitted

    for prefix in ("r", rids[0], rids[-1]):
        kept = [rid for rid in rids if not rid.startswith(prefix)]
        ends = ["abort"] * (len(rids) - len(kept)) + ["length"] * len(kept)
        assert asyncio.run(run(by_rid(prefix))) == (ends, kept)
    assert asyncio.run(run(by_rid("z"))) == (["length"] * len(rids), rids)
    for everything in (
        lambda http: http.post("/abort_request", json={"abort_all": True}),
        lambda http: http.post("/abort_request", json={"rid": "z", "abort_all": True}),
    ):
        assert asyncio.run(run(everything)) == (["abort"] * len(rids), [])


def test_only_clients_requests_are_aborted_and_by_their_own_ids() -> None:
    """The engine's id of a request goes on behind the client's; health probes have no client."""
    for prefix, aborted in (("run", ["running#7"]), ("running#7", []), ("running#", []), ("health", []), ("", [])):
        server = Server(ServeOptions("fake"), Client(), SimpleNamespace())  # type: ignore[arg-type]
        server.abort(prefix) if prefix else None
        assert server.client.aborted == aborted  # type: ignore[attr-defined]
    server.abort("")
    assert server.client.aborted == ["running#7"]  # type: ignore[attr-defined]
