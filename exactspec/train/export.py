"""A draft as a GGUF file for llama.cpp's `draft-dspark` and `draft-dflash` (architecture `dflash`).

Conventions of that reader: `target_layers` counts the embedding as layer 0 (ours plus one: it reads a layer's input),
`block_size` is the config's own, the mask token is the tokenizer's, and embedding and LM head come from the target.
The tokenizer is copied from the target's GGUF file, with which the draft is going to run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exactspec.draft.block_model import BlockModel
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.files import write_whole
from exactspec.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

ARCHITECTURE = "dflash"
TYPES = ("f32", "f16", "q8_0")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "embed_tokens": "token_embd",
    "lm_head": "output",
}


def export_gguf(draft: str | Path, target: str, out: str | Path, weight_type: str = "f16") -> Path:
    """Writes the draft folder as a GGUF file. `target` names the target (alias or path), which must be a GGUF file.

    Raises ConfigError for a draft that the reader does not know (layers without q and k norm, other Markov heads), a
    target that is no GGUF file or not the draft's; CheckpointError for damaged files. The file is written whole or not
    at all.
    """
    if weight_type not in TYPES:
        raise ConfigError(f"weight_type: must be one of {', '.join(TYPES)}, got {weight_type!r}")
    model = load_block_model(draft)
    _check_supported(model, str(draft))
    reader = _open(_target_file(target))
    _check_target(model, reader, str(target))
    import gguf

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, ARCHITECTURE)
        _write_config(writer, model)
        _copy_tokenizer(writer, reader, model.config.mask_token_id)
        for name, tensor in model.state_dict().items():
            _write_tensor(writer, gguf_name(name), tensor, weight_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write_whole(Path(out), write)
    return Path(out)


def _check_supported(model: BlockModel, where: str) -> None:
    config = model.config
    problems = {
        "use_qk_norm": not config.use_qk_norm and "layers need q and k norms",
        "markov_head_type": config.markov_rank and config.markov_head_type != "vanilla" and "only vanilla is known",
        "attention_bias": (config.attention_bias or config.mlp_bias) and "biases are not known",
        "hidden_act": config.activation != "silu" and "only silu is known",
        "rope_scaling": config.rope_scaling is not None and "scaled RoPE is not exported",
    }
    for key, problem in problems.items():
        if problem:
            raise ConfigError(f"{where}: {key}: {problem} by llama.cpp's {ARCHITECTURE} architecture")


def _target_file(target: str) -> Path:
    from exactspec.model.hub import resolve_model

    path = resolve_model(target)
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        path = found[0] if found else path
    if path.suffix != ".gguf":
        raise ConfigError(f"target: {target} is no GGUF file; llama.cpp needs one, and the tokenizer is taken from it")
    return path


def _open(path: Path) -> GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the library checks nothing and fails somewhere
        raise CheckpointError(f"{path}: truncated, damaged or not a GGUF file ({error})") from error


def _check_target(model: BlockModel, reader: GGUFReader, target: str) -> None:
    """The exported draft uses the target's embedding: its rows and width must be the draft's."""
    wanted = [model.config.vocab_size, model.config.hidden_size]
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight" and [int(size) for size in reversed(tensor.shape)] != wanted:
            found = [int(size) for size in reversed(tensor.shape)]
            raise ConfigError(f"target: {target} has an embedding of {found}, the draft was made for one of {wanted}")


def _write_config(writer: GGUFWriter, model: BlockModel) -> None:
    config = model.config
    writer.add_name(f"draft for {config.target_model}" if config.target_model else "block draft")
    writer.add_context_length(config.max_positions or 8192)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32(f"{ARCHITECTURE}.block_size", config.block_size)
    writer.add_array(f"{ARCHITECTURE}.target_layers", [layer + 1 for layer in config.target_layer_ids])
    writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config.sample_from_anchor)
    writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", config.has_confidence_head)
    writer.add_bool(f"{ARCHITECTURE}.attention.causal", False)


def _copy_tokenizer(writer: GGUFWriter, reader: GGUFReader, mask_token_id: int) -> None:
    """All `tokenizer.*` fields of the target, and the mask token."""
    import gguf

    for name, found in reader.fields.items():
        if not name.startswith("tokenizer.") or name == gguf.Keys.Tokenizer.MASK_ID:
            continue
        kind = found.types[0]
        value: Any = found.contents()
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, value, kind, sub_type=found.types[-1])
        else:
            writer.add_key_value(name, value, kind)
    writer.add_mask_token_id(mask_token_id)


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter. Raises CheckpointError for one that has none."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, number, inner = stem.split(".", 2)
        if inner in _LAYER_NAMES:
            return f"blk.{number}.{_LAYER_NAMES[inner]}.{kind}"
    elif stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    raise CheckpointError(f"tensor {name} has no place in a {ARCHITECTURE} GGUF file")


def _write_tensor(writer: GGUFWriter, name: str, tensor: Tensor, weight_type: str) -> None:
    """Matrices in `weight_type` (q8_0 where rows allow it), vectors in float32."""
    import gguf

    array = tensor.detach().to(torch.float32).numpy()
    if array.ndim < 2 or weight_type == "f32":
        writer.add_tensor(name, array)
        return
    if weight_type == "q8_0" and array.shape[-1] % 32 == 0:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        return
    writer.add_tensor(name, array.astype("float16"))
