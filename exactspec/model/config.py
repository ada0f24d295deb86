"""The frozen description of a target: derived once from a transformers config, then the only truth about shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from exactspec.backend.base import RopeTable, StackSpec
from exactspec.errors import CheckpointError, ConfigError, UnsupportedModelError
from exactspec.model.rope import RopeSpec, head_dim_of, rope_parameters, rope_spec

# transformers' model_type -> architecture; everything else is refused by name
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
SUPPORTED = (
    "LlamaForCausalLM (Llama 2/3, SmolLM2), MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
    "Gemma3ForCausalLM (text only)"
)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# A draft block may look a few positions past the last token of the context.
ROPE_SLACK = 64


@dataclass(frozen=True)
class ModelConfig:
    """Family-neutral description of a decoder. Sizes in elements, contexts in tokens.

    `vocab_size` is the number of embedding rows; a tokenizer may know fewer ids (padded vocabulary).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    activation: str  # "silu" | "gelu_tanh"
    attention_scale: float
    windows: tuple[int | None, ...]  # per layer
    rope_index: tuple[int, ...]  # per layer, into `ropes`
    ropes: tuple[RopeSpec, ...]
    max_context: int  # most positions the RoPE is right for
    context_length: int  # most tokens a request may have, <= max_context
    tied: bool = False  # LM head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False  # checkpoint stores w of (1 + w): Gemma
    post_norms: bool = False  # norms of the branches before the residual addition: Gemma
    embed_scale: float = 1.0
    rope_type: str = "default"

    def stack_spec(self) -> StackSpec:
        return StackSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_eps=self.rms_eps,
            activation=self.activation,
            attention_scale=self.attention_scale,
            windows=self.windows,
            rope_index=self.rope_index,
        )

    def rope_tables(self, device: torch.device | str = "cpu") -> list[RopeTable]:
        """One table per entry of `ropes`, float32 [context_length + ROPE_SLACK, head_dim // 2]."""
        return [rope.table(self.context_length + ROPE_SLACK, device) for rope in self.ropes]


def from_hf_config(hf_config: Any, context_length: int | None = None) -> ModelConfig:
    """ModelConfig of a transformers config. Raises UnsupportedModelError for what no native implementation covers."""
    architecture = architecture_of(hf_config)
    _refuse_options(hf_config, architecture)
    _check_sizes(hf_config)
    layer_types = _layer_types(hf_config, architecture)
    is_gemma = architecture == "Gemma3ForCausalLM"
    kinds: list[str | None] = (
        [*sorted(set(layer_types))] if is_gemma else [None]
    )  # only Gemma has a RoPE per kind of layer
    max_context = _max_context(hf_config, kinds)
    head_dim = head_dim_of(hf_config)
    attention_bias = bool(getattr(hf_config, "attention_bias", False))
    scale_base = hf_config.query_pre_attn_scalar if is_gemma else head_dim
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        rms_eps=float(hf_config.rms_norm_eps),
        activation=ACTIVATIONS[_activation(hf_config, architecture)],
        attention_scale=float(scale_base) ** -0.5,
        windows=tuple(hf_config.sliding_window if t == "sliding_attention" else None for t in layer_types),
        rope_index=tuple(kinds.index(t) if is_gemma else 0 for t in layer_types),
        ropes=tuple(_rope(hf_config, kind) for kind in kinds),
        max_context=max_context,
        context_length=_context_length(context_length, max_context, hf_config),
        tied=bool(hf_config.tie_word_embeddings),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        norm_offset=is_gemma,
        post_norms=is_gemma,
        embed_scale=float(hf_config.hidden_size) ** 0.5 if is_gemma else 1.0,
        rope_type=",".join(rope_parameters(hf_config, kind).get("rope_type", "default") for kind in kinds),
    )


def _rope(hf_config: Any, kind: str | None) -> RopeSpec:
    rope = rope_spec(hf_config, kind)
    if not rope.is_finite:
        raise CheckpointError(f"rope_parameters: {rope_parameters(hf_config, kind)!r} gives infinite frequencies")
    return rope


def architecture_of(hf_config: Any) -> str:
    """The supported architecture of a config, or UnsupportedModelError."""
    named = (getattr(hf_config, "architectures", None) or [None])[0]
    model_type = getattr(hf_config, "model_type", None)
    expected = ARCHITECTURES.get(str(model_type))
    if expected is None or named not in (None, expected):
        raise UnsupportedModelError(f"architecture {named or model_type} is not supported; supported: {SUPPORTED}")
    return expected


def _activation(hf_config: Any, architecture: str) -> str:
    field = "hidden_activation" if architecture == "Gemma3ForCausalLM" else "hidden_act"  # each reads only its own
    name = getattr(hf_config, field, None)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{field} {name!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}")
    return str(name)


def _refuse_options(hf_config: Any, architecture: str) -> None:
    """Options that would change the numbers and that no code here honours."""
    refused = {
        "final_logit_softcapping": "softcapping of logits",
        "attn_logit_softcapping": "softcapping of attention scores",
        "use_bidirectional_attention": "bidirectional attention",
        "quantization_config": "weights quantised by this method (use a GGUF file or an unquantised checkpoint)",
        "num_experts": "mixtures of experts",
        "num_local_experts": "mixtures of experts",
    }
    for name, what in refused.items():
        if getattr(hf_config, name, None):
            raise UnsupportedModelError(f"{name}={getattr(hf_config, name)!r}: {what} not supported for {architecture}")


def _check_sizes(hf_config: Any) -> None:
    most = {"num_hidden_layers": 10_000}  # more is a mistake, and listing their tensors would take for ever
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    ):  # fmt: skip
        size, limit = getattr(hf_config, name, None), most.get(name, 2**31)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= limit:
            raise CheckpointError(f"{name}: must be an integer from 1 to {limit}, got {size!r}")
    if not 0 < hf_config.rms_norm_eps < math.inf:
        raise CheckpointError(f"rms_norm_eps: must be a positive number, got {hf_config.rms_norm_eps!r}")
    heads, kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
    if kv_heads is None or kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if head_dim_of(hf_config) % 2:
        raise CheckpointError(f"head_dim {head_dim_of(hf_config)} is odd: rotary embeddings need an even one")


def _layer_types(hf_config: Any, architecture: str) -> list[str]:
    """ "full_attention" or "sliding_attention" for each layer."""
    num_layers = hf_config.num_hidden_layers
    if architecture == "LlamaForCausalLM":
        return ["full_attention"] * num_layers  # whatever layer_types says: transformers' Llama never reads it
    if architecture == "MistralForCausalLM":
        if hf_config.sliding_window is None:
            return ["full_attention"] * num_layers
        _check_window(hf_config)
        return ["sliding_attention"] * num_layers
    layer_types = list(getattr(hf_config, "layer_types", None) or ["full_attention"] * num_layers)
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types has {len(layer_types)} entries, expected num_hidden_layers = {num_layers}")
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {sorted(unknown)} not supported; supported: full_attention, sliding_attention"
        )
    if "sliding_attention" in layer_types:
        if not hf_config.sliding_window:
            raise CheckpointError("layer_types holds sliding_attention, but sliding_window is not set")
        _check_window(hf_config)
    return layer_types


def _check_window(hf_config: Any) -> None:
    window = hf_config.sliding_window
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"sliding_window: must be an integer >= 1 or null, got {window!r}")


def _max_context(hf_config: Any, kinds: list[Any]) -> int:
    """max_position_embeddings; yarn configs often keep the original length there and scale it by `factor`."""
    longest = int(hf_config.max_position_embeddings)
    for kind in kinds:
        params = rope_parameters(hf_config, kind)
        if params.get("rope_type") == "yarn" and params.get("factor"):
            original = params.get("original_max_position_embeddings") or hf_config.max_position_embeddings
            longest = max(longest, int(original * params["factor"]))
    return longest


def _context_length(asked: int | None, max_context: int, hf_config: Any) -> int:
    if asked is None:
        return max_context
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ConfigError(f"context_length must be an integer >= 1, got {asked!r}")
    if asked > max_context:
        params = rope_parameters(hf_config)
        why = ""
        if params.get("rope_type") == "dynamic":
            why = ": dynamic RoPE changes with the length beyond it, which cannot be served exactly"
        raise ConfigError(f"context_length {asked} is over the model's maximum of {max_context}{why}")
    return asked
