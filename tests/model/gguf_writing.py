"""Writes a transformers model as a GGUF file, the way llama.cpp's converter does (names, row order, folded norms)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from fakes import CHAT_TEMPLATE, SPECIAL_TOKENS, byte_tokenizer

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name: str, architecture: str) -> str:
    stem, _, kind = name.rpartition(".")
    names = GEMMA_NAMES if architecture == "gemma3" else NAMES
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{names[part]}.{kind}"


def permuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: rotary pairs side by side."""
    rows = array.shape[0]
    halves = array.reshape(num_heads, 2, rows // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.float().numpy()
        if architecture == "llama" and ".q_proj" in name:
            array = permuted(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            array = permuted(array, config.num_key_value_heads)
        if architecture == "gemma3" and "norm" in name:
            array = array + 1.0
        tensors[gguf_name(name, architecture)] = array
    return tensors


def add_metadata(writer: gguf.GGUFWriter, model: Any, architecture: str) -> None:
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture != "qwen2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The byte tokenizer of the fakes and one merged token, " t", because GGUF cannot hold an empty list of merges."""
    tokenizer = byte_tokenizer().hf
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "Ġt"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL_TOKENS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_array("tokenizer.ggml.merges", ["Ġ t"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(
    model: Any, path: Path, architecture: str = "llama", quant: str = "F32", change: Any = None, extra: Any = None,
    **options: Any,
) -> Path:  # fmt: skip
    """`change(tensors)` may edit the tensors, `extra(writer)` may add metadata; options go to GGUFWriter."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    add_metadata(writer, model, architecture)
    add_tokenizer(writer)
    tensors = tensors_of(model, architecture)
    if change:
        change(tensors)
    if extra:
        extra(writer)
    kind = gguf.GGMLQuantizationType[quant]
    for name, array in tensors.items():
        if array.ndim == 2 and quant != "F32":
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
