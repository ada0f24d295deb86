"""Starts `exactspec serve` on SmolLM2-135M for a test."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx


class Running:
    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=600)

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@contextlib.contextmanager
def running_server(*flags: str, model: str = "smollm2-135m") -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "exactspec", "serve", model, "--device", "cpu", "--port", str(port),
        "--max-total-tokens", "40960", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command)
    running = Running(process, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(httpx.TransportError):
                if running.http.get("/health").status_code == 200:
                    break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)
        yield running
    finally:
        running.http.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
