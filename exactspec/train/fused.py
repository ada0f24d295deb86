"""The draft's forward for training, from fused operators with written-out gradients: BlockModel.forward, faster.

BlockModel stays the truth and owns the parameters; tests hold both to the same values and gradients. Weights are cast
to the target's dtype once a step, and projections that share an input are one product.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from exactspec.draft.block_model import BlockAttention, BlockLayer, BlockMlp, BlockModel
from exactspec.model.rope import RopeSpec


def can_fuse(model: BlockModel) -> bool:
    """Whether the fused forward covers this draft: SiLU and no biases (every draft made here)."""
    layer = cast(BlockLayer, model.layers[0])
    linears = (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    return model.config.activation == "silu" and all(linear.bias is None for linear in linears)


def fused_forward(
    model: BlockModel, features: Tensor, block_embeddings: Tensor, anchors: Tensor, ops: SimpleNamespace
) -> Tensor:
    """features [B, L, K * H] of positions 0 .. L - 1, block_embeddings [B, A, n, H] in the dtype to compute in,
    anchors [B, A] -> final normed states [B, A, n, H]; see BlockModel.forward."""
    batch, length = features.shape[:2]
    num_anchors, num_rows = block_embeddings.shape[1:3]
    device, dtype, eps = features.device, block_embeddings.dtype, model.config.rms_eps
    cos, sin = _rope(model._rope, length + num_rows, device)
    offsets = torch.arange(num_rows, device=device)
    at_rows = (anchors.unsqueeze(-1) + offsets).flatten().int()
    at_context = torch.arange(length, device=device, dtype=torch.int32).repeat(batch)
    run = _Layers(ops, anchors, at_rows, at_context, cos, sin, eps, batch)
    fc = F.linear(features.flatten(0, 1), model.fc.weight.to(dtype))
    _, context = _Norm.apply(fc, None, model.hidden_norm.weight, eps, ops)
    layers = [cast(BlockLayer, layer) for layer in model.layers]
    x = block_embeddings.flatten(0, 2)
    _, normed = _Norm.apply(x, None, layers[0].input_layernorm.weight, eps, ops)
    for layer, after in zip(layers, [*(one.input_layernorm for one in layers[1:]), model.norm], strict=True):
        branch = run.attend(layer.self_attn, normed, context)
        x, normed = _Norm.apply(x, branch, layer.post_attention_layernorm.weight, eps, ops)
        x, normed = _Norm.apply(x, run.mlp(layer.mlp, normed), after.weight, eps, ops)
    return normed.view(batch, num_anchors, num_rows, -1)


@lru_cache(maxsize=64)
def _rope(rope: RopeSpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = rope.table(num_positions, device)
    return table.cos, table.sin


class _Layers:
    """What all layers of one forward share."""

    def __init__(
        self,
        ops: SimpleNamespace,
        anchors: Tensor,
        at_rows: Tensor,
        at_context: Tensor,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        batch: int,
    ) -> None:
        self.ops, self.anchors, self.at_rows, self.at_context = ops, anchors, at_rows, at_context
        self.rope, self.eps, self.batch = (cos, sin), eps, batch

    def attend(self, layer: BlockAttention, normed: Tensor, context: Tensor) -> Tensor:
        """Attention with its projections: normed [M, H] rows, context [B * L, H] -> [M, H]."""
        dtype, dim = normed.dtype, layer.head_dim
        q, k, v = (linear.weight for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads, kv_heads = q.shape[0] // dim, k.shape[0] // dim
        rows = F.linear(normed, torch.cat([q, k, v]).to(dtype))
        keys = F.linear(context, torch.cat([k, v]).to(dtype))
        of_rows = of_context = None
        if layer.q_norm is not None and layer.k_norm is not None:
            of_context = layer.k_norm.weight.expand(kv_heads, dim)
            of_rows = torch.cat([layer.q_norm.weight.expand(heads, dim), of_context])
        rows = _Heads.apply(rows, of_rows, self.at_rows, self.rope, heads + kv_heads, self.eps, self.ops)
        keys = _Heads.apply(keys, of_context, self.at_context, self.rope, kv_heads, self.eps, self.ops)
        mixed = _Attention.apply(
            rows.view(self.batch, -1, heads + 2 * kv_heads, dim),
            keys.view(self.batch, -1, 2 * kv_heads, dim),
            self.anchors, kv_heads, dim**-0.5, self.ops,
        )  # fmt: skip
        return F.linear(mixed.reshape(normed.shape[0], -1), layer.o_proj.weight.to(dtype))

    def mlp(self, layer: BlockMlp, normed: Tensor) -> Tensor:
        """[M, H] -> [M, H]."""
        dtype = normed.dtype
        both = F.linear(normed, torch.cat([layer.gate_proj.weight, layer.up_proj.weight]).to(dtype))
        return F.linear(_SiluMul.apply(both, self.ops), layer.down_proj.weight.to(dtype))


class _Norm(torch.autograd.Function):
    """(x [M, H], branch or None, weight [H]) -> (x + branch, its norm)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, ops: SimpleNamespace) -> Any:
        total, normed = ops.norm_forward(x, branch, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.ops, ctx.has_branch = eps, ops, branch is not None
        return (total if branch is not None else total.view_as(total)), normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> Any:
        total, weight = ctx.saved_tensors
        given = grad_total if ctx.has_branch else None
        grad, grad_weight = ctx.ops.norm_backward(total, weight, ctx.eps, grad_normed.contiguous(), given)
        return grad, (grad if ctx.has_branch else None), grad_weight.to(weight.dtype), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ops: SimpleNamespace) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.ops = ops
        return ops.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.ops.silu_mul_backward(ctx.saved_tensors[0], grad.contiguous()), None


class _Heads(torch.autograd.Function):
    """q/k norm and RoPE of rows [M, heads * D]; the values pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        norms: Tensor | None,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        num_turned: int,
        eps: float,
        ops: SimpleNamespace,
    ) -> Tensor:
        ctx.save_for_backward(rows, norms, positions, *rope)
        ctx.settings = (num_turned, eps)
        ctx.ops = ops
        return ops.heads_forward(rows, norms, positions, *rope, num_turned, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_rows, grad_norms = ctx.ops.heads_backward(*ctx.saved_tensors, *ctx.settings, grad.contiguous())
        return grad_rows, grad_norms, None, None, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, context: Tensor, anchors: Tensor, kv_heads: int, scale: float, ops: SimpleNamespace
    ) -> Tensor:
        out, kept = ops.attention_forward(rows, context, anchors, kv_heads, scale)
        ctx.save_for_backward(rows, context, anchors, out, kept)
        ctx.settings = (kv_heads, scale)
        ctx.ops = ops
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, context, anchors, out, kept = ctx.saved_tensors
        given = (rows, context, anchors, *ctx.settings, out, kept, grad.contiguous())
        return (*ctx.ops.attention_backward(*given), None, None, None, None)
