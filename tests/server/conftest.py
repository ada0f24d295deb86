"""Real servers over the scripted engine: both processes run as they do in earnest."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A server process and a client for it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, headers: dict[str, str]) -> None:
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60, headers=headers)

    def wait(self, path: str = "/health", status: int = 200, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(path).status_code == status:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{path} did not answer {status}")

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)


@contextlib.contextmanager
def running_server(
    *flags: str, model: str = "fake", wait: bool = True, key: str = "", draft: str = "ngram"
) -> Iterator[Running]:
    port = free_port()
    command = [
        sys.executable, "-m", "exactspec.server.launch", model, "--port", str(port),
        "--factory", "fake_engine:make_engine", "--tokenizer-factory", "fake_engine:make_tokenizer",
        "--draft", draft, *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, env=environment)
    server = Running(process, f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"} if key else {})
    try:
        if wait:
            server.wait()
        yield server
    finally:
        server.http.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with running_server("--served-model-name", "fake-model", "--max-body-mb", "1") as running:
        yield running
