"""One process of test_two_processes_train_one_draft: trains, with and without an interruption, and prints hashes."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from toy import chain_target, toy_options

from exactspec.train import run
from exactspec.train.trainer import Trainer

INTERRUPTED_AT = 3


class ToyTrainer(Trainer):
    """Keeps the newest, and lets Ctrl-C come to one process alone."""

    newest: Trainer
    interrupts = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ToyTrainer.newest = self

    def _step(self, *args: Any) -> Any:
        if ToyTrainer.interrupts and self.ranks.rank == 1 and self.progress.step == INTERRUPTED_AT:
            self.interrupted = True
        return super()._step(*args)


def train_toy(out: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    folder = Path(sys.argv[1])
    options = toy_options(folder, "dflash", out=folder / out, log_every=5, **changes)
    metrics = run.train(options, chain_target(), report=lambda line: None)
    blob = b"".join(value.numpy().tobytes() for value in ToyTrainer.newest.model.state_dict().values())
    return hashlib.sha256(blob).hexdigest(), metrics


if __name__ == "__main__":
    run.Trainer = ToyTrainer  # type: ignore[misc]
    whole, metrics = train_toy("dflash", steps=12)
    print("weights", whole, metrics["step"])
    ToyTrainer.interrupts = True
    _, metrics = train_toy("again", steps=12)
    print("interrupted", metrics["interrupted"], metrics["step"])
    ToyTrainer.interrupts = False
    resumed, metrics = train_toy("again", steps=12)
    print("resumed", resumed == whole, metrics["step"])
    timed, metrics = train_toy("timed", steps=100_000, max_seconds=1.5)
    print("timed", timed, metrics["step"])
