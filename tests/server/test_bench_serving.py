"""`exactspec bench serve` against a server whose answers are known: what it counts is what was sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Running

from exactspec.bench import load, serving
from exactspec.errors import ConfigError


def test_every_loop_counts_its_tokens_and_times(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    argv = ["--url", f"fake={server.url}", "--concurrency", "1,4", "--rate", "200", "--requests", "6", "--rounds", "2"]
    assert serving.main([*argv, "--new-tokens", "12", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [row["load"] for row in rows] == ["1 at once", "4 at once", "200 a second"]
    for row in rows:
        assert (row["name"], row["requests"], row["failures"], row["tokens"]) == ("fake", 12, 0, 12 * 12)
        assert 0 < row["first_token"][0] <= row["first_token"][1] <= row["total"][1] < row["seconds"]
        assert row["inter_token"][0] >= 0  # events may arrive together


def test_a_sleeping_client_sees_the_same_answer(server: Running) -> None:
    """It wakes at the end, also of an answer that is longer than what wakes it."""
    for new_tokens in (12, 3000):
        options = {"new_tokens": new_tokens, "temperature": 0.0, "seed": 1}
        asleep = load.one_request(server.url, "abc", asleep=True, **options)  # type: ignore[arg-type]
        assert asleep.tokens == load.one_request(server.url, "abc", **options).tokens == new_tokens  # type: ignore[arg-type]


def test_failures_are_counted_not_hidden(server: Running) -> None:
    loop = load.closed_loop(server.url, ["SAY:ok", "x" * 5000], 2, new_tokens=4, temperature=0.0)
    assert (len(loop.timings), loop.failures, loop.tokens) == (1, 1, 4)
    assert load.closed_loop("http://127.0.0.1:9", ["a"], 1, new_tokens=4, temperature=0.0).failures == 1


def test_events_that_arrive_together_or_in_parts_are_read_alike() -> None:
    def event(text: str) -> bytes:
        return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"

    head, usage = b"HTTP/1.1 200 OK\r\n\r\n", b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    parts = [(1.0, head), (2.0, event("a")), (3.0, event("b")[:9]), (4.0, event("b")[9:] + event("c")), (5.0, usage)]
    timing = load._read(parts, 0.5)
    assert (timing.first, timing.total, timing.tokens, timing.gaps) == (1.5, 3.5, 3, [2.0, 0.0])
    with pytest.raises(ValueError, match="503"):
        load._read([(1.0, b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy")], 0.5)


def test_no_server_is_an_error() -> None:
    with pytest.raises(ConfigError, match="which server"):
        serving.main([])
