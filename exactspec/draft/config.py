"""What a block draft is, read from the config.json of the published layouts, conventions converted once, here.

Layouts (they share tensor names and differ in conventions):

- DeepSpec, DSpark and DFlash (`Qwen3DSparkModel`; DFlash is Markov rank 0): keys at the top level; the anchor row
  predicts the first draft token, so gamma = block_size.
- z-lab DFlash (`DFlashDraftModel`): draft keys inside `dflash_config`; block_size counts the anchor and only the mask
  rows predict, so gamma = block_size - 1.
- ours: DeepSpec's keys plus `anchor_is_first_prediction`, Llama- or Qwen3-style layers.

A key `anchor_is_first_prediction` or `sample_from_anchor` decides where present; else the architecture's name does.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from exactspec.errors import CheckpointError, UnsupportedModelError

CONFIG_FILE = "config.json"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_QK_NORM_BY_FAMILY = {"qwen3": True, "llama": False}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Options of other drafts that change the computation. Any other value than these is refused, never ignored.
_NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "attention_mode": (None, "gqa", "mha"),
    "causal": (None, False),
    "is_causal": (None, False),
    "is_causal_in_block": (None, False),
    "dflash_query_causal": (None, False),
    "output_multiplier": (None, 1.0),
    "input_embedding_scale": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "partial_rotary_factor": (None, 1.0),
    "draft_adapter_rank": (None, 0),
    "use_sliding_window": (None, False),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "quantization_config": (None,),
}
# Sizes beyond these are mistakes, and building the network to find that out would take for ever.
_MOST = {"num_hidden_layers": 1024, "block_size": 1024, "head_dim": 1 << 16}
_MOST_OTHERS = 1 << 24


@dataclass(frozen=True)
class BlockDraftConfig:
    """A block draft, family-neutral. Layer ids are 0-based target decoder layers whose *outputs* are read."""

    algorithm: str  # "dflash" or "dspark": for display only, nothing branches on it
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int  # rows of one draft forward, anchor row included
    sample_from_anchor: bool
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # as in transformers' configs, without theta
    max_positions: int = 0  # what the draft was built for; 0: not stated
    activation: str = "silu"
    use_qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_target_layers: int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence_head: bool = False
    confidence_with_markov: bool = False
    target_model: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as it was read

    @property
    def gamma(self) -> int:
        """Draft tokens of a full block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def feature_size(self) -> int:
        """Width of the joined target features, the input of `fc`."""
        return len(self.target_layer_ids) * self.hidden_size


def read_draft_config(folder: str | Path) -> BlockDraftConfig:
    """Reads FOLDER/config.json. Raises CheckpointError naming the file and the key at fault."""
    path = Path(folder) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a draft checkpoint is a folder with {CONFIG_FILE}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return parse_draft_config(raw, str(path))


def parse_draft_config(raw: dict[str, Any], where: str = CONFIG_FILE) -> BlockDraftConfig:
    """Converts one layout's dictionary. `where` is the file named in errors."""
    keys = _Keys(raw, where)
    _refuse_what_is_not_supported(keys)
    hidden_size = keys.integer("hidden_size")
    num_heads = keys.integer("num_attention_heads")
    theta, scaling = _rope(keys)
    markov_rank = keys.integer("markov_rank", default=0, least=0)
    config = BlockDraftConfig(
        algorithm="dspark" if markov_rank else "dflash",
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
        head_dim=keys.integer("head_dim", default=hidden_size // num_heads),
        vocab_size=keys.integer("vocab_size"),
        rms_eps=keys.number("rms_norm_eps", default=1e-6),
        target_layer_ids=_layer_ids(keys),
        mask_token_id=_mask_token_id(keys),
        block_size=keys.integer("block_size"),
        sample_from_anchor=_sample_from_anchor(keys),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=keys.integer("max_position_embeddings", default=0, least=0),
        activation=_choice(keys, "hidden_act", _ACTIVATIONS, "silu"),
        use_qk_norm=_use_qk_norm(keys),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias"),
        num_target_layers=keys.integer("num_target_layers") if keys.get("num_target_layers") is not None else None,
        markov_rank=markov_rank,
        markov_head_type=_markov_head_type(keys),
        has_confidence_head=keys.flag("enable_confidence_head"),
        confidence_with_markov=keys.flag("confidence_head_with_markov"),
        target_model=keys.get("target_model"),
        raw=raw,
    )
    _check_consistency(config, where)
    return config


class _Keys:
    """Looks a key up at the top level, then inside `dflash_config`; complains with file and key."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, dict):
            raise CheckpointError(f"{where}: dflash_config: expected an object, got {nested!r}")
        self.raw = raw
        self.nested = nested
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self.raw.get(key)
        value = self.nested.get(key) if value is None else value
        return default if value is None else value

    def fault(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: {reason}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.fault(key, "absent")
        most = _MOST.get(key, _MOST_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fault(key, f"must be an integer from {least} to {most}, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fault(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, f"must be true or false, got {value!r}")
        return value


def _architecture(keys: _Keys) -> str:
    names = keys.get("architectures", [])
    return str(names[0]) if isinstance(names, list) and names else ""


def _refuse_what_is_not_supported(keys: _Keys) -> None:
    if "speculators_model_type" in keys.raw:
        raise UnsupportedModelError(
            f"{keys.where}: speculators_model_type: this layout counts layers and maps vocabularies in its own way; "
            "convert the checkpoint to the DeepSpec or z-lab layout"
        )
    family = keys.get("model_type")
    if not isinstance(family, str) or family not in _QK_NORM_BY_FAMILY:
        raise UnsupportedModelError(
            f"{keys.where}: model_type: {family!r} is not one of the supported draft layers: "
            f"{', '.join(_QK_NORM_BY_FAMILY)}"
        )
    for key, neutral in _NEUTRAL_OPTIONS.items():
        if keys.get(key) not in neutral:
            raise UnsupportedModelError(f"{keys.where}: {key}: {keys.get(key)!r} is not supported")
    layer_types = keys.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModelError(f"{keys.where}: layer_types: only full_attention is supported, got {layer_types!r}")


def _sample_from_anchor(keys: _Keys) -> bool:
    for key in ("anchor_is_first_prediction", "sample_from_anchor"):
        if keys.get(key) is not None:
            return keys.flag(key)
    name = _architecture(keys)
    if "DSpark" in name:
        return True
    if "DFlash" in name:
        return False
    raise keys.fault(
        "architectures",
        f"{name or 'absent'}: cannot tell whether the anchor row predicts; known are Qwen3DSparkModel and "
        "DFlashDraftModel; else state anchor_is_first_prediction",
    )


def _mask_token_id(keys: _Keys) -> int:
    vocab_size = keys.integer("vocab_size")
    value = keys.get("mask_token_id")
    valid = f"must be an integer from 0 to {vocab_size - 1} (the embedding rows)"
    if value is None:
        raise keys.fault("mask_token_id", f"absent; {valid}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise keys.fault("mask_token_id", f"{valid}, got {value!r}")
    return value


def _layer_ids(keys: _Keys) -> tuple[int, ...]:
    ids = keys.get("target_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise keys.fault("target_layer_ids", f"must be a non-empty list of layer numbers, got {ids!r}")
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise keys.fault("target_layer_ids", f"must hold decoder layers counted from 0, got {number!r}")
    if any(a >= b for a, b in pairwise(ids)):
        raise keys.fault("target_layer_ids", f"must rise strictly, got {ids!r}")
    return tuple(ids)


def _rope(keys: _Keys) -> tuple[float, dict[str, Any] | None]:
    """Both spellings of transformers: `rope_theta` + `rope_scaling`, or `rope_parameters` holding everything."""
    key = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    given = keys.get(key) or {}
    if not isinstance(given, dict):
        raise keys.fault(key, f"must be an object, got {given!r}")
    nested = _Keys(given, f"{keys.where}: {key}")
    theta = nested.number("rope_theta", default=keys.number("rope_theta", default=10000.0))
    scaling = {name: value for name, value in given.items() if name != "rope_theta"}
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return theta, None
    return theta, scaling


def _use_qk_norm(keys: _Keys) -> bool:
    return keys.flag("use_qk_norm", default=_QK_NORM_BY_FAMILY[keys.get("model_type")])


def _choice(keys: _Keys, key: str, allowed: dict[str, str], default: str) -> str:
    value = keys.get(key, default)
    if not isinstance(value, str) or value not in allowed:
        raise keys.fault(key, f"must be one of {', '.join(allowed)}, got {value!r}")
    return allowed[value]


def _markov_head_type(keys: _Keys) -> str:
    return _choice(keys, "markov_head_type", {name: name for name in MARKOV_HEADS}, "vanilla")


def _check_consistency(config: BlockDraftConfig, where: str) -> None:
    if config.gamma < 1:
        raise CheckpointError(f"{where}: block_size: {config.block_size} leaves no row that predicts a draft token")
    if config.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim: must be even for RoPE, got {config.head_dim}")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads: {config.num_kv_heads} does not divide {config.num_heads} attention heads"
        )
    if config.confidence_with_markov and config.has_confidence_head and not config.markov_rank:
        raise CheckpointError(f"{where}: confidence_head_with_markov: needs a Markov head, but markov_rank is 0")
