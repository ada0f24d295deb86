"""Opens a GGUF file (or the parts of a split one) as a Checkpoint: config, tensor names, RoPE layout, tokenizer."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.errors import CheckpointError, ExactSpecError, UnsupportedModelError
from exactspec.model.checkpoint import Checkpoint
from exactspec.model.gguf_file import GGUFFile

# GGUF architecture -> transformers model_type. Mistral is written as llama.
MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NORMS = {"ffn_norm": "post_attention_layernorm"}
_BLOCK_NORMS_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_ROPE_FACTORS = "rope_freqs.weight"
# keys of "ARCHITECTURE." that are read below ...
_READ_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "block_count", "context_length", "embedding_length", "feed_forward_length", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_READ_KEYS_OF = {
    "gemma3": {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"},
    "mistral": {"attention.sliding_window"},
}
# ... and that say nothing about the logits of these architectures
_IDLE_KEYS = {
    "attention.layer_norm_epsilon", "expert_used_count", "pooling_type", "rope.scaling.finetuned",
    "tensor_data_layout", "vocab_size",
}  # fmt: skip


class GGUFTensors:
    """Tensors under transformers' names, dequantised to float32 when read, rows of q and k in transformers' order."""

    def __init__(self, files: list[GGUFFile]) -> None:
        self.metadata = files[0].metadata
        self.architecture = self.metadata.get("general.architecture", "")
        if not isinstance(self.architecture, str):
            where = f"{files[0].path}: metadata general.architecture"
            raise CheckpointError(f"{where}: must be a string, got {self.architecture!r:.80}")
        self._where: dict[str, tuple[GGUFFile, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rope_factors: tuple[float, ...] = ()
        for file in files:
            self._add(file)

    def _add(self, file: GGUFFile) -> None:
        for name, info in file.tensors.items():
            if name == _ROPE_FACTORS:
                self.rope_factors = tuple(file.read(name).tolist())
                continue
            hf_name = transformers_name(name, self.architecture)
            self._where[hf_name] = (file, name)
            self.shapes[hf_name] = info.shape

    def read(self, hf_name: str) -> Tensor:
        file, name = self._where[hf_name]
        tensor = file.read(name)
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
        if heads is None or self.architecture not in ("llama", "mistral"):
            return tensor
        return unpermute(tensor, first(self.metadata[f"{self.architecture}.{heads}"]))

    @property
    def float_dtype(self) -> torch.dtype:
        """The file's own float type; bfloat16 where matrices are quantised."""
        types = {f.type_name(n) for f, n in self._where.values() if len(f.tensors[n].shape) > 1}
        if types <= {"F32"}:
            return torch.float32
        return torch.float16 if types <= {"F32", "F16"} else torch.bfloat16


def unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Undoes llama.cpp's order of q and k rows: it pairs rotary dimensions (2i, 2i + 1), transformers (i, i + D/2)."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def transformers_name(name: str, architecture: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays, and is reported later."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    table = _BLOCK | (_BLOCK_NORMS_GEMMA if architecture.startswith("gemma") else _BLOCK_NORMS)
    if match is None or match.group(2) not in table:
        return name
    return f"model.layers.{match.group(1)}.{table[match.group(2)]}.{kind}"


def open_gguf(path: Path) -> Checkpoint:
    """Reads the headers of a GGUF file and of its other parts. Raises CheckpointError or UnsupportedModelError."""
    from exactspec.model.gguf_tokenizer import make_hf_tokenizer

    files = [GGUFFile(part) for part in _parts(path)]
    tensors = GGUFTensors(files)
    metadata = tensors.metadata
    count = metadata.get("split.count", 1)
    if count not in (0, len(files)):
        raise CheckpointError(f"{path}: a part of {count} files, but {len(files)} are at hand")
    try:
        hf_config = _hf_config(path, tensors)
    except ExactSpecError:
        raise
    except Exception as error:  # transformers' checks of faulty values raise many kinds
        raise CheckpointError(f"{path}: metadata: {error}") from error
    eos = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    return Checkpoint(
        where=str(path),
        hf_config=hf_config,
        shapes=tensors.shapes,
        read=tensors.read,
        float_dtype=tensors.float_dtype,
        make_tokenizer=lambda: make_hf_tokenizer(metadata, str(path)),
        eos_ids=frozenset(i for i in eos if i is not None),
        norms_folded=True,
        rope_factors=tensors.rope_factors,
    )


def _parts(path: Path) -> list[Path]:
    """All parts of a file named NAME-00001-of-00004.gguf, in order; else the file itself."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    total = int(match.group(3))
    parts = [path.with_name(f"{match.group(1)}-{i:05d}-of-{total:05d}.gguf") for i in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: part of a split GGUF, missing: {', '.join(missing)}")
    return parts


def first(value: Any) -> int:
    """A count that some files give per layer; they must agree."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"layers with different head counts are not supported: {value}")
        return int(value[0])
    return int(value)


def _hf_config(path: Path, tensors: GGUFTensors) -> Any:
    """A transformers config from llama.cpp's metadata keys."""
    from transformers import CONFIG_MAPPING

    architecture, metadata = tensors.architecture, tensors.metadata
    if architecture not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(MODEL_TYPES)}"
        )

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{path}: metadata {architecture}.{key} is missing")
        return found

    if metadata.get(f"{architecture}.expert_count"):
        raise UnsupportedModelError(f"{path}: {architecture}.expert_count: mixtures of experts are not supported")
    if "model.embed_tokens.weight" not in tensors.shapes:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    heads, hidden = first(value("attention.head_count")), value("embedding_length")
    fields: dict[str, Any] = {
        "vocab_size": tensors.shapes["model.embed_tokens.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": first(value("feed_forward_length")),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": first(value("attention.head_count_kv", heads)),
        "head_dim": value("attention.key_length", hidden // heads),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors.shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    fields |= _family_fields(architecture, metadata, tensors, fields)
    _refuse_keys(path, architecture, metadata, fields)
    return CONFIG_MAPPING[MODEL_TYPES[architecture]](**fields)


def _refuse_keys(path: Path, architecture: str, metadata: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises UnsupportedModelError for a key that nothing here reads, unless its value changes no number."""
    known = _READ_KEYS | _READ_KEYS_OF.get(architecture, set()) | _IDLE_KEYS
    neutral = _neutral_values(metadata.get(f"{architecture}.rope.scaling.type"), fields)
    for full_key, value in metadata.items():
        key = full_key.removeprefix(f"{architecture}.")
        if key == full_key or key in known:
            continue
        number = value if isinstance(value, int | float) else math.nan
        if key == "attention.sliding_window" and number >= fields["max_position_embeddings"]:
            continue  # it hides nothing
        if key == "rope.scaling.yarn_ext_factor" and number < 0:
            continue  # llama.cpp's "not set"
        if not any(_same(value, same) for same in neutral.get(key, (0,))):
            raise UnsupportedModelError(f"{path}: metadata {full_key}={value!r:.80} is not supported")


def _neutral_values(rope_kind: Any, fields: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Values of keys that mean what is done anyway; of any other key 0 (off) does.

    llama.cpp multiplies its attention factors with yarn's own, while converters copy transformers'
    attention_factor (which replaces it) into them: only 1 means the same to all.
    """
    head_dim = fields["head_dim"]
    same_as_head = ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa")
    rotated = ("rope.dimension_count", "rope.dimension_count_swa")
    return dict.fromkeys((*same_as_head, *rotated), (head_dim,)) | {
        "attention.causal": (1,),
        "attention.scale": (0, float(fields.get("query_pre_attn_scalar", head_dim)) ** -0.5),
        "logit_scale": (0, 1),
        "rope.scaling.attn_factor": (1,),
        "rope.scaling.yarn_attn_factor": (1,),
        "rope.scaling.yarn_ext_factor": (1,) if rope_kind == "yarn" else (0,),
    }


def _same(value: Any, neutral: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, neutral, rel_tol=1e-6)  # values are float32


def _layer_types(pattern: Any, num_layers: int) -> list[str]:
    """llama.cpp's pattern: every n-th layer is global (0: none), or for each layer whether it is local."""
    if isinstance(pattern, list):
        local = [bool(entry) for entry in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        local = [pattern == 0 or (i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        raise CheckpointError(f"gemma3.attention.sliding_window_pattern: must be an integer >= 0, got {pattern!r}")
    return ["sliding_attention" if entry else "full_attention" for entry in local]


def _family_fields(
    architecture: str, metadata: dict[str, Any], tensors: GGUFTensors, fields: dict[str, Any]
) -> dict[str, Any]:
    rope = _rope_parameters(architecture, metadata)
    bias = "model.layers.0.self_attn.q_proj.bias" in tensors.shapes
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if architecture == "gemma3":
        # most files leave these out: the local base and the pattern of six; and all of them the 27B's query scale
        local = metadata.get("gemma3.rope.freq_base_swa", 10_000.0)
        is_27b = fields["num_hidden_layers"] == 62
        return {
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
            "sliding_window": window,
            "layer_types": _layer_types(
                metadata.get("gemma3.attention.sliding_window_pattern", 6), fields["num_hidden_layers"]
            ),
            "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
            if is_27b
            else fields["head_dim"],
        }
    if architecture == "mistral":
        return {"rope_parameters": rope, "sliding_window": window or None}
    if architecture == "llama":
        mlp_bias = "model.layers.0.mlp.gate_proj.bias" in tensors.shapes
        return {"rope_parameters": rope, "attention_bias": bias, "mlp_bias": mlp_bias}
    return {"rope_parameters": rope} | ({"attention_bias": bias} if architecture == "qwen3" else {})


def _rope_parameters(architecture: str, metadata: dict[str, Any]) -> dict[str, Any]:
    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.rope.{key}", default)

    def positive(key: str, default: Any) -> Any:
        number = value(key, default)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
            raise CheckpointError(f"{architecture}.rope.{key}: must be a positive number, got {number!r:.80}")
        return number

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positive("freq_base", 10_000.0)}
    kind = value("scaling.type", "linear")
    factor_key = "scaling.factor" if value("scaling.factor") is not None else "scale_linear"
    factor = positive(factor_key, 1.0) if value(factor_key) != 0 else 1.0  # 0 is "not set"
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "beta_fast": positive("scaling.yarn_beta_fast", 32.0)}
        rope |= {"beta_slow": positive("scaling.yarn_beta_slow", 1.0)}
        trained = metadata.get(f"{architecture}.context_length")
        rope |= {"original_max_position_embeddings": positive("scaling.original_context_length", trained)}
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    elif kind != "none":
        raise UnsupportedModelError(f"{architecture}.rope.scaling.type {kind!r} is not supported")
    return rope
