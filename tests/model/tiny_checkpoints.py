"""Tiny random models of each family, made and saved by transformers: the independent truth of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fakes import byte_tokenizer
from torch import Tensor

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.model.loader import load_target
from exactspec.model.target import TargetModel

SIZES: dict[str, Any] = {
    "vocab_size": 262, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "bos_token_id": 257, "eos_token_id": 258,
    "pad_token_id": 256,
}  # fmt: skip
# name -> (model_type, changes): each family with the options that tell it apart
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 upper layers local": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 bias": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {
        "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40},
    "yarn, odd settings": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40,
        "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3, "truncate": False,
    },
}  # fmt: skip


def hf_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in float32. Its norms and biases are random too: fresh ones are 1 and 0 and hide faults."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed" in name else 0.15))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The folder a user would have: config, safetensors, tokenizer."""
    model.save_pretrained(folder, **options)
    byte_tokenizer().hf.save_pretrained(folder)
    return folder


def load(folder: Path | str, **options: Any) -> TargetModel:
    return TargetModel(TorchBackend("cpu"), load_target(str(folder), **options))


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[len(token_ids), V] of transformers' whole-sequence forward."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
