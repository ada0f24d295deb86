"""The draft network of DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147): one class for training and for serving.

Parameter names are those of the published checkpoints, so a state dict is a checkpoint. Training runs `forward` on many
blocks at once; serving takes `stack_spec`, `layer_weights` and `rope_table` to a backend, which then owns the layers.

The context of a block are features of the target at the positions before the anchor: hidden states of chosen target
layers side by side -> `fc` -> `hidden_norm`. Each layer projects the *same* context (without its input norm) and its
own block rows with the same k_proj and v_proj; queries are block rows only. Inside a block attention is bidirectional.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exactspec.backend.base import LayerWeights, RopeTable, StackSpec
from exactspec.draft.config import BlockDraftConfig
from exactspec.draft.heads import make_confidence_head, make_markov_head
from exactspec.errors import CheckpointError, UnsupportedModelError
from exactspec.model.rope import RopeSpec, default_rope, rope_spec

# (q [..., heads, Q, D], k and v [..., kv_heads, K, D]) -> [..., heads, Q, D]; scale head_dim ** -0.5, mask inside.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, reduced in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class BlockAttention(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if config.use_qk_norm else None

    def forward(self, rows: Tensor, context: Tensor, ropes: tuple[RopeTable, RopeTable], attend: Attend) -> Tensor:
        """rows [..., Q, H] (input-normed), context [..., S, H]; ropes of the rows and of the keys [context; rows]."""
        q = self._heads(self.q_proj(rows), self.q_norm)
        keys = torch.cat([context, rows], dim=-2)
        k = self._heads(self.k_proj(keys), self.k_norm)
        v = self._heads(self.v_proj(keys), None)
        mixed = attend(rotate(q, ropes[0]), rotate(k, ropes[1]), v)
        return self.o_proj(mixed.transpose(-3, -2).flatten(-2))

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))
        return (norm(x) if norm is not None else x).transpose(-3, -2)


class BlockMlp(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.is_silu = config.activation == "silu"

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.is_silu else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class BlockLayer(nn.Module):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = BlockMlp(config)

    def forward(self, x: Tensor, context: Tensor, ropes: tuple[RopeTable, RopeTable], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, ropes, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockModel(nn.Module):
    """fc, hidden_norm, layers, norm, and where present markov_head, confidence_head, embed_tokens, lm_head.

    Without embed_tokens and lm_head (the normal case) the target's are used: they are not part of the draft.
    """

    def __init__(self, config: BlockDraftConfig, own_embedding: bool = False, own_lm_head: bool = False) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.markov_head = make_markov_head(config)
        self.confidence_head = make_confidence_head(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if own_lm_head else None
        self._rope = draft_rope(config)

    def forward(
        self,
        features: Tensor,
        block_embeddings: Tensor,
        context_positions: Tensor,
        anchor_positions: Tensor,
        attend: Attend | Tensor,
    ) -> Tensor:
        """Final normed hidden states of many blocks that share contexts. Leading dimensions `...` are batches.

        features [..., S, K*H]: target features of S context tokens at context_positions [..., S].
        block_embeddings [..., A, n, H]: A blocks of n rows (anchor, then mask embeddings); row i of a block stands at
        anchor_positions [..., A] + i. attend: a callable, or a boolean mask [..., A*n, S + A*n] (True: may attend; keys
        are context, then all blocks; see `block_attention_mask`). Returns [..., A, n, H]; which rows predict: `config`.
        """
        num_rows = block_embeddings.shape[-2]
        offsets = torch.arange(num_rows, device=anchor_positions.device)
        row_positions = (anchor_positions.unsqueeze(-1) + offsets).flatten(-2)
        ropes = (
            self._rope_at(row_positions),
            self._rope_at(torch.cat([context_positions, row_positions], dim=-1)),
        )
        context = self.context(features)
        attend = attend if callable(attend) else masked_attention(attend)
        x = block_embeddings.flatten(-3, -2)
        for layer in self.layers:
            x = layer(x, context, ropes, attend)
        return self.norm(x).unflatten(-2, (-1, num_rows))

    def context(self, features: Tensor) -> Tensor:
        """[..., K*H] target features -> [..., H], shared by all layers."""
        return self.hidden_norm(self.fc(features))

    def _rope_at(self, positions: Tensor) -> RopeTable:
        """Angles at integer positions [..., P] -> cos, sin [..., 1, P, D/2] (the 1 is for heads)."""
        # non_blocking: a training step on CUDA must not wait here for the target's forward
        inv_freq = torch.tensor(self._rope.inv_freq, dtype=torch.float32).to(positions.device, non_blocking=True)
        angles = positions.unsqueeze(-1).float() * inv_freq
        factor = self._rope.attention_factor
        return RopeTable((angles.cos() * factor).unsqueeze(-3), (angles.sin() * factor).unsqueeze(-3))

    def stack_spec(self) -> StackSpec:
        """The layers as a backend builds them."""
        config = self.config
        return StackSpec(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_eps=config.rms_eps,
            activation=config.activation,
            attention_scale=config.head_dim**-0.5,
            windows=(None,) * config.num_layers,
            rope_index=(0,) * config.num_layers,
        )

    def rope_table(self, num_positions: int, device: torch.device | str = "cpu") -> RopeTable:
        return self._rope.table(num_positions, device)

    @torch.no_grad()
    def layer_weights(self, dtype: torch.dtype) -> list[LayerWeights]:
        """Weights for `Backend.make_stack`: linears in `dtype`, norms and biases float32."""
        return [_layer_weights(cast(BlockLayer, layer), dtype) for layer in self.layers]


def _layer_weights(layer: BlockLayer, dtype: torch.dtype) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp

    def join(*linears: nn.Linear) -> Tensor:
        return torch.cat([linear.weight.to(dtype) for linear in linears]).contiguous()

    def join_bias(*linears: nn.Linear) -> Tensor | None:
        if any(linear.bias is None for linear in linears):
            return None
        return torch.cat([linear.bias.float() for linear in linears])

    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.float(),
        qkv=join(*projections),
        o=join(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.float(),
        gate_up=join(mlp.gate_proj, mlp.up_proj),
        down=join(mlp.down_proj),
        qkv_bias=join_bias(*projections),
        o_bias=join_bias(attention.o_proj),
        gate_up_bias=join_bias(mlp.gate_proj, mlp.up_proj),
        down_bias=join_bias(mlp.down_proj),
        q_norm=attention.q_norm.weight.float() if attention.q_norm is not None else None,
        k_norm=attention.k_norm.weight.float() if attention.k_norm is not None else None,
    )


def draft_rope(config: BlockDraftConfig) -> RopeSpec:
    """The draft's own frequencies; scalings as transformers defines them. CheckpointError where those are refused."""
    with torch.device("cpu"):  # the network itself may be built on the meta device
        if config.rope_scaling is None:
            return default_rope(config.rope_theta, config.head_dim)
        try:
            rope = _scaled_rope(config, config.rope_scaling)
        except UnsupportedModelError:
            raise
        except Exception as error:  # transformers' own checks of parameters raise many kinds
            raise CheckpointError(f"draft config: rope_scaling: {config.rope_scaling!r}: {error}") from error
    if not rope.is_finite:
        raise CheckpointError(f"draft config: rope_scaling: {config.rope_scaling!r} gives infinite frequencies")
    return rope


def _scaled_rope(config: BlockDraftConfig, scaling: dict[str, Any]) -> RopeSpec:
    from transformers import LlamaConfig

    kind = scaling.get("rope_type", scaling.get("type", "default"))  # the older spelling
    return rope_spec(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions or 2048,
            rope_parameters={**scaling, "rope_type": kind, "rope_theta": config.rope_theta},
        )
    )


def rotate(x: Tensor, rope: RopeTable) -> Tensor:
    """Rotate-half RoPE: x [..., heads, P, D], cos and sin [..., 1, P, D/2]."""
    cos, sin = rope.cos.to(x.dtype), rope.sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def masked_attention(mask: Tensor) -> Attend:
    """Softmax attention under a boolean mask [..., Q, K] that all heads share."""
    per_head = mask.unsqueeze(-3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=per_head, enable_gqa=q.shape[-3] != k.shape[-3])

    return attend


def block_attention_mask(
    anchor_positions: Tensor,
    context_positions: Tensor,
    num_rows: int,
    anchor_sequences: Tensor | None = None,
    context_sequences: Tensor | None = None,
) -> Tensor:
    """What block rows may see: context of their own sequence strictly before the anchor, and their own block.

    anchor_positions [..., A], context_positions [..., S]; sequence numbers of the same shapes where several sequences
    are packed (a context number of -1 is padding). Returns bool [..., A * num_rows, S + A * num_rows].
    """
    before = context_positions.unsqueeze(-2) < anchor_positions.unsqueeze(-1)
    if anchor_sequences is not None and context_sequences is not None:
        before = before & (context_sequences.unsqueeze(-2) == anchor_sequences.unsqueeze(-1))
    num_blocks = anchor_positions.shape[-1]
    own = torch.eye(num_blocks, dtype=torch.bool, device=before.device).expand(*before.shape[:-1], num_blocks)
    own = own.repeat_interleave(num_rows, dim=-1)
    return torch.cat([before, own], dim=-1).repeat_interleave(num_rows, dim=-2)
