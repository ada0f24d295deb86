"""From a name to a LoadedTarget: finds the checkpoint, checks it against its config and reads the weights."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.backend.base import LayerWeights
from exactspec.backend.parallel import SINGLE, Parallel, shard_layer, shard_spec
from exactspec.errors import CheckpointError, ConfigError, ExactSpecError
from exactspec.model.checkpoint import Checkpoint, check_tensors, tensor_shapes
from exactspec.model.config import ModelConfig, from_hf_config
from exactspec.model.hub import resolve_model
from exactspec.model.progress import LoadProgress
from exactspec.model.random_weights import byte_tokenizer, random_target, shape_config
from exactspec.model.rope import RopeSpec
from exactspec.model.weights import LoadedTarget, ModelWeights
from exactspec.text.tokenizer import Tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RANDOM = "random:"  # model names with this prefix have no files
_GENERATION_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_target(
    model: str,
    dtype: str | torch.dtype = "auto",
    context_length: int | None = None,
    device: str | torch.device = "cpu",
    parallel: Parallel = SINGLE,
) -> LoadedTarget:
    """Loads a target from a folder of safetensors, a GGUF file, a hub id or an alias; "random:SHAPE" makes one of a
    published shape (model/random_weights.py) for speed measurements.

    dtype "auto" keeps the checkpoint's float type (a quantised GGUF becomes bfloat16). `context_length` may shorten
    the model's context. Weights arrive on `device`, in the dtype asked for; norms and biases in float32. Of several
    ranks each keeps its part of the layers: files are mapped, so little more is read.
    Raises CheckpointError (or UnsupportedModelError) naming tensor, field or file, and ConfigError for bad arguments.
    """
    wanted = _dtype(dtype)
    if model.startswith(RANDOM):
        return random_target(model.removeprefix(RANDOM), wanted or torch.bfloat16, device, context_length)
    checkpoint = open_checkpoint(model)
    config = _with_own_head(_config(checkpoint, context_length), checkpoint)
    check_tensors(config, checkpoint)
    tokenizer = _tokenizer(checkpoint)
    _check_vocabulary(tokenizer, config, checkpoint)
    shard_spec(config.stack_spec(), parallel)  # refuses what does not divide, before anything is read
    weights = _read_weights(config, checkpoint, wanted or checkpoint.float_dtype, torch.device(device), parallel)
    defaults = {k: checkpoint.generation[k] for k in _GENERATION_FIELDS if checkpoint.generation.get(k) is not None}
    return LoadedTarget(model, config, weights, tokenizer, tokenizer.eos_ids, defaults, checkpoint.where, parallel.size)


def load_config(model: str, context_length: int | None = None) -> ModelConfig:
    """The config alone: no weights are read (their headers are)."""
    if model.startswith(RANDOM):
        return shape_config(model.removeprefix(RANDOM), context_length)
    return _config(open_checkpoint(model), context_length)


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer alone, with the end tokens of the model's configs: for a process that runs no model."""
    if model.startswith(RANDOM):
        return byte_tokenizer(shape_config(model.removeprefix(RANDOM)).vocab_size)
    return _tokenizer(open_checkpoint(model))


def open_checkpoint(model: str) -> Checkpoint:
    """Opens what `model` names and reads its headers."""
    path = resolve_model(model)
    if path.is_dir():
        gguf = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and gguf:
            return _open_gguf(_single_gguf(path, gguf))
        from exactspec.model.safetensors_reader import open_folder

        return open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise CheckpointError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file")


def _open_gguf(path: Path) -> Checkpoint:
    from exactspec.model.gguf_reader import open_gguf

    return open_gguf(path)


def _single_gguf(folder: Path, files: list[Path]) -> Path:
    firsts = [f for f in files if "-of-" not in f.name or "-00001-of-" in f.name]
    if len(firsts) != 1:
        raise CheckpointError(
            f"{folder} holds {len(firsts)} GGUF models, name one: {', '.join(f.name for f in firsts)}"
        )
    return firsts[0]


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ConfigError(f"dtype must be auto, {', '.join(DTYPES)}, got {dtype!r}")
    return found


def _config(checkpoint: Checkpoint, context_length: int | None) -> ModelConfig:
    try:
        config = from_hf_config(checkpoint.hf_config, context_length)
    except ExactSpecError:
        raise
    except Exception as error:  # values of the wrong kind, in transformers' RoPE functions too
        raise CheckpointError(f"{checkpoint.where}: config: {type(error).__name__}: {error}") from error
    factors = checkpoint.rope_factors
    if not factors:
        return config
    rope = config.ropes[0]
    if len(factors) != len(rope.inv_freq):
        raise CheckpointError(
            f"{checkpoint.where}: tensor rope_freqs.weight has {len(factors)} entries, expected {len(rope.inv_freq)}"
        )
    scaled = (torch.tensor(rope.inv_freq) / torch.tensor(factors)).tolist()
    return replace(config, ropes=(RopeSpec(tuple(scaled), rope.attention_factor), *config.ropes[1:]))


def _with_own_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Not tied where the file has a head that differs from the embedding: transformers serves that head."""
    if not config.tied or not {"lm_head.weight", "model.embed_tokens.weight"} <= checkpoint.shapes.keys():
        return config
    head, embed = checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")
    return config if head.dtype == embed.dtype and torch.equal(head, embed) else replace(config, tied=False)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer(checkpoint.make_tokenizer(), checkpoint.eos_ids)


def _check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """The base vocabulary must fit the embedding; added tokens may lie past it (Gemma 3's image token)."""
    base = 1 + max(tokenizer.hf.backend_tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if base > config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.where}: the tokenizer has {base} ids, model.embed_tokens.weight only {config.vocab_size} rows"
        )
    outside = sorted(i for i in tokenizer.eos_ids if i >= config.vocab_size)
    if outside:
        raise CheckpointError(
            f"{checkpoint.where}: eos_token_id {outside} is outside the vocabulary of {config.vocab_size}"
        )


def _read_weights(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, parallel: Parallel
) -> ModelWeights:
    with LoadProgress(f"Loading {Path(checkpoint.where).name}", len(tensor_shapes(config))) as progress:
        reader = _WeightReader(config, checkpoint, dtype, device, progress)
        embed = reader.matrix("model.embed_tokens")
        if parallel.size > 1:
            reader.device = torch.device("cpu")  # whole layers, of which one part goes to the device
        layers = [_part(reader.layer(i), config, parallel, device) for i in range(config.num_layers)]
        reader.device = device
        final_norm = reader.norm("model.norm")
        lm_head = embed if config.tied else reader.matrix("lm_head")
        return ModelWeights(embed, layers, final_norm, lm_head)


def _part(layer: LayerWeights, config: ModelConfig, parallel: Parallel, device: torch.device) -> LayerWeights:
    if parallel.size == 1:
        return layer
    part = shard_layer(layer, config.stack_spec(), parallel)
    tensors: dict[str, Any] = {f.name: getattr(part, f.name) for f in fields(part)}
    moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    return LayerWeights(**moved)


class _WeightReader:
    """Reads tensors into the family-neutral layout."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress,
    ) -> None:
        self.config, self.checkpoint, self.dtype, self.device, self.progress = (
            config,
            checkpoint,
            dtype,
            device,
            progress,
        )

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.checkpoint.read(name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.checkpoint.where}: tensor {name} has dtype {tensor.dtype}, expected floats")
        self.progress.advance()
        weights = tensor.to(self.device, dtype).contiguous()
        # NaN and infinities stay in a sum, which is faster than looking at each value
        if not math.isfinite(weights.sum(dtype=torch.float32)) and not weights.isfinite().all():
            where = f"{self.checkpoint.where}: tensor {name}"
            raise CheckpointError(f"{where}: holds NaN or infinite values as {str(dtype).removeprefix('torch.')}")
        return weights

    def matrix(self, *names: str) -> Tensor:
        """The weights of one or several linears, stacked along the outputs."""
        parts = [self._read(f"{name}.weight", self.dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self, has_bias: bool, *names: str) -> Tensor | None:
        return torch.cat([self._read(f"{name}.bias", torch.float32) for name in names]) if has_bias else None

    def norm(self, name: str) -> Tensor:
        weight = self._read(f"{name}.weight", torch.float32)
        return 1.0 + weight if self.config.norm_offset and not self.checkpoint.norms_folded else weight

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}."
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        gate_up = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
        o, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        post: dict[str, Any] = {}
        if config.post_norms:
            post["post_attention_norm"] = self.norm(prefix + "post_attention_layernorm")
            post["post_mlp_norm"] = self.norm(prefix + "post_feedforward_layernorm")
        if config.qk_norm:
            post["q_norm"] = self.norm(prefix + "self_attn.q_norm")
            post["k_norm"] = self.norm(prefix + "self_attn.k_norm")
        return LayerWeights(
            input_norm=self.norm(prefix + "input_layernorm"),
            qkv=self.matrix(*qkv),
            o=self.matrix(o),
            mlp_norm=self.norm(prefix + mlp_norm),
            gate_up=self.matrix(*gate_up),
            down=self.matrix(down),
            qkv_bias=self.bias(config.qkv_bias, *qkv),
            o_bias=self.bias(config.o_bias, o),
            gate_up_bias=self.bias(config.mlp_bias, *gate_up),
            down_bias=self.bias(config.mlp_bias, down),
            **post,
        )
