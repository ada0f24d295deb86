"""One process of test_two_processes_train_one_draft: trains and prints a hash of its weights."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from toy import chain_target, toy_options

from exactspec.train import run

if __name__ == "__main__":
    kept = []
    make = run.Trainer
    run.Trainer = lambda *args: kept.append(make(*args)) or kept[-1]
    options = toy_options(Path(sys.argv[1]), "dflash", steps=12)
    metrics = run.train(options, chain_target(), report=lambda line: None)
    blob = b"".join(value.numpy().tobytes() for value in kept[0].model.state_dict().values())
    print("weights", hashlib.sha256(blob).hexdigest(), metrics["step"])
