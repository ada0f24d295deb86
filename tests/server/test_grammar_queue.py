"""Grammars wait for a free compiler thread before they are compiled: that time is nobody's fault."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from exactspec.server import engine_process
from exactspec.server import messages as m
from exactspec.types import Request, SamplingParams


def test_the_time_limit_of_a_grammar_begins_with_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "COMPILE_TIMEOUT_S", 0.05)
    future: Future[Any] = Future()
    engine = SimpleNamespace(check=lambda request: None, grammars=SimpleNamespace(prepare=lambda params: future))
    sent: list[Any] = []
    loop = engine_process.EngineLoop(engine, None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "send", sent.append)
    loop._add(m.add_message(Request("r", (1,), SamplingParams(regex="a+"), seed=1)))
    loop._admit_compiled()
    time.sleep(0.1)  # queued behind others' grammars
    loop._admit_compiled()
    assert (list(loop.compiling), sent) == (["r"], [])
    future.set_running_or_notify_cancel()
    loop._admit_compiled()
    assert sent == []
    time.sleep(0.1)
    loop._admit_compiled()
    assert (loop.compiling, len(sent)) == ({}, 1)
    assert (sent[0].field, sent[0].status) == ("regex", 400)
    assert "to compile" in sent[0].reason
