"""Health, information, cache, aborts, pauses, the tokenizer, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import Running, running_server
from fake_engine import FakeTokenizer

from exactspec.server.app import make_app
from exactspec.server.metrics import Metrics
from exactspec.server.options import ServeOptions
from exactspec.server.params import NATIVE_FIELDS
from exactspec.server.state import Server

TOKENIZER = FakeTokenizer()


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    """An engine whose steps take 10 ms."""
    with running_server(model="slow") as running:
        yield running


ENDLESS = {"text": "abc", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}


def test_health_and_information(server: Running) -> None:
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        response = server.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    for path in ("/server_info", "/get_server_info"):
        info = server.http.get(path).json()
        assert info["disable_radix_cache"] is False
        assert (info["page_size"], info["speculative_eagle_topk"], info["context_length"]) == (16, 1, 4096)
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
        assert info["speculative_algorithm"] == "NGRAM"
        assert "api_key" not in info
    for path in ("/model_info", "/get_model_info"):
        assert server.http.get(path).json()["model_path"] == "fake"
    assert "loads" in server.http.get("/v1/loads").json()
    assert server.http.head("/").status_code == 200


def test_unknown_routes_and_unsupported_ones(server: Running) -> None:
    assert server.http.get("/nothing").status_code == 404
    assert server.http.get("/generate").status_code == 405
    response = server.http.post("/start_profile")
    assert response.status_code == 400
    assert "start_profile" in response.json()["error"]["message"]


def test_the_published_schema_names_what_is_accepted(server: Running) -> None:
    schema = server.http.get("/openapi.json").json()
    parts = schema["components"]["schemas"]
    assert set(parts["SamplingBody"]["properties"]) == {*NATIVE_FIELDS, "sampling_seed", "stream_interval"}
    text = json.dumps(schema)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in parts


def test_tokenize_and_back(server: Running) -> None:
    ids = TOKENIZER.encode("the €")
    for prefix in ("", "/v1"):
        answer = server.post(f"{prefix}/tokenize", {"prompt": "the €"}).json()
        assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 4096}
        assert server.post(f"{prefix}/detokenize", {"tokens": ids}).json() == {"text": "the €"}
    many = server.post("/tokenize", {"prompt": ["a", "bc"]}).json()
    assert many["count"] == [1, 2]
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["count"] == 2
    assert server.post("/tokenize", {}).status_code == 400
    assert "tokens" in server.post("/detokenize", {"tokens": [99999]}).text


def test_metrics(server: Running) -> None:
    server.post("/generate", {"text": "SAY:abc"})
    time.sleep(0.6)
    text = server.http.get("/metrics").text
    for name in (
        "exactspec_num_running", "exactspec_free_pages", "exactspec_accepted_drafts_bucket",
        'exactspec_acceptance_by_position{position="1"} 0.75', "exactspec_time_to_first_token_seconds_count",
        "exactspec_inter_token_latency_seconds_count", 'exactspec_requests_total{route="/generate",status="200"}',
    ):  # fmt: skip
        assert name in text, text


def test_counts_are_those_of_the_answers_that_have_been_read() -> None:
    """Not of half a second ago; and tokens that come together count as many."""
    with running_server() as own:
        seen = 0
        for length in (4, 9, 30):
            answer = own.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": length}}).json()
            seen += answer["meta_info"]["completion_tokens"]
            text = own.http.get("/metrics").text
            assert f"exactspec_output_tokens_total {float(seen + 1)}" in text  # one was the health probe's
        assert f"exactspec_inter_token_latency_seconds_count {float(seen - 3)}" in text
        assert "exactspec_time_to_first_token_seconds_count 3.0" in text
        assert own.http.get("/v1/loads").json()["loads"][0]["num_reqs"] == 0


@pytest.mark.parametrize(
    ("algorithm", "sizes"), [("DFLASH", [3, None]), ("DSPARK", [None, 2]), ("NGRAM", [None, None]), ("", [None, None])]
)
def test_block_sizes_in_the_words_of_this_api(algorithm: str, sizes: list[int | None]) -> None:
    """The engine drafts two tokens: with the anchor, three rows."""
    engine: Any = SimpleNamespace(
        info={"gamma": 2 if algorithm else 0}, stats={}, throughput=0.0, status="ready", num_restarts=0,
        active=lambda: ["a request, so that nobody asks the engine"],
    )  # fmt: skip
    options = ServeOptions("fake", speculative_algorithm=algorithm)

    async def ask() -> Any:
        app = make_app(Server(options, engine, Metrics(dict)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:  # type: ignore[arg-type]
            return (await client.get("/server_info")).json()

    info = asyncio.run(ask())
    assert [info[f"speculative_{name}_block_size"] for name in ("dflash", "dspark")] == sizes
    assert info["speculative_num_draft_tokens"] == (3 if algorithm else None)


def test_abort_all(slow: Running) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(slow.post, "/generate", ENDLESS) for _ in range(12)]
        chat = pool.submit(slow.post, "/v1/completions", {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True})
        time.sleep(0.5)
        response = slow.post("/abort_request", {"abort_all": True, "rid": ""})
        assert (response.status_code, response.content) == (200, b"")
        for answer in answers:
            assert answer.result().status_code == 200
            meta = answer.result().json()["meta_info"]
            assert meta["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert meta["completion_tokens"] == len(answer.result().json()["output_ids"]) > 0
        assert chat.result().json()["choices"][0]["finish_reason"] == "abort"


def test_abort_by_prefix(slow: Running) -> None:
    with ThreadPoolExecutor(4) as pool:
        one = pool.submit(slow.post, "/generate", {**ENDLESS, "rid": "left-1"})
        two = pool.submit(
            slow.post, "/generate", {**ENDLESS, "rid": "right-1", "sampling_params": {"max_new_tokens": 300}}
        )
        time.sleep(0.4)
        assert slow.post("/abort_request", {"rid": ""}).status_code == 200  # aborts nothing
        assert slow.post("/abort_request", {"rid": "nobody"}).status_code == 200
        assert slow.post("/abort_request", {"rid": "left"}).status_code == 200
        assert one.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert two.result().json()["meta_info"]["finish_reason"]["type"] == "length"


def leave_early(url: str, body: dict[str, Any]) -> None:
    """Reads two lines of a stream, or waits a little for an answer, and hangs up."""
    with contextlib.suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.4) as response:
        lines = response.iter_lines()
        assert next(lines)
        next(lines)


def num_running(server: Running) -> int:
    time.sleep(0.7)
    return server.http.get("/server_info").json()["internal_states"][0]["num_running"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(slow: Running, stream: bool) -> None:
    for path, body in (
        ("/generate", ENDLESS),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3000, "ignore_eos": True},
        ),
    ):
        leave_early(slow.url + path, {**body, "stream": stream})
        assert num_running(slow) == 0


def test_pause_in_place_and_go_on(slow: Running) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(slow.post, "/generate", {**ENDLESS, "sampling_params": {"max_new_tokens": 150 + 30 * i}})
            for i in range(3)
        ]
        time.sleep(0.2)
        assert slow.post("/pause_generation", {"mode": "in_place"}).json()["status"] == "ok"
        late = pool.submit(slow.post, "/generate", {"text": "SAY:late"})
        time.sleep(1.2)
        assert not any(answer.done() for answer in [*answers, late])
        assert slow.http.get("/health").status_code == 200
        assert slow.post("/continue_generation", {}).json()["status"] == "ok"
        assert [a.result().json()["meta_info"]["completion_tokens"] for a in answers] == [150, 180, 210]
        assert late.result().json()["text"] == "late"


def test_an_abort_in_a_pause_is_answered_in_the_pause(slow: Running) -> None:
    """Running or waiting, streamed or not; those that were not meant go on afterwards."""
    with ThreadPoolExecutor(5) as pool:
        kept = pool.submit(
            slow.post, "/generate", {**ENDLESS, "rid": "kept", "sampling_params": {"max_new_tokens": 200}}
        )
        running = pool.submit(slow.post, "/generate", {**ENDLESS, "rid": "cut-1"})
        streamed = pool.submit(slow.post, "/generate", {**ENDLESS, "rid": "cut-2", "stream": True})
        time.sleep(0.3)
        assert slow.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        late = pool.submit(slow.post, "/v1/completions", {"prompt": "abc", "rid": "cut-3", "max_tokens": 3000})
        time.sleep(0.2)
        assert slow.post("/abort_request", {"rid": "cut-"}).status_code == 200
        try:
            meta = running.result(10).json()["meta_info"]
            assert (meta["finish_reason"]["type"], meta["completion_tokens"] > 0) == ("abort", True)
            assert '"type":"abort"' in streamed.result(10).text
            assert late.result(10).json()["choices"][0]["finish_reason"] == "abort"
            assert num_running(slow) == 1
            assert not kept.done()
        finally:
            slow.post("/continue_generation", {})
        assert kept.result().json()["meta_info"]["completion_tokens"] == 200


@pytest.mark.parametrize(("mode", "flushed", "retractions"), [("retract", 200, 1), ("in_place", 400, 0)])
def test_only_a_pause_that_retracts_lets_the_cache_be_flushed(
    slow: Running, mode: str, flushed: int, retractions: int
) -> None:
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(slow.post, "/generate", {**ENDLESS, "sampling_params": {"max_new_tokens": 200}})
            for _ in range(2)
        ]
        time.sleep(0.3)
        assert slow.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
        assert slow.http.post("/flush_cache").status_code == flushed
        assert not any(answer.done() for answer in answers)
        assert slow.post("/continue_generation", {}).status_code == 200
        for answer in answers:
            meta = answer.result().json()["meta_info"]
            assert (meta["completion_tokens"], meta["num_retractions"]) == (200, retractions)


def test_pause_that_aborts(slow: Running) -> None:
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(slow.post, "/generate", ENDLESS)
        time.sleep(0.3)
        assert slow.post("/pause_generation", {}).status_code == 200
        assert answer.result(5).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert slow.post("/continue_generation", {}).status_code == 200
    assert slow.post("/pause_generation", {"mode": "odd"}).status_code == 400
    assert slow.post("/generate", {"text": "SAY:on"}).json()["text"] == "on"


def test_flush_refuses_or_waits_while_busy(slow: Running) -> None:
    busy = threading.Thread(
        target=slow.post, args=("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 240}})
    )
    busy.start()
    time.sleep(0.2)
    assert slow.http.post("/flush_cache").status_code == 400
    started = time.monotonic()
    assert slow.http.post("/flush_cache?timeout=30").status_code == 200
    assert time.monotonic() - started > 0.1
    busy.join()
    assert "timeout" in slow.http.post("/flush_cache?timeout=soon").text


def test_answers_are_strict_json(server: Running) -> None:
    body: dict[str, Any] = {"text": "SAY:a", "return_logprob": True, "token_ids_logprob": [5], "logprob_start_len": 0}
    text = server.post("/generate", body).text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
