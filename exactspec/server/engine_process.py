"""The process that owns the device: takes requests from the HTTP process, steps the engine, sends outputs back.

    python -m exactspec.server.engine_process INBOX OUTBOX FACTORY CONFIG_JSON

INBOX is a ZeroMQ address bound by the HTTP process, OUTBOX the descriptor of a socket to it (pipe.py). FACTORY
("module:function") makes an engine from the settings in CONFIG_JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import zmq

from exactspec.errors import ConfigError, ExactSpecError, QueueFullError, RequestError
from exactspec.server import messages as m
from exactspec.server.pipe import PipeWriter
from exactspec.types import Request, SamplingParams

log = logging.getLogger("exactspec.engine")

IDLE_POLL_MS = 200
STATS_EVERY_S = 0.5
COMPILE_TIMEOUT_S = 10.0  # for one grammar, from when its compilation begins


def build_from_json(settings: dict[str, Any]) -> Any:
    """The real engine. `settings` are the fields of EngineConfig."""
    from exactspec.engine.build import build_engine
    from exactspec.engine.config import EngineConfig

    return build_engine(EngineConfig(**settings))


def engine_info(engine: Any) -> dict[str, Any]:
    """What the HTTP process needs to know to check requests and to describe the server."""
    target, limits = engine.target, engine.limits
    config = target.config
    stats = engine.stats()
    return {
        "limits": asdict(limits),
        "gamma": int(engine.drafter.gamma),
        "vocab_size": int(config.vocab_size),
        "context_length": int(limits.context_length),
        "num_pages": int(stats.num_pages),
        "page_size": int(engine.config.page_size),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.backend.device),
        "architecture": str(config.architecture),
        "generation_defaults": dict(target.generation_defaults),
    }


class EngineLoop:
    """Single-threaded: receive, admit, step, send. Nothing here knows HTTP."""

    def __init__(self, engine: Any, inbox: zmq.Socket[bytes], outbox: PipeWriter) -> None:
        self.engine = engine
        self.inbox = inbox
        self.outbox = outbox
        self.paused = False
        self.stopping = False
        self.compiling: dict[str, tuple[Request, Future[Any], float]] = {}  # grammar not ready yet
        self.flushes: list[tuple[int, float]] = []  # (call id, deadline)
        self.next_stats = 0.0
        self.step_seconds = 0.0  # spent in steps, ever
        self.parent = os.getppid()

    def run(self) -> None:
        while not self.stopping:
            self._receive()
            self._send_outputs(self.engine.take_ended())  # an abort is answered now, be it in a pause
            self._admit_compiled()
            self._flush_if_idle()
            if not self.paused and self.engine.has_work():
                self._step()
            self._send_stats()

    def _step(self) -> None:
        began = time.perf_counter()
        outputs = self.engine.step()
        self.step_seconds += time.perf_counter() - began
        self._send_outputs(outputs)

    def send(self, message: Any) -> None:
        self.outbox.send(m.encoder.encode(message))

    # ---- messages ------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Takes everything that has arrived; waits only when there is nothing else to do."""
        busy = not self.paused and self.engine.has_work()
        self.outbox.flush()
        if not busy:
            self.inbox.poll(2 if self.compiling or self.flushes or self.outbox.behind else IDLE_POLL_MS)
        while int(self.inbox.get(zmq.EVENTS)) & zmq.POLLIN:  # a poll of no time at all, without its objects
            self._handle(m.to_engine_decoder.decode(self.inbox.recv()))
        if os.getppid() != self.parent:
            log.error("the HTTP process is gone: stopping")
            self.stopping = True

    def _handle(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            self._add(message)
        elif isinstance(message, m.Abort):
            for request_id in message.request_ids:
                self._abort(request_id, message.message)
        elif isinstance(message, m.Call):
            self._call(message)
        else:
            self.stopping = True

    def _call(self, call: m.Call) -> None:
        if call.what == "flush":
            self.flushes.append((call.call_id, time.monotonic() + call.seconds))
            return
        if call.what == "pause_abort":  # everything has been aborted: this only hands out the last outputs
            while self.engine.has_work():
                self._send_outputs(self.engine.step())
        if call.what == "pause_retract":
            self.engine.retract_running()
        if call.what == "stats":
            self.next_stats = 0.0
            self._send_stats()
        if call.what.startswith("pause"):
            self.paused = True
        elif call.what == "resume":
            self.paused = False
        self.send(m.Reply(call.call_id, True))

    # ---- requests ------------------------------------------------------------------------------------

    def _add(self, message: m.Add) -> None:
        try:
            request = Request(
                request_id=message.request_id,
                prompt_ids=tuple(message.prompt_ids),
                params=SamplingParams(**message.params),
                seed=message.seed,
                priority=message.priority,
                cache_namespace=message.cache_namespace,
                return_hidden_states=message.hidden_states,
                sampling_mask=message.sampling_mask,  # type: ignore[arg-type]
                max_drafts=message.max_drafts,
            )
            params = request.params
            if params.json_schema or params.regex or params.ebnf:
                self.engine.check(request)
                future = self.engine.grammars.prepare(params)
                self.compiling[request.request_id] = (request, future, math.inf)
            else:
                self.engine.add(request)
        except (RequestError, QueueFullError, ConfigError) as error:
            self._refuse(message.request_id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if isinstance(error, RequestError):
            self.send(m.Refused(request_id, error.field, error.reason))
        elif isinstance(error, ConfigError):  # an extra that is not installed
            self.send(m.Refused(request_id, "grammar", str(error)))
        else:
            self.send(m.Refused(request_id, "queue", str(error) or "the queue is full", 503))

    def _admit_compiled(self) -> None:
        """Requests enter the engine when their grammar is ready; until then steps go on without them."""
        for request_id, (request, future, deadline) in list(self.compiling.items()):
            if deadline == math.inf and future.running():  # its turn has come: the time in the queue is not its fault
                self.compiling[request_id] = (request, future, time.monotonic() + COMPILE_TIMEOUT_S)
            try:
                if future.done():
                    future.result()
                    del self.compiling[request_id]
                    self.engine.add(request)
                elif time.monotonic() > deadline:
                    del self.compiling[request_id]
                    kind = next(k for k in ("json_schema", "regex", "ebnf") if getattr(request.params, k))
                    raise RequestError(kind, f"took more than {COMPILE_TIMEOUT_S:g} s to compile")
            except (RequestError, QueueFullError, ConfigError) as error:
                self.compiling.pop(request_id, None)
                self._refuse(request_id, error)

    def _abort(self, request_id: str, message: str) -> None:
        if self.compiling.pop(request_id, None) is not None:
            self.send(m.Outputs([m.Output(request_id, [], [], 0, finish=("abort", None, message), stats={})]))
        else:
            self.engine.abort(request_id, message)

    # ---- results -------------------------------------------------------------------------------------

    def _send_outputs(self, outputs: list[Any]) -> None:
        if outputs:
            self.send(m.Outputs([m.pack_output(output) for output in outputs]))

    def _flush_if_idle(self) -> None:
        for call_id, deadline in list(self.flushes):
            idle = not self.compiling and (self.paused or not self.engine.has_work())
            done = idle and self.engine.flush_cache(while_waiting=self.paused)
            if done or time.monotonic() >= deadline:
                self.flushes.remove((call_id, deadline))
                self.next_stats = 0.0
                self._send_stats()
                self.send(m.Reply(call_id, bool(done)))

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now >= self.next_stats:
            self.next_stats = now + STATS_EVERY_S
            stats = self.engine.stats()
            self.send(m.Stats(asdict(stats) | {"step_seconds": self.step_seconds}))


def main(argv: list[str]) -> int:
    inbox_address, outbox_fd, factory, settings_json = argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context: zmq.Context[Any] = zmq.Context.instance()
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.connect(inbox_address)
    outbox = PipeWriter(socket.socket(fileno=int(outbox_fd)))
    try:
        module, function = factory.split(":")
        settings = json.loads(settings_json)
        engine = getattr(importlib.import_module(module), function)(settings)
        info = engine_info(engine)
        gc.collect()
        gc.freeze()  # what was made until now stays: a full collection that looks through it takes 0.1 s
    except ExactSpecError as error:  # wrong settings: no restart can help
        outbox.send(m.encoder.encode(m.Failed(str(error))))
        outbox.close(2.0)
        return 3
    loop = EngineLoop(engine, inbox, outbox)
    loop.send(m.Ready(info))
    try:
        loop.run()
    except Exception:
        log.exception("the engine failed")
        return 1
    finally:
        outbox.close(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
