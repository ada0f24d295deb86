"""Tensor parallelism in the engine: one process a rank, all running the same engine on the same requests.

Rank 0 is the process that called `build_engine`. It starts the others (engine/follower.py), tells them of every
request, abort and step, and runs each step with them. Schedules, seeds and draws are the same everywhere, so no token
travels. What a clock decides is decided by rank 0 and told: searches for stop patterns (they have a time limit),
measured step costs, the size of the K/V pool. A rank that dies ends the others: pipes close, collectives in flight
fail, `step` raises a DeviceError.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from exactspec.backend.parallel import (
    Parallel,
    abort_collectives,
    check_no_group,
    join_group,
    leave_group,
    shard_spec,
)
from exactspec.backend.select import resolve_device
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.errors import DeviceError, ExactSpecError
from exactspec.model.loader import load_config
from exactspec.text.stops import StopChecker
from exactspec.types import Request, SamplingParams, StepOutput

START_TIMEOUT_S = 600.0  # until a rank has loaded its part
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankSettings:
    """What a follower is started with."""

    config: EngineConfig
    rank: int
    store_file: str
    num_threads: int


@dataclass(slots=True)
class _Follower:
    process: subprocess.Popen[bytes]
    pipe: Connection
    rank: int


class Followers:
    """The processes of ranks 1 .. size - 1, as rank 0 sees them."""

    def __init__(self, config: EngineConfig) -> None:
        self.failure = ""
        self.joined = False  # this process is in the group
        self._closed = False
        self._folder = tempfile.mkdtemp(prefix="exactspec-ranks-")
        self.store_file = os.path.join(self._folder, "store")
        self._all: list[_Follower] = []
        for rank in range(1, config.tensor_parallel):
            self._all.append(_start(RankSettings(config, rank, self.store_file, torch.get_num_threads())))
        atexit.register(self.close)

    def wait_for(self, word: str) -> None:
        """Waits until every follower has said `word`. DeviceError if one ends, fails or is silent for too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for follower in self._all:
            said = _receive(follower, deadline)
            if said != word:
                raise self._fail(f"tensor parallel rank {follower.rank} {said}")

    def send(self, kind: str, value: Any = None) -> None:
        for follower in self._all:
            try:
                follower.pipe.send((kind, value))
            except (OSError, ValueError):
                self.check()
                raise self._fail(f"tensor parallel rank {follower.rank} cannot be reached") from None

    def check(self) -> None:
        """Raises DeviceError once any follower has ended."""
        if self.failure:
            raise DeviceError(self.failure)
        for follower in self._all:
            code = follower.process.poll()
            if code is not None:
                raise self._fail(f"tensor parallel rank {follower.rank} {_last_words(follower, code)}")

    def failed(self, error: Exception) -> DeviceError:
        """What to raise when a step of rank 0 failed: a dead follower's name, or the error itself."""
        for follower in self._all:  # a collective can fail before the system has noted who died
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(1.0)
                break
        try:
            self.check()
        except DeviceError as known:
            return known
        return self._fail(f"tensor parallel rank 0: {type(error).__name__}: {error}")

    def watch(self, on_death: Callable[[], None]) -> None:
        """Calls on_death from a thread when a follower ends unasked."""

        def run() -> None:
            while not self._closed:
                time.sleep(0.5)
                if not self._closed and any(f.process.poll() is not None for f in self._all):
                    on_death()
                    return

        threading.Thread(target=run, name="ranks", daemon=True).start()

    def close(self) -> None:
        """Ends the followers; may be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for follower in self._all:
            with contextlib.suppress(OSError, ValueError):
                follower.pipe.send(("stop", None))
            follower.pipe.close()
        if self.joined:
            leave_group()
        for follower in self._all:
            try:
                follower.process.wait(STOP_TIMEOUT_S if not self.failure else 1.0)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.failure = self.failure or "the engine is closed"

    def _fail(self, reason: str) -> DeviceError:
        self.failure = self.failure or reason
        return DeviceError(self.failure)


def _start(settings: RankSettings) -> _Follower:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "exactspec.engine.follower", str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    with contextlib.suppress(OSError):  # it died at once: the first wait says so
        ours.send(settings)
    return _Follower(process, ours, settings.rank)


def _receive(follower: _Follower, deadline: float) -> str:
    while time.monotonic() < deadline:
        try:
            if follower.pipe.poll(0.2):
                return str(follower.pipe.recv())
        except (EOFError, OSError):
            return _last_words(follower, follower.process.wait())
    return f"did not start within {START_TIMEOUT_S:.0f} s"


def _last_words(follower: _Follower, code: int) -> str:
    with contextlib.suppress(EOFError, OSError):
        while follower.pipe.poll():
            said = str(follower.pipe.recv())
            if said not in ("started", "ready"):
                return said
    return f"ended with code {code}"


def launch(config: EngineConfig, build: Callable[[EngineConfig, Parallel, Callable[..., Engine]], Engine]) -> Engine:
    """Starts the other ranks and builds this one's engine with `build(config, parallel, engine class)`.

    Raises ConfigError if the model does not divide, DeviceError if there are too few devices or a rank fails to start.
    """
    check_no_group()
    size = config.tensor_parallel
    is_cuda = resolve_device(config.device).startswith("cuda")
    if is_cuda and torch.cuda.device_count() < size:
        raise DeviceError(
            f"tensor_parallel: {size} ranks need as many CUDA devices, torch sees {torch.cuda.device_count()}"
        )
    shard_spec(load_config(config.model, config.context_length).stack_spec(), Parallel(0, size))
    followers = Followers(config)
    try:
        followers.wait_for("started")
        parallel = join_group(0, size, followers.store_file, is_cuda)
        followers.joined = True
        if is_cuda:  # a graph that waits for a dead rank raises nothing by itself
            followers.watch(abort_collectives)
        engine = build(config, parallel, lambda *args: LeadingEngine(followers, *args))
        followers.wait_for("ready")
    except ExactSpecError:
        followers.close()
        raise
    except RuntimeError as error:
        failure = followers.failed(error)
        followers.close()
        raise failure from error
    except BaseException:
        followers.close()
        raise
    return engine


class LeadingEngine(Engine):
    """Rank 0's engine: what it is told, the followers are told in the same order."""

    def __init__(self, followers: Followers, *args: Any) -> None:
        super().__init__(*args)
        self.followers = followers
        self._digest = 0

    def add(self, request: Request) -> None:
        self.followers.check()
        super().add(request)
        self.followers.send("add", request)

    def abort(self, request_id: str, message: str = "Aborted") -> bool:
        found = super().abort(request_id, message)
        if found:
            self.followers.send("call", ("abort", {"request_id": request_id, "message": message}))
        return found

    def take_ended(self) -> list[StepOutput]:
        outputs = super().take_ended()
        if outputs:  # the others must not report them with the next step: the checksums would differ
            self.followers.send("call", ("take_ended", {}))
        return outputs

    def flush_cache(self, **options: bool) -> bool:
        flushed = super().flush_cache(**options)
        if flushed:
            self.followers.send("call", ("flush_cache", options))
        return flushed

    def retract_running(self) -> None:
        super().retract_running()
        self.followers.send("call", ("retract_running", {}))

    def has_work(self) -> bool:
        """Raises DeviceError when a follower has died: an idle server notices before a request does."""
        self.followers.check()
        return super().has_work()

    def step(self) -> list[StepOutput]:
        self.followers.check()
        self.followers.send("step", self._digest)
        try:
            outputs = super().step()
        except ExactSpecError:
            raise
        except RuntimeError as error:
            raise self.followers.failed(error) from error
        self.followers.check()  # what was computed with a dead rank's parts is not shown
        self._digest = digest(outputs, self._digest)
        return outputs

    def make_stop_checker(self, params: SamplingParams) -> StopChecker:
        checker = super().make_stop_checker(params)
        return checker if not params.stop_regex else ToldChecker(checker, self.followers)

    def close(self) -> None:
        drop_captured(self)
        self.followers.close()


def drop_captured(engine: Engine) -> None:
    """The engine runs no more steps. What its runner has captured goes: NCCL keeps a communicator until the last graph
    that holds a call of it is gone, so leaving the group would wait for ever."""
    with contextlib.suppress(AttributeError):  # closed before
        del engine.runner
    gc.collect()


class ToldChecker(StopChecker):
    """A stop checker with patterns: their searches have a time limit, so the followers are told what was found."""

    def __init__(self, checker: StopChecker, followers: Followers) -> None:
        self._checker, self._followers = checker, followers

    @property
    def has_stops(self) -> bool:
        return self._checker.has_stops

    def append(self, token_id: int) -> str | None:
        found = self._checker.append(token_id)
        self._followers.send("found", found)
        return found


def digest(outputs: Sequence[StepOutput], before: int) -> int:
    """A running checksum of what steps emitted: ranks that disagree stop at the next step instead of drifting apart."""
    said = repr([(o.request_id, o.token_ids, o.finish and o.finish.kind) for o in outputs])
    return zlib.crc32(said.encode(), before)


def follower_config(config: EngineConfig) -> EngineConfig:
    """Followers accept whatever rank 0 has accepted."""
    return replace(config, max_waiting_requests=1 << 30)
