"""RoPE frequencies and tables, computed as transformers does (float32, rotate-half)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from exactspec.backend.base import RopeTable
from exactspec.errors import UnsupportedModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """Angles of one kind of layer: position * inv_freq. Every float is a float32 value, so the spec is exact.

    `attention_factor` multiplies cos and sin (yarn's mscale, YaRN paper section 3.4; 1.0 elsewhere).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def is_finite(self) -> bool:
        """False after parameters such as a factor of 0, which nothing before refuses."""
        return all(math.isfinite(value) for value in (*self.inv_freq, self.attention_factor))

    def table(self, num_positions: int, device: torch.device | str = "cpu") -> RopeTable:
        """cos and sin for positions 0 .. num_positions - 1, float32 [num_positions, rotary_dim // 2]."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq[None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return RopeTable(cos.to(device), sin.to(device))


def rope_spec(hf_config: Any, layer_type: str | None = None) -> RopeSpec:
    """The frequencies of a transformers config; `layer_type` picks one where they differ by layer (Gemma 3).

    The scalings are transformers' own functions, so that they agree to the bit. Dynamic NTK changes its base with
    the length of the sequence beyond `max_position_embeddings`, so a token's K would depend on what follows
    it: only lengths up to that maximum, where it equals the default, are served (see ModelConfig.max_context).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    params = rope_parameters(hf_config, layer_type)
    kind = params.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor {params['partial_rotary_factor']} is not supported; only full rotation (1.0) is"
        )
    if kind in ("default", "dynamic"):
        return default_rope(params["rope_theta"], head_dim_of(hf_config))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, device=torch.device("cpu"), layer_type=layer_type)
    return RopeSpec(tuple(inv_freq.tolist()), float(factor))


def default_rope(theta: float, head_dim: int) -> RopeSpec:
    """RoFormer, section 3.2.2: theta ** (-2i / head_dim)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return RopeSpec(tuple((1.0 / (theta**exponent)).tolist()))


def rope_parameters(hf_config: Any, layer_type: str | None = None) -> dict[str, Any]:
    """The (already standardised) rope_parameters of a transformers 5 config."""
    params = getattr(hf_config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10_000.0}
    return params[layer_type] if layer_type is not None else params


def head_dim_of(hf_config: Any) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
