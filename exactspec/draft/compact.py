"""Compact storage of draft checkpoints: int8 rows with a float scale each, about half the size of bf16.

A tensor NAME [out, in] is stored as NAME.q8 (int8, same shape) and NAME.scale (float32 [out]); NAME = q8 * scale. Only
matrices are stored so; norms and biases stay as they are. Drafts may be approximate (a worse draft costs acceptance,
never an output), and int8 rows are near bf16's own precision.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from exactspec.draft.files import write_text, write_whole
from exactspec.draft.vocabulary import VOCAB_FILE
from exactspec.errors import CheckpointError

QUANTISED = ".q8"
SCALE = ".scale"
WEIGHTS_FILE = "model.safetensors"
_LEVELS = 127


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] float -> (int8 [out, in], scale float32 [out]); the row's largest magnitude becomes 127."""
    rows = weight.float()
    scale = rows.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LEVELS
    return torch.round(rows / scale[:, None]).clamp_(-_LEVELS, _LEVELS).to(torch.int8), scale


def dequantise_rows(quantised: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `quantise_rows`, float32."""
    return quantised.float() * scale.float()[:, None]


def compact_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored form of a state dict."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.is_floating_point():
            stored[name + QUANTISED], stored[name + SCALE] = quantise_rows(tensor)
        else:
            stored[name] = tensor.contiguous()
    return stored


def expand_tensors(stored: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Undoes `compact_tensors`; other tensors pass through. CheckpointError for missing scales and wrong shapes."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(QUANTISED):
            base = name.removesuffix(QUANTISED)
            scale = stored.get(base + SCALE)
            if scale is None:
                raise CheckpointError(f"{where}: missing tensor {base + SCALE} (scales of {name})")
            if tensor.dtype != torch.int8 or tensor.dim() != 2 or scale.shape != tensor.shape[:1]:
                raise CheckpointError(
                    f"{where}: tensor {name}: expected int8 rows with one scale each, got "
                    f"{tensor.dtype} {tuple(tensor.shape)} and scales {tuple(scale.shape)}"
                )
            tensors[base] = dequantise_rows(tensor, scale)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) + QUANTISED in stored):
            tensors[name] = tensor
    return tensors


def compact_checkpoint(source: str | Path, destination: str | Path) -> None:
    """Writes a compact copy of a draft checkpoint folder (config, calibration and vocabulary are copied).

    Raises CheckpointError when the source is not a whole draft checkpoint. The destination must not hold one already.
    """
    from safetensors.torch import save_file

    from exactspec.draft.calibration import CALIBRATION_FILE
    from exactspec.draft.checkpoint import load_block_model, read_tensors
    from exactspec.draft.config import CONFIG_FILE

    source, destination = Path(source), Path(destination)
    load_block_model(source)  # checked before anything is written
    if (destination / WEIGHTS_FILE).exists():
        raise CheckpointError(f"{destination / WEIGHTS_FILE}: exists already")
    destination.mkdir(parents=True, exist_ok=True)
    stored = compact_tensors(read_tensors(source))
    write_whole(destination / WEIGHTS_FILE, lambda part: save_file(stored, part, metadata={"format": "pt"}))
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    write_text(destination / CONFIG_FILE, json.dumps(config, indent=1) + "\n")
    for name in (CALIBRATION_FILE, VOCAB_FILE):
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)
