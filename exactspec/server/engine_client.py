"""The HTTP process's side: starts the engine process, feeds it, hands its outputs to whoever waits, restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import zmq

from exactspec.server import messages as m
from exactspec.server.errors import ApiError
from exactspec.server.mailbox import Mailbox
from exactspec.server.pipe import PipeReader
from exactspec.types import Request, StepOutput

log = logging.getLogger("exactspec.server")

RETRY_AFTER_S = 5
RATE_OVER_S = 0.25
RESTARTS_WITHIN_S = 600.0  # max_restarts are counted in so long
Event = StepOutput | ApiError | m.Refused


class EngineClient:
    """One engine process at a time.

    `status`: "starting", "ready", "dead" (restarts used up, or the settings are wrong) or "stopping". Requests in
    flight when the process dies get an ApiError; nobody waits for ever.
    """

    def __init__(self, settings: dict[str, Any], *, factory: str, max_restarts: int = 3) -> None:
        self.settings = settings
        self.factory = factory
        self.max_restarts = max_restarts
        self.status = "starting"
        self.failure = ""
        self.info: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.throughput = 0.0  # output tokens per second between the last two snapshots that differ
        self._rate_base = (time.monotonic(), 0)
        self.paused = False
        self.num_restarts = 0  # ever
        self._restarted_at: list[float] = []  # of late
        self.last_output_at = 0.0
        self.pid: int | None = None
        self._mailboxes: dict[str, Mailbox[tuple[str, Event]]] = {}
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._numbers = itertools.count(1)
        self._sender: zmq.Socket[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns at once; `wait_ready` waits."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self, timeout: float | None = None) -> bool:
        """True when the engine is up; False when it is dead or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), timeout)
        return self.status == "ready"

    async def stop(self) -> None:
        self.status = "stopping"
        if self._supervisor is not None:
            self._send(m.Stop())
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._supervisor, 10)

    async def _supervise(self) -> None:
        while self.status != "stopping":
            code = await self._run_once()
            self._fail_everything("the engine process ended" if self.status != "stopping" else "the server is stopping")
            if self.status == "stopping":
                return
            self.num_restarts += 1
            self._restarted_at = [t for t in self._restarted_at if time.monotonic() - t < RESTARTS_WITHIN_S]
            self._restarted_at.append(time.monotonic())
            if code == 3 or len(self._restarted_at) > self.max_restarts:
                self.status = "dead"
                self.failure = self.failure or f"the engine process ended with code {code}"
                if self.info:  # it has been ready; else whoever waits for that tells
                    log.error("no more restarts: %s", self.failure)
                self._ready.set()
                return
            self.status = "starting"
            log.error("the engine process ended with code %s: restart %d", code, self.num_restarts)
            await asyncio.sleep(min(2.0, 0.2 * len(self._restarted_at)))

    async def _run_once(self) -> int:
        """Starts a process and serves its outputs until it ends. Returns its exit code."""
        folder = tempfile.mkdtemp(prefix="exactspec-")
        context: zmq.Context[Any] = zmq.Context.instance()
        sender: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        ours, theirs = socket.socketpair()
        process, transport = None, None
        try:
            sender.set_hwm(0)
            sender.setsockopt(zmq.LINGER, 0)
            sender.bind(f"ipc://{folder}/in")
            transport, _ = await asyncio.get_running_loop().create_unix_connection(
                lambda: PipeReader(lambda data: self._dispatch(m.from_engine_decoder.decode(data))), sock=ours
            )
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "exactspec.server.engine_process",
                f"ipc://{folder}/in", str(theirs.fileno()), self.factory, json.dumps(self.settings),
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            self.pid = process.pid
            self._sender = sender
            code = await process.wait()
            await asyncio.sleep(0.05)  # its last words are on their way
            return code
        finally:
            self._sender, self.pid = None, None
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            if transport is not None:
                transport.close()
            theirs.close()
            sender.close()
            shutil.rmtree(folder, ignore_errors=True)

    # ---- requests ------------------------------------------------------------------------------------

    def check_available(self) -> None:
        """Raises a 503 unless the engine is ready."""
        if self.status == "dead":
            raise ApiError(503, f"the engine is not running: {self.failure}")
        if self.status != "ready":
            raise ApiError(503, f"the server is {self.status}", retry_after=RETRY_AFTER_S)

    def submit(self, request: Request, mailbox: Mailbox[tuple[str, Event]]) -> None:
        """Sends a request; its outputs arrive in `mailbox` as (request id, event), the last a finish or an error."""
        self.check_available()
        try:
            data = m.encoder.encode(m.add_message(request))
        except (OverflowError, UnicodeEncodeError) as error:  # a number over 64 bits, half a surrogate pair
            raise ApiError(400, f"the request holds a value that cannot be used: {error}") from None
        self._mailboxes[request.request_id] = mailbox
        self._send_bytes(data)

    def abort(self, request_ids: Iterable[str], message: str = "Aborted", *, silent: bool = False) -> None:
        """Ends requests now. `silent`: nobody waits for their last output any more."""
        known = [request_id for request_id in request_ids if request_id in self._mailboxes]
        if silent:
            for request_id in known:
                del self._mailboxes[request_id]
        if known:
            self._send(m.Abort(known, message))

    def active(self) -> list[str]:
        return list(self._mailboxes)

    async def call(self, what: str, seconds: float = 0.0, timeout: float = 30.0) -> bool:
        """flush, pause, resume, stats or ping. False when refused; raises a 503 when the engine does not answer."""
        self.check_available()
        number = next(self._numbers)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(m.Call(number, what, seconds))
            return await asyncio.wait_for(future, timeout + seconds)
        except TimeoutError:
            raise ApiError(503, f"{what}: the engine does not answer") from None
        finally:
            self._calls.pop(number, None)

    def _send(self, message: Any) -> None:
        self._send_bytes(m.encoder.encode(message))

    def _send_bytes(self, data: bytes) -> None:
        if self._sender is not None:
            with contextlib.suppress(zmq.Again):  # no peer: it has just died, the supervisor tells
                self._sender.send(data, zmq.NOBLOCK)

    # ---- outputs -------------------------------------------------------------------------------------

    def _dispatch(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Outputs):
            self.last_output_at = time.monotonic()
            for item in message.items:
                self._deliver(item.request_id, m.unpack_output(item), last=item.finish is not None)
        elif isinstance(message, m.Refused):
            self._deliver(message.request_id, message, last=True)
        elif isinstance(message, m.Stats):
            self._note_stats(message.values)
        elif isinstance(message, m.Reply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message.ok)
        elif isinstance(message, m.Ready):
            self.info = message.info
            self.paused = False
            self.status = "ready"
            self._ready.set()
        else:
            self.failure = message.reason

    def _note_stats(self, stats: dict[str, Any]) -> None:
        self.stats = stats
        now, tokens = time.monotonic(), stats.get("output_tokens", 0)
        if now < self._rate_base[0] + RATE_OVER_S:  # asked for between the regular ones: too short to tell a rate
            return
        if tokens > self._rate_base[1]:
            self.throughput = (tokens - self._rate_base[1]) / (now - self._rate_base[0])
        self._rate_base = (now, tokens)

    def _deliver(self, request_id: str, event: Event, *, last: bool) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:
            return  # its client has gone
        if last:
            del self._mailboxes[request_id]
        mailbox.put((request_id, event))

    def _fail_everything(self, reason: str) -> None:
        self._ready.clear()
        for request_id in list(self._mailboxes):
            error = ApiError(503, f"{reason}; the request was lost", retry_after=RETRY_AFTER_S)
            self._deliver(request_id, error, last=True)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ApiError(503, reason, retry_after=RETRY_AFTER_S))
