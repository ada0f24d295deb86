"""Real servers over the scripted engine: both processes run as they do in earnest."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import ServerProcess, free_port

HERE = Path(__file__).parent


class Running(ServerProcess):
    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)


@contextlib.contextmanager
def running_server(*flags: str, model: str = "fake", wait: bool = True, key: str = "") -> Iterator[Running]:
    port = free_port()
    command = [
        sys.executable, "-m", "exactspec.server.launch", model, "--port", str(port),
        "--factory", "fake_engine:make_engine", "--tokenizer-factory", "fake_engine:make_tokenizer",
        "--draft", "ngram", *flags,
    ]  # fmt: skip
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    server = Running(command, port, environment={"PYTHONPATH": path}, headers=headers)
    try:
        if wait:
            server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running_server("--served-model-name", "fake-model", "--max-body-mb", "1") as running:
        yield running
