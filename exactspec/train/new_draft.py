"""A fresh draft network for a target: its config in the published layout, and its first weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exactspec.draft.block_model import BlockModel
from exactspec.draft.config import parse_draft_config
from exactspec.errors import ConfigError
from exactspec.model.weights import LoadedTarget
from exactspec.train.options import Recipe

_NUM_FEATURE_LAYERS = 5
_INIT_STD = 0.02
_MARKOV_STD = 0.5


def draft_config(loaded: LoadedTarget, recipe: Recipe, mask_token_id: int | None = None) -> dict[str, Any]:
    """config.json of the draft: DeepSpec's layout where the anchor row predicts, z-lab's where it does not.

    Sizes are the target's own (heads, MLP), layers Qwen3-style with q and k norms.
    """
    target = loaded.config
    rope = target.ropes[0]
    layers = list(recipe.target_layer_ids or spread_layers(target.num_layers))
    mask = choose_mask_token(loaded) if mask_token_id is None else mask_token_id
    config: dict[str, Any] = {
        "architectures": [recipe.architecture],
        "model_type": "qwen3",
        "block_size": recipe.block_rows,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_eps,
        "rope_theta": _theta_of(rope.inv_freq, target.head_dim),
        "max_position_embeddings": target.max_context,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * recipe.num_layers,
        "num_target_layers": target.num_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "target_model": loaded.name,
    }
    if recipe.sample_from_anchor:
        config |= {
            "mask_token_id": mask,
            "target_layer_ids": layers,
            "num_anchors": recipe.num_anchors,
            "markov_rank": recipe.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": recipe.confidence_head,
            "confidence_head_with_markov": recipe.confidence_head,
        }
    else:
        config["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": layers}
    return config


def _theta_of(inv_freq: tuple[float, ...], head_dim: int) -> float:
    """The base of plain RoPE. A target with scaled RoPE lends its draft the base of its fastest two frequencies."""
    return float(round((inv_freq[0] / inv_freq[1]) ** (head_dim / 2)))


def spread_layers(num_layers: int, count: int = _NUM_FEATURE_LAYERS) -> list[int]:
    """Up to `count` layers from 1 to num_layers - 2, evenly spread (0 .. where the target is tiny)."""
    first, last = min(1, num_layers - 2), num_layers - 2
    if last < 0:
        raise ConfigError("target: one layer only: a draft reads inner layers, the last one not among them")
    count = min(count, last - first + 1)
    return sorted({round(first + i * (last - first) / max(1, count - 1) - 1e-9) for i in range(count)})


def choose_mask_token(loaded: LoadedTarget) -> int:
    """A padded embedding row if there is one, else the highest special token that neither ends a text nor stands in
    the chat template. Raises ConfigError asking for mask_token_id where there is none."""
    tokenizer, vocab_size = loaded.tokenizer, loaded.config.vocab_size
    if tokenizer.vocab_size < vocab_size:
        return tokenizer.vocab_size
    template = str(getattr(tokenizer.hf, "chat_template", "") or "")
    avoid = {*loaded.eos_ids, tokenizer.bos_id, tokenizer.hf.pad_token_id, tokenizer.hf.unk_token_id}
    for token_id in range(vocab_size - 1, -1, -1):
        if tokenizer.is_special(token_id) and token_id not in avoid:
            text = tokenizer.hf.convert_ids_to_tokens(token_id)
            if text and text not in template:
                return token_id
    raise ConfigError("mask_token_id: the tokenizer has no spare special token; name one that texts do not use")


@torch.no_grad()
def new_block_model(config: dict[str, Any], embedding: Tensor, seed: int) -> BlockModel:
    """A BlockModel, float32 on the CPU, with first weights drawn from `seed`. `embedding` [V, H] is the target's."""
    model = BlockModel(parse_draft_config(config))
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.dim() == 2:
            param.normal_(0.0, _INIT_STD, generator=generator)
        elif name.endswith(".bias"):
            param.zero_()
    if model.markov_head is not None:
        model.markov_head.markov_w1.weight.copy_(_principal_columns(embedding, model.markov_head.rank, generator))
        nn.init.zeros_(model.markov_head.markov_w2.weight)
    if model.confidence_head is not None:
        nn.init.zeros_(model.confidence_head.proj.weight)
    return model


def _principal_columns(embedding: Tensor, rank: int, generator: torch.Generator) -> Tensor:
    """The first `rank` principal components of the embedding rows, each column scaled to std 0.5 (noise beyond H)."""
    rows = embedding.detach().float().cpu()
    centred = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh(centred.t() @ centred)
    columns = centred @ vectors.flip(1)[:, :rank]
    if columns.shape[1] < rank:
        spare = torch.randn(rows.shape[0], rank - columns.shape[1], generator=generator)
        columns = torch.cat([columns, spare], dim=1)
    return columns / columns.std(0).clamp(min=1e-6) * _MARKOV_STD
