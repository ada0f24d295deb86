"""What every kind of checkpoint offers, and the checks that are the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from exactspec.errors import CheckpointError
from exactspec.model.config import ModelConfig

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias")  # buffers that old exporters wrote
_SHOWN = 5  # names in a message


@dataclass
class Checkpoint:
    """A checkpoint opened, its tensors not read yet. Names as in transformers: model.layers.0.mlp.up_proj.weight."""

    where: str  # folder or file, for messages
    hf_config: Any
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]  # floating point, any dtype
    float_dtype: torch.dtype  # what dtype "auto" means here
    make_tokenizer: Callable[[], Any]  # -> transformers fast tokenizer
    eos_ids: frozenset[int] = frozenset()
    generation: dict[str, Any] = field(default_factory=dict)
    norms_folded: bool = False  # 1 + w already added (GGUF)
    rope_factors: tuple[float, ...] = ()  # divide the RoPE frequencies (GGUF of Llama 3.1)


def shard_names(weight_map: Any, where: str) -> list[str]:
    """The files that a safetensors index names. Raises CheckpointError where one is outside the index's own folder:
    a checkpoint must not make us read other files of the machine.
    """
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: no weight_map")
    for tensor, name in weight_map.items():
        path = PurePath(name) if isinstance(name, str) and name else None
        if path is None or path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{where}: tensor {tensor}: {name!r} is not the name of a file in this folder")
    return sorted(set(weight_map.values()))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inter = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (inter, hidden, config.mlp_bias),
        "mlp.up_proj": (inter, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inter, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in linears.items():
        shapes[name + ".weight"] = (rows, columns)
        if bias:
            shapes[name + ".bias"] = (rows,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError naming missing, unexpected or misshapen tensors."""
    expected, found = tensor_shapes(config), checkpoint.shapes
    missing = [name for name in expected if name not in found]
    if missing:
        wanted = [f"{name} {list(expected[name])}" for name in missing]
        raise CheckpointError(f"{checkpoint.where}: {len(missing)} tensors missing: {_some(wanted)}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            vocab = f" (vocab_size {config.vocab_size})" if shape[0] == config.vocab_size else ""
            raise CheckpointError(
                f"{checkpoint.where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}{vocab}"
            )
    allowed = {"lm_head.weight"} if config.tied else set()  # some exporters write a tied head as well: equal
    unexpected = [n for n in found if n not in expected and n not in allowed and not n.endswith(IGNORED_SUFFIXES)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.where}: {len(unexpected)} unexpected tensors for {config.architecture}: {_some(unexpected)}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
