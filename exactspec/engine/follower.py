"""The process of a rank other than the first: builds the same engine and does what rank 0 says.

    python -m exactspec.engine.follower PIPE_FD PARENT_PID

Started by engine/ranks.py with the settings in the pipe. It ends when the pipe closes or its parent is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from exactspec.backend.parallel import join_group, leave_group
from exactspec.backend.select import resolve_device
from exactspec.engine.build import build_rank
from exactspec.engine.engine import Engine
from exactspec.engine.ranks import RankSettings, digest, drop_captured, follower_config
from exactspec.errors import DeviceError, ExactSpecError
from exactspec.grammar import GrammarCompiler
from exactspec.text.stops import StopChecker
from exactspec.types import SamplingParams

log = logging.getLogger("exactspec.engine")
GRAMMAR_TIMEOUT_S = 600.0  # rank 0 has compiled it: this one only has to follow


class FollowingEngine(Engine):
    """The engine of a rank that decides nothing by the clock."""

    def __init__(self, pipe: Connection, *args: Any) -> None:
        super().__init__(*args)
        self._pipe = pipe
        self.grammars = GrammarCompiler(
            self.target.tokenizer, self.target.config.vocab_size, self.eos_ids, timeout_s=GRAMMAR_TIMEOUT_S
        )

    def _end_overruns(self) -> None:
        """Rank 0 does, by its own clock, and says so."""
        self._overruns.clear()

    def make_stop_checker(self, params: SamplingParams) -> StopChecker:
        return super().make_stop_checker(params) if not params.stop_regex else _ListeningChecker(self._pipe)


class _ListeningChecker(StopChecker):
    """Asks rank 0 instead of searching (ranks.ToldChecker)."""

    has_stops = True

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def append(self, token_id: int) -> str | None:
        kind, found = self._pipe.recv()
        if kind != "found":
            raise DeviceError(f"expected what rank 0 found, got {kind}: the ranks disagree")
        result: str | None = found
        return result


def follow(engine: Engine, pipe: Connection) -> None:
    """Serves rank 0 until it says stop."""
    seen = 0
    while True:
        kind, value = pipe.recv()
        if kind == "step":
            if value != seen:
                raise DeviceError("the ranks emitted different tokens")
            seen = digest(engine.step(), seen)
        elif kind == "add":
            engine.add(value)
        elif kind == "call":
            name, options = value
            getattr(engine, name)(**options)
        else:
            return


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # a collective that waits for the parent cannot be asked to stop


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(int(argv[1]),), daemon=True).start()
    pipe = Connection(int(argv[0]))
    try:
        settings: RankSettings = pipe.recv()
        torch.set_num_threads(settings.num_threads)
        config = follower_config(settings.config)
        pipe.send("started")
        is_cuda = resolve_device(config.device).startswith("cuda")
        parallel = join_group(settings.rank, config.tensor_parallel, settings.store_file, is_cuda)
        engine = build_rank(config, parallel, lambda *args: FollowingEngine(pipe, *args))
        pipe.send("ready")
        follow(engine, pipe)
        drop_captured(engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # rank 0 is gone
    except (ExactSpecError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            pipe.send(f"failed: {error}")
        log.error("a tensor parallel rank failed: %s", error)
        return 3
    leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
