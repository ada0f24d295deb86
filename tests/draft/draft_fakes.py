"""Tiny drafts in the published layouts, running requests, and a slow reference of the draft network.

The reference is written from the papers' formulas, one block and one head at a time, float32, no paging, and shares
no code with the product.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exactspec.types import Request, RunningRequest, SamplingParams


def draft_config(**changes: Any) -> dict[str, Any]:
    """config.json for the tiny target of tests/fakes.py, in this project's own layout."""
    config: dict[str, Any] = {
        "architectures": ["LlamaDSparkModel"], "model_type": "llama", "block_size": 5, "mask_token_id": 259,
        "anchor_is_first_prediction": True, "target_layer_ids": [0, 1], "num_target_layers": 3, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 262, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def flat(config: dict[str, Any], key: str, default: Any = None) -> Any:
    value = config.get(key, config.get("dflash_config", {}).get(key))
    return default if value is None else value


def draft_tensors(config: dict[str, Any], seed: int = 0, std: float = 0.3) -> dict[str, Tensor]:
    """Random weights for every tensor that the layout has, by published name."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, rank = config["head_dim"], flat(config, "markov_rank", 0)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(flat(config, "target_layer_ids"))),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    biased = config.get("attention_bias", False)
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        for name, out, inside in (
            ("q", heads * head_dim, hidden), ("k", kv_heads * head_dim, hidden), ("v", kv_heads * head_dim, hidden),
            ("o", hidden, heads * head_dim),
        ):  # fmt: skip
            shapes[at + f"self_attn.{name}_proj.weight"] = (out, inside)
            if biased:
                shapes[at + f"self_attn.{name}_proj.bias"] = (out,)
        if config.get("use_qk_norm", config["model_type"] == "qwen3"):
            shapes |= {at + "self_attn.q_norm.weight": (head_dim,), at + "self_attn.k_norm.weight": (head_dim,)}
        shapes |= {at + f"mlp.{name}_proj.weight": (inter, hidden) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (hidden, inter)
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (vocab, rank)}
        kind = flat(config, "markov_head_type")
        if kind == "gated":
            shapes |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if kind == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden)}
            shapes |= {"markov_head.joint_proj.bias": (3 * rank,)}
    if flat(config, "enable_confidence_head", False):
        width = hidden + (rank if flat(config, "confidence_head_with_markov", False) else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * value if "norm" in name else value * (1.0 if "markov_w" in name else std)
    return tensors


def write_draft(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = draft_tensors(config) if tensors is None else tensors
    save_file({name: value.to(dtype).contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def running(
    token_ids: list[int], prompt_len: int | None = None, request_id: str = "r", seed: int = 7, max_new: int = 64,
    **params: Any,
) -> RunningRequest:  # fmt: skip
    """A decoding request between steps: the last token is the anchor."""
    prompt_len = len(token_ids) - 1 if prompt_len is None else prompt_len
    params.setdefault("temperature", 0.0)
    request = Request(request_id, tuple(token_ids[:prompt_len]), SamplingParams(max_new_tokens=max_new, **params), seed)
    return RunningRequest(
        request, list(token_ids), kv_len=len(token_ids) - 1, max_tokens=prompt_len + max_new,
    )  # fmt: skip


# The slow reference -------------------------------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _turn(x: Tensor, positions: list[int], theta: float) -> Tensor:
    """RoPE of vectors [P, D] at their positions: pair (i, i + D/2) turns by position * theta ** (-2i / D)."""
    half = x.shape[1] // 2
    angles = torch.tensor([[p * theta ** (-i / half) for i in range(half)] for p in positions])
    c, s = angles.cos(), angles.sin()
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * c - second * s, second * c + first * s], dim=1)


def reference_hidden(
    w: dict[str, Tensor], config: dict[str, Any], features: Tensor, block: Tensor, start: int
) -> Tensor:
    """One block: features [a, K*H] of positions 0..a-1 with a = start, block embeddings [n, H] -> normed [n, H]."""
    eps, theta, head_dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    context = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = block

    def project(rows: Tensor, name: str, at: str) -> Tensor:
        bias = w.get(f"{at}self_attn.{name}_proj.bias")
        out = rows @ w[f"{at}self_attn.{name}_proj.weight"].T
        return out if bias is None else out + bias

    def of_head(rows: Tensor, head: int, positions: list[int], norm: str, at: str) -> Tensor:
        part = rows[:, head * head_dim : (head + 1) * head_dim]
        weight = w.get(f"{at}self_attn.{norm}.weight")
        return _turn(part if weight is None else _norm(part, weight, eps), positions, theta)

    block_at = list(range(start, start + len(block)))
    all_at = list(range(start)) + block_at
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        rows = _norm(x, w[at + "input_layernorm.weight"], eps)
        both = torch.cat([context, rows])
        q, k, v = project(rows, "q", at), project(both, "k", at), project(both, "v", at)
        mixed = torch.zeros(len(rows), heads * head_dim)
        for h in range(heads):
            g = h // (heads // kv_heads)
            queries, keys = of_head(q, h, block_at, "q_norm", at), of_head(k, g, all_at, "k_norm", at)
            weights = torch.softmax(queries @ keys.T / math.sqrt(head_dim), dim=1)
            mixed[:, h * head_dim : (h + 1) * head_dim] = weights @ v[:, g * head_dim : (g + 1) * head_dim]
        x = x + project(mixed, "o", at)
        rows = _norm(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = rows @ w[at + "mlp.gate_proj.weight"].T, rows @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return _norm(x, w["norm.weight"], eps)


def reference_chain(
    w: dict[str, Tensor], config: dict[str, Any], hidden: Tensor, base: Tensor, anchor: int
) -> tuple[list[int], list[float] | None]:
    """Greedy left-to-right draft of the predicting rows: hidden [G, H], base [G, V]. Returns tokens, confidences."""
    rank, kind = flat(config, "markov_rank", 0), flat(config, "markov_head_type")
    before, tokens, confidences = anchor, [], []
    state = torch.zeros(rank)
    for k in range(len(hidden)):
        logits, previous = base[k], torch.zeros(0)
        if rank:
            previous = w["markov_head.markov_w1.weight"][before]
            latent = previous
            if kind == "gated":
                inputs = torch.cat([hidden[k], previous])
                z = w["markov_head.gate_proj.weight"] @ inputs + w["markov_head.gate_proj.bias"]
                latent = torch.sigmoid(z) * previous
            if kind == "rnn":
                inputs = torch.cat([state, previous, hidden[k]])
                z = w["markov_head.joint_proj.weight"] @ inputs + w["markov_head.joint_proj.bias"]
                keep = torch.sigmoid(z[:rank])
                state = keep * state + (1 - keep) * torch.tanh(z[rank : 2 * rank])
                latent = torch.tanh(z[2 * rank :])
            logits = logits + w["markov_head.markov_w2.weight"] @ latent
        if "confidence_head.proj.weight" in w:
            with_markov = flat(config, "confidence_head_with_markov", False)
            inputs = torch.cat([hidden[k], previous]) if with_markov else hidden[k]
            z = w["confidence_head.proj.weight"][0] @ inputs + w["confidence_head.proj.bias"][0]
            confidences.append(float(torch.sigmoid(z)))
        before = int(logits.argmax())
        tokens.append(before)
    return tokens, confidences or None
