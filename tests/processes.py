"""Servers as processes of their own, for tests that speak HTTP with them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import httpx


class ServerProcess:
    """A server process and a client for it."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        environment: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> None:
        """environment: beside that of the tests; timeout: seconds the client waits for an answer."""
        self.process = subprocess.Popen(command, env=os.environ | dict(environment or {}))
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=timeout, headers=dict(headers or {}))

    def wait(self, path: str = "/health", status: int = 200, seconds: float = 60) -> None:
        """Until GET `path` answers `status`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(path).status_code == status:
                    return
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        raise TimeoutError(f"{path} did not answer {status}")

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
