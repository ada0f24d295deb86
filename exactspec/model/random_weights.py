"""Targets of published shapes with random weights, made on the device: for speed, not for sense.

A name of SHAPES or the path of a transformers config.json gives the shape. The tokenizer reads text as bytes; use
prompts of token ids, `ignore_eos` and, to set the accepted length of a draft, `simulate_accept_length`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.backend.base import LayerWeights
from exactspec.errors import ConfigError
from exactspec.model.config import ModelConfig, from_hf_config
from exactspec.model.weights import LoadedTarget, ModelWeights
from exactspec.text.tokenizer import Tokenizer

# The published config.json files, reduced to what decides the shape.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip


def random_target(
    shape: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    context_length: int | None = None,
    seed: int = 0,
    num_layers: int | None = None,
) -> LoadedTarget:
    """A LoadedTarget of a published shape; num_layers shortens it. Raises ConfigError for an unknown name."""
    config = shape_config(shape, context_length, num_layers)
    generator = torch.Generator(device=device).manual_seed(seed)
    make = _Maker(generator, dtype, torch.device(device))
    embed = make.matrix(config.vocab_size, config.hidden_size, None if config.tied else 1.0)
    head = embed if config.tied else make.matrix(config.vocab_size, config.hidden_size)
    layers = [_layer(config, make) for _ in range(config.num_layers)]
    weights = ModelWeights(embed, layers, make.ones(config.hidden_size), head)
    tokenizer = byte_tokenizer(config.vocab_size)
    return LoadedTarget(f"random:{shape}", config, weights, tokenizer, frozenset(), source="random weights")


def shape_config(shape: str, context_length: int | None = None, num_layers: int | None = None) -> ModelConfig:
    """The ModelConfig of a name of SHAPES or of a config.json."""
    from transformers import AutoConfig

    if shape in SHAPES:
        fields = dict(SHAPES[shape])
    else:
        path = Path(shape)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"random weights: {shape!r} is neither a file nor one of {', '.join(sorted(SHAPES))}")
        fields = json.loads(path.read_text(encoding="utf-8"))
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
        fields.pop("layer_types", None)
    return from_hf_config(AutoConfig.for_model(fields.pop("model_type"), **fields), context_length)


class _Maker:
    """Random tensors on a device; rows of a matrix keep the variance of their input."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> None:
        self.generator, self.dtype, self.device = generator, dtype, device

    def matrix(self, out: int, into: int, scale: float | None = None) -> Tensor:
        values = torch.empty((out, into), dtype=self.dtype, device=self.device)
        return values.normal_(0.0, into**-0.5 if scale is None else scale, generator=self.generator)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, device=self.device)

    def maybe(self, wanted: bool, size: int, value: float) -> Tensor | None:
        return torch.full((size,), value, device=self.device) if wanted else None


def _layer(config: ModelConfig, make: _Maker) -> LayerWeights:
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size = config.num_heads * head_dim
    width = q_size + 2 * config.num_kv_heads * head_dim
    return LayerWeights(
        input_norm=make.ones(hidden),
        qkv=make.matrix(width, hidden),
        o=make.matrix(hidden, q_size),
        mlp_norm=make.ones(hidden),
        gate_up=make.matrix(2 * inter, hidden),
        down=make.matrix(hidden, inter),
        qkv_bias=make.maybe(config.qkv_bias, width, 0.0),
        o_bias=make.maybe(config.o_bias, hidden, 0.0),
        gate_up_bias=make.maybe(config.mlp_bias, 2 * inter, 0.0),
        down_bias=make.maybe(config.mlp_bias, hidden, 0.0),
        q_norm=make.maybe(config.qk_norm, head_dim, 1.0),
        k_norm=make.maybe(config.qk_norm, head_dim, 1.0),
        post_attention_norm=make.maybe(config.post_norms, hidden, 1.0),
        post_mlp_norm=make.maybe(config.post_norms, hidden, 1.0),
    )


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per byte, no merges, one end token that random weights are not asked to respect, and a token for every
    logit beyond: what is drawn is drawn from them all, as with a real tokenizer."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    tokens += [f"<{i}>" for i in range(len(tokens), vocab_size)]
    rust = RustTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<end>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>")
    hf.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return Tokenizer(hf)
