"""What a loaded target consists of: weights in the family-neutral layout, its tokenizer and its end tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactspec.backend.base import LayerWeights
from exactspec.model.config import ModelConfig

if TYPE_CHECKING:
    from exactspec.text.tokenizer import Tokenizer


@dataclass
class ModelWeights:
    """All weights of a target. Linear weights and the embedding in the model dtype, norms and biases float32."""

    embed: Tensor  # [V, H]
    layers: list[LayerWeights]
    final_norm: Tensor  # [H] float32, offset folded in
    lm_head: Tensor  # [V, H]; the same tensor object as `embed` when tied

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype


@dataclass
class LoadedTarget:
    """A target as it comes from disk, before any device has prepared it.

    `name` is what the user asked for. `eos_ids` is the union of the config's, the generation config's and the
    tokenizer's. `generation_defaults` holds the sampling fields of generation_config.json, for chat use only.
    """

    name: str
    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # file or folder that was read
    num_shards: int = 1  # over 1: `weights.layers` are one rank's parts (backend/parallel.py)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    def release_layers(self) -> None:
        """Drop this object's hold on the layers, once a backend has packed its own copy of them."""
        self.weights.layers = []
