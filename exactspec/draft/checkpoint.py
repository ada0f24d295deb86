"""Draft checkpoints on disk: reading with checks that name the fault, and writing that never leaves half a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.draft.block_model import BlockModel
from exactspec.draft.compact import WEIGHTS_FILE, expand_tensors
from exactspec.draft.config import CONFIG_FILE, BlockDraftConfig, read_draft_config
from exactspec.draft.files import write_text, write_whole
from exactspec.errors import CheckpointError
from exactspec.model.checkpoint import shard_names

INDEX_FILE = WEIGHTS_FILE + ".index.json"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IGNORED = ("rotary_emb.inv_freq",)  # derived values that some trainers save
log = logging.getLogger(__name__)


def load_block_model(folder: str | Path) -> BlockModel:
    """The draft network of a checkpoint folder, float32, in eval mode, without gradients.

    Raises CheckpointError naming the file and the key or tensor: unreadable or truncated file, missing, unexpected or
    misshapen tensors, types that are not float32, bfloat16 or float16 (or compact int8 rows).
    """
    folder = Path(folder)
    config = read_draft_config(folder)
    tensors = read_tensors(folder)
    with torch.device("meta"):
        model = BlockModel(config, "embed_tokens.weight" in tensors, "lm_head.weight" in tensors)
    _check_tensors(model, tensors, str(folder))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True, assign=True)
    return model.requires_grad_(False).eval()


def save_block_model(model: BlockModel, folder: str | Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Writes weights in `dtype` and config.json, each whole or not at all (ConfigError)."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    write_whole(folder / WEIGHTS_FILE, lambda part: save_file(tensors, part, metadata={"format": "pt"}))
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=1) + "\n")


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder, sharded or not, compact rows expanded."""
    folder = Path(folder)
    files = [folder / name for name in _weight_files(folder)]
    stored: dict[str, Tensor] = {}
    for path in files:
        stored.update(_read_safetensors(path))
    tensors = expand_tensors(stored, str(folder))
    return {_plain_name(name): value for name, value in tensors.items() if not name.endswith(_IGNORED)}


def _plain_name(name: str) -> str:
    """Trainers that wrap the network save the same tensors below `model.`."""
    return name.removeprefix("model.")


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_FILE).exists():
        return [WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder}: no {WEIGHTS_FILE} (only safetensors are read)")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
    return shard_names(weight_map, str(index))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: truncated, damaged or not a safetensors file ({error})") from error


def _check_tensors(model: BlockModel, tensors: dict[str, Tensor], where: str) -> None:
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    if missing:
        raise CheckpointError(f"{where}: missing tensors: {_some(missing)}")
    unexpected = sorted(set(tensors) - set(expected))
    if unexpected:
        raise CheckpointError(f"{where}: unexpected tensors: {_some(unexpected)}")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{where}: tensor {name}: expected shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(f"{where}: tensor {name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{where}: tensor {name}: holds NaN or infinite values")


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must agree with. vocab_size: embedding rows, padding included."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    end_ids: frozenset[int] = frozenset()  # EOS and padding ids


def check_fit(config: BlockDraftConfig, target: TargetFacts, where: str) -> None:
    """Raises CheckpointError, naming the key, when a draft cannot have been made for this target."""
    pairs = (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    )
    made_for = f" (made for {config.target_model})" if config.target_model else ""
    for key, found, wanted in pairs:
        if found is not None and found != wanted:
            raise CheckpointError(
                f"{where}: {key}: {found}, but the target has {wanted}: this is a draft for another target{made_for}"
            )
    last = target.num_layers - 1
    for layer in config.target_layer_ids:
        if layer == last:
            raise CheckpointError(
                f"{where}: target_layer_ids: {layer} is the target's last layer, which cannot be read without its "
                f"final norm; must be from 0 to {last - 1}"
            )
        if layer > last:
            raise CheckpointError(f"{where}: target_layer_ids: {layer} is out of range; must be from 0 to {last - 1}")
    if config.mask_token_id in target.end_ids | _own_end_ids(config):
        log.warning(
            "%s: mask_token_id %d is also an end or padding token; it works, but a draft is usually trained "
            "with an id of its own",
            where,
            config.mask_token_id,
        )


def _own_end_ids(config: BlockDraftConfig) -> frozenset[int]:
    ids: set[int] = set()
    for key in ("eos_token_id", "pad_token_id"):
        value = config.raw.get(key)
        values: Iterable[Any] = value if isinstance(value, list) else [value]
        ids.update(item for item in values if isinstance(item, int))
    return frozenset(ids)
