"""Opens a folder in transformers' layout: config.json, (sharded) safetensors, tokenizer files. Never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.errors import CheckpointError, UnsupportedModelError
from exactspec.model.checkpoint import Checkpoint, shard_names
from exactspec.model.config import ARCHITECTURES, SUPPORTED

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class SafetensorsFiles:
    """All tensors of a folder, read one at a time through memory maps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        # where both are there transformers takes the single file, whatever the index names
        if index.is_file() and not (folder / "model.safetensors").is_file():
            self._add_sharded(index)
        else:
            for file in _unsharded(folder):
                self._add_file(file)

    def _add_sharded(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map", {})
        for name in shard_names(weight_map, str(index)):
            file = self.folder / name
            if not file.is_file():
                raise CheckpointError(f"{index} names {name}, which is missing")
            self._add_file(file)
        for tensor, name in weight_map.items():
            if self.file_of.get(tensor) != self.folder / name:
                raise CheckpointError(f"{self.folder / name}: tensor {tensor} is missing, the index says it is here")

    def _add_file(self, file: Path) -> None:
        handle = self._handle(file)
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            view = handle.get_slice(name)
            if name in self.file_of:
                raise CheckpointError(f"{file}: tensor {name} is also in {self.file_of[name]}")
            self.file_of[name] = file
            self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), str(view.get_dtype())

    def _handle(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a complete safetensors file: {error}") from error
        return self._open[file]

    def read(self, name: str) -> Tensor:
        if self.dtypes[name] not in _DTYPES:
            raise CheckpointError(
                f"{self.file_of[name]}: tensor {name} has dtype {self.dtypes[name]}, "
                f"expected one of {', '.join(_DTYPES)}"
            )
        tensor: Tensor = self._handle(self.file_of[name]).get_tensor(name)
        return tensor

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the first matrix; float64 is served as float32."""
        for name, shape in self.shapes.items():
            if len(shape) == 2 and self.dtypes[name] in _DTYPES:
                dtype = _DTYPES[self.dtypes[name]]
                return torch.float32 if dtype == torch.float64 else dtype
        return torch.float32


def _unsharded(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("model*.safetensors"))
    if not files:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f"; found {', '.join(others[:3])}, but pickled weights are not loaded" if others else ""
        raise CheckpointError(f"{folder}: no model.safetensors and no model.safetensors.index.json{hint}")
    return files


def open_folder(folder: Path) -> Checkpoint:
    """Reads config.json and the headers of the weights. Raises CheckpointError or UnsupportedModelError."""
    hf_config = read_hf_config(folder)
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{folder}: adapter_config.json: adapters are not applied here; merge it into the weights, or remove it"
        )
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    files = SafetensorsFiles(folder)
    return Checkpoint(
        where=str(folder),
        hf_config=hf_config,
        shapes=files.shapes,
        read=files.read,
        float_dtype=files.float_dtype,
        make_tokenizer=lambda: load_hf_tokenizer(folder),
        # the file's own field: the config object has a default of its class where nobody wrote one
        eos_ids=as_ids(read_json(folder / "config.json").get("eos_token_id")) | as_ids(generation.get("eos_token_id")),
        generation=generation,
    )


def read_hf_config(folder: Path) -> Any:
    """The transformers config object of a supported architecture."""
    from transformers import AutoConfig

    raw = read_json(folder / "config.json")
    architectures = raw.get("architectures") or [None]
    named = architectures[0] if isinstance(architectures, list) else architectures
    if str(raw.get("model_type")) not in ARCHITECTURES or (named and named not in ARCHITECTURES.values()):
        raise UnsupportedModelError(
            f"{folder}: architecture {named or raw.get('model_type')} is not supported; supported: {SUPPORTED}"
        )
    try:
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' checks of a faulty config raise many kinds
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    if hf_config.model_type != raw["model_type"]:
        why = " because of its layer_types" if "layer_types" in raw else ""
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: transformers reads this {raw['model_type']} config as "
            f"{hf_config.model_type!r}{why}, which is not supported; supported: {SUPPORTED}"
        )
    return hf_config


def load_hf_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizer libraries raise many kinds, bare Exception among them
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def as_ids(value: Any) -> frozenset[int]:
    """An eos_token_id field: None, one id or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise CheckpointError(f"eos_token_id: must be an integer or a list of them, got {value!r}")
    return frozenset(ids)
