"""`exactspec serve`: the HTTP process with its engine process, from start to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from exactspec.errors import ConfigError, ExactSpecError
from exactspec.server.app import make_app
from exactspec.server.engine_client import EngineClient
from exactspec.server.metrics import Metrics
from exactspec.server.options import ServeOptions, parse
from exactspec.server.state import Server

log = logging.getLogger("exactspec.server")
BACKLOG = 4096  # connections that wait to be accepted


def load_tokenizer(model: str) -> Any:
    """The tokenizer alone, without the weights."""
    from exactspec.model import loader

    return loader.load_tokenizer(model)


class _UntilClosed(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which knows no chunks: a stream ends where its connection does."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _Protocol(HttpToolsProtocol):
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClosed


class _Uvicorn(uvicorn.Server):
    """Signals are ours: the first one drains, the second one ends at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status."""
    level = options.log_level.upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"log_level: must be debug, info, warning or error, got {options.log_level!r}")
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    listener = _listen(options.host, options.port)  # before the engine loads: nobody waits for a port that is taken
    options = replace(options, port=listener.getsockname()[1])  # 0 asks for any
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options, listener))


def _listen(host: str, port: int) -> socket.socket:
    """IPv4 where the host has it. Raises ConfigError."""
    try:
        families = {info[0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter: no host can have such a name
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"port: cannot listen on {host}:{port}: {reason or error}") from None


async def _serve(options: ServeOptions, listener: socket.socket) -> int:
    client = EngineClient(options.engine_settings(), factory=options.factory, max_restarts=options.max_restarts)
    server = Server(options, client, Metrics(lambda: client.stats))
    config = uvicorn.Config(
        make_app(server), log_level="warning", access_log=False, http=_Protocol, timeout_keep_alive=75,
        backlog=BACKLOG, lifespan="off", ws="none", proxy_headers=False,
    )  # fmt: skip
    web = _Uvicorn(config)
    client.start()
    log.info("loading %s%s", options.model_path, f" with the draft {options.draft_name}" if options.draft_name else "")
    starting = asyncio.create_task(_start(server, web))
    stop_asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, server, web, stop_asked)
    draining = asyncio.create_task(_drain(server, web, stop_asked))
    try:
        await web.serve(sockets=[listener])
    finally:
        for task in (starting, draining):
            task.cancel()
        await client.stop()
    if starting.done() and not starting.cancelled() and not starting.result():
        return 2
    return 0 if client.failure == "" else 3


async def _start(server: Server, web: uvicorn.Server) -> bool:
    """The tokenizer loads beside the engine; the port already answers, with 503. False ends the server: what cannot
    start now would not start later either, and whoever started it should know."""
    started = time.perf_counter()
    options = server.options
    try:
        module, function = options.tokenizer_factory.split(":")
        make = getattr(importlib.import_module(module), function)
        server.set_tokenizer(await asyncio.to_thread(make, options.model_path))
        gc.collect()
        gc.freeze()  # what was made until now stays: collections need not look through it while tokens wait
        ready = await server.client.wait_ready()
    except Exception as error:  # the tokenizer's
        server.client.failure = str(error)
        ready = False
        if not isinstance(error, ExactSpecError):
            log.exception("the tokenizer cannot be loaded")
    if ready:
        log.info(
            "ready after %.1f s: %s on http://%s:%d (context %s, K/V pool %s tokens)",
            time.perf_counter() - started, options.model_name, options.host, options.port,
            server.client.info.get("context_length"), server.client.info["limits"].get("pool_tokens"),
        )  # fmt: skip
    else:
        log.error("cannot start: %s", server.client.failure)
        web.should_exit = True
    return ready


def _on_signal(server: Server, web: uvicorn.Server, stop_asked: asyncio.Event) -> None:
    if server.draining:
        web.force_exit = True
    server.draining = True
    stop_asked.set()


async def _drain(server: Server, web: uvicorn.Server, stop_asked: asyncio.Event) -> None:
    """After the first signal: no new requests; those in flight may finish."""
    await stop_asked.wait()
    log.info("stopping: %d requests in flight", server.in_flight)
    deadline = time.monotonic() + server.options.drain_timeout
    while server.in_flight and time.monotonic() < deadline and not web.force_exit:
        await asyncio.sleep(0.05)
    server.client.abort(server.client.active(), "the server is stopping")
    await asyncio.sleep(0.05)
    web.should_exit = True


def main(argv: Sequence[str]) -> int:
    """Parses an SGLang-style command line and serves."""
    return serve(parse(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
