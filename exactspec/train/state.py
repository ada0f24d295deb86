"""Training state on disk: one folder a checkpoint, whole or absent; the newest is kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from exactspec.draft.block_model import BlockModel
from exactspec.errors import CheckpointError, ConfigError
from exactspec.train.optim import Optimizers
from exactspec.train.saving import publish_folder, write_json, write_tensors

_PREFIX = "step-"


@dataclass(frozen=True)
class Progress:
    """Where training stands: steps done and seconds spent in them."""

    step: int = 0
    seconds: float = 0.0


def save_state(
    root: Path, model: BlockModel, optimizers: Optimizers, progress: Progress, facts: dict[str, Any]
) -> Path:
    """Writes ROOT/step-NNNNNNN, then removes older ones. `facts` must be equal for a later resume."""
    name = f"{_PREFIX}{progress.step:07d}"
    part = root / f"part-{name}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write_tensors(part / "model.safetensors", dict(model.state_dict()))
        write_tensors(part / "optimizer.safetensors", optimizers.state_tensors())
        write_json(part / "state.json", {"step": progress.step, "seconds": progress.seconds, "facts": facts})
        publish_folder(part, root / name)
    except (OSError, ConfigError) as error:
        shutil.rmtree(part, ignore_errors=True)
        kept = newest_state(root)
        last = f"the last whole checkpoint is {kept}" if kept else "there is no earlier checkpoint"
        raise ConfigError(
            f"{root}: the checkpoint of step {progress.step} cannot be written ({error}); {last}"
        ) from error
    for old in root.glob(f"{_PREFIX}*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)
    return root / name


def newest_state(root: Path) -> Path | None:
    """The newest whole checkpoint. Unfinished ones have another name and are never looked at."""
    found = sorted(path for path in root.glob(f"{_PREFIX}*") if (path / "state.json").exists())
    return found[-1] if found else None


def load_state(folder: Path, model: BlockModel, optimizers: Optimizers, facts: dict[str, Any]) -> Progress:
    """Restores a checkpoint in place. Raises ConfigError naming the setting that has changed since it was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
        moments: dict[str, Tensor] = load_file(folder / "optimizer.safetensors")
        stored: dict[str, Any] = content["facts"]
        progress = Progress(int(content["step"]), float(content["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: not a whole training checkpoint ({error})") from error
    for key in sorted(facts.keys() | stored.keys()):
        if facts.get(key) != stored.get(key):
            raise ConfigError(
                f"{key}: the run in {folder.parent.parent} was started with {stored.get(key)!r}, now it is "
                f"{facts.get(key)!r}; use the same settings to resume, or another output folder"
            )
    model.load_state_dict(weights)
    optimizers.load_state_tensors(moments)
    return progress
