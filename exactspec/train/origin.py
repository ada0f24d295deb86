"""What training data was made with, kept beside it: data of other settings must not pass for one's own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exactspec.errors import ConfigError
from exactspec.model.weights import LoadedTarget
from exactspec.train.options import DataOptions

_NO_PART = ("exclude", "heldout_share", "slots", "slot_tokens", "memory_tokens")  # of what the data is; exclude: below
_SAMPLED = 256  # embedding rows that stand for all


def target_fingerprint(loaded: LoadedTarget) -> str:
    """SHA-256 over the shape and a sample of the weights, whatever the file they came from."""
    weights, content = loaded.weights, hashlib.sha256(repr(loaded.config.stack_spec()).encode())
    samples = [weights.embed[:: max(1, weights.embed.shape[0] // _SAMPLED)]]
    samples += [part for layer in weights.layers for part in (layer.o[:4], layer.down[:4])]
    for sample in samples:
        content.update(sample.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return content.hexdigest()


def origin_of(options: DataOptions, target: str) -> dict[str, Any]:
    """Settings and files (by their content) that decide the data, beside the seed. `target`: its fingerprint."""
    settings = {k: v for k, v in dataclasses.asdict(options).items() if k not in _NO_PART}
    settings["prompts"] = None if options.prompts is None else _digest(options.prompts, "prompts")
    excluded = sorted(_digest(path, "exclude") for path in options.exclude)
    made: dict[str, Any] = json.loads(json.dumps({**settings, "exclude": excluded, "target": target}))
    return made


def check_origin(folder: Path, shards: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Raises ConfigError naming the setting by which the data of `folder` differs from what is asked for. Data that
    does not say what it was made with is taken where nothing must stay unseen."""
    for shard in shards:
        made = shard.get("made_with")
        if made is None and wanted["exclude"]:
            raise _other(folder, "exclude", "is not known to have been applied to it")
        if made is None:
            continue
        if not set(wanted["exclude"]) <= set(made.get("exclude", [])):
            raise _other(folder, "exclude", "names files that were not excluded when it was made")
        for name in sorted((wanted.keys() | made.keys()) - {"exclude"}):
            if wanted.get(name) != made.get(name):
                raise _other(folder, name, f"was {made.get(name)!r:.80}, now it is {wanted.get(name)!r:.80}")


def _other(folder: Path, name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name}: {folder} holds data made before, and {name} {why}; use the same settings, or another data_folder"
    )


def _digest(path: Path, setting: str) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read ({error})") from None
