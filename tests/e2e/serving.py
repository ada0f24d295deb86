"""Starts `exactspec serve` on SmolLM2-135M for a test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from processes import ServerProcess, free_port


class Running(ServerProcess):
    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@contextlib.contextmanager
def running_server(*flags: str, model: str = "smollm2-135m") -> Iterator[Running]:
    port = free_port()
    command = [
        sys.executable, "-m", "exactspec", "serve", model, "--device", "cpu", "--port", str(port),
        "--max-total-tokens", "40960", *flags,
    ]  # fmt: skip
    running = Running(command, port, timeout=600)
    try:
        running.wait(seconds=240)
        yield running
    finally:
        running.stop()
