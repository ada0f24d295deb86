"""The operators of a draft's training forward and backward, in plain torch; `draft_operators(device)` picks the set.

Gradients are written out, so that the fused Triton versions (`draft_kernels.py`, `block_attention.py`) have a twin to
equal. Row tensors hold M rows; a row of heads is [heads * D]. Sums are float32, results have the inputs' dtype.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from exactspec.draft.block_model import block_attention_mask
from exactspec.train.ops import silu_mul


def norm_forward(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, branch [M, H] -> (x + branch, its RMSNorm times weight); without a branch (x, its RMSNorm)."""
    total = x if branch is None else x + branch
    return total, F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(x.dtype)


def norm_backward(
    total: Tensor, weight: Tensor, eps: float, grad_normed: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """-> (gradient of x, and of branch where there was one [M, H]; gradient of weight [H] float32).

    With y = x / r, r = rms(x): d x = (d y * w - y * mean(d y * w * y)) / r + d total.
    """
    wide, grad = total.float(), grad_normed.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y, lean = wide * inverse, grad * weight.float()
    out = inverse * (lean - y * (lean * y).mean(-1, keepdim=True))
    if grad_total is not None:
        out = out + grad_total.float()
    return out.to(total.dtype), (grad * y).sum(0)


def silu_mul_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `silu_mul` [M, I] -> [M, 2 I]."""
    gate, up = (part.float() for part in gate_up.chunk(2, dim=-1))
    share, wide = torch.sigmoid(gate), grad.float()
    out = torch.cat([wide * up * share * (1 + gate * (1 - share)), wide * gate * share], dim=-1)
    return out.to(gate_up.dtype)


def heads_forward(
    rows: Tensor, norms: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor, num_turned: int, eps: float
) -> Tensor:
    """q/k norm and RoPE: rows [M, heads * D], positions [M] -> the same shape.

    The first num_turned heads are normed over D (norms [num_turned, D], a weight row each; None: not normed) and
    rotated (cos, sin [positions, D / 2] float32, rotate-half); the rest passes.
    """
    heads = rows.unflatten(1, (-1, 2 * cos.shape[1]))
    x = heads[:, :num_turned].float()
    if norms is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norms.float()
    turned = _turn(x, cos[positions.long()][:, None], sin[positions.long()][:, None])
    return torch.cat([turned.to(rows.dtype), heads[:, num_turned:]], dim=1).flatten(1)


def heads_backward(
    rows: Tensor,
    norms: Tensor | None,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_turned: int,
    eps: float,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """-> (gradient of rows, gradient of norms float32 or None). A rotation's transpose is the rotation backwards."""
    heads, outer = rows.unflatten(1, (-1, 2 * cos.shape[1])), grad.unflatten(1, (-1, 2 * cos.shape[1]))
    back = _turn(outer[:, :num_turned].float(), cos[positions.long()][:, None], -sin[positions.long()][:, None])
    grad_norms = None
    if norms is not None:
        x = heads[:, :num_turned].float()
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        y, lean = x * inverse, back * norms.float()
        grad_norms = (back * y).sum(0)
        back = inverse * (lean - y * (lean * y).mean(-1, keepdim=True))
    return torch.cat([back.to(rows.dtype), outer[:, num_turned:]], dim=1).flatten(1), grad_norms


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_forward(
    rows: Tensor, context: Tensor, anchors: Tensor, kv_heads: int, scale: float
) -> tuple[Tensor, ...]:
    """Block attention: a block's rows see the context before their anchor and their own block.

    rows [B, A * n, heads + 2 kv_heads, D] (queries, keys, values), context [B, L, 2 kv_heads, D], anchors [B, A] ->
    (out [B, A * n, heads, D], and what the backward wants: here the attention's weights).
    """
    q, k, v, mask = _attention_parts(rows, context, anchors, kv_heads)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
    return (weights @ v.float()).transpose(1, 2).to(rows.dtype), weights


def attention_backward(
    rows: Tensor,
    context: Tensor,
    anchors: Tensor,
    kv_heads: int,
    scale: float,
    out: Tensor,
    weights: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """-> gradients of rows and context."""
    q, k, v, _ = _attention_parts(rows, context, anchors, kv_heads)
    outer = grad.transpose(1, 2).float()
    lean = outer @ v.float().transpose(-1, -2)
    scores = weights * (lean - (lean * weights).sum(-1, keepdim=True)) * scale
    group, length = q.shape[1] // kv_heads, context.shape[1]
    grad_q = (scores @ k.float()).transpose(1, 2)
    grad_k, grad_v = (
        x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2)
        for x in (scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ outer)
    )
    grad_rows = torch.cat([grad_q, grad_k[:, length:], grad_v[:, length:]], dim=2)
    grad_context = torch.cat([grad_k[:, :length], grad_v[:, :length]], dim=2)
    return grad_rows.to(rows.dtype), grad_context.to(rows.dtype)


def _attention_parts(rows: Tensor, context: Tensor, anchors: Tensor, kv_heads: int) -> tuple[Tensor, ...]:
    """q [B, heads, Q, D], k and v of every query head [B, heads, L + Q, D], mask [B, Q, L + Q]."""
    num_heads = rows.shape[2] - 2 * kv_heads
    q, k, v = rows.split([num_heads, kv_heads, kv_heads], dim=2)
    k, v = (torch.cat([a, b], dim=1) for a, b in zip(context.chunk(2, dim=2), (k, v), strict=True))
    k, v = (x.transpose(1, 2).repeat_interleave(num_heads // kv_heads, dim=1) for x in (k, v))
    at = torch.arange(context.shape[1], device=rows.device).expand(context.shape[:2])
    return q.transpose(1, 2), k, v, block_attention_mask(anchors, at, rows.shape[1] // anchors.shape[1])


TORCH = SimpleNamespace(
    norm_forward=norm_forward,
    norm_backward=norm_backward,
    silu_mul=silu_mul,
    silu_mul_backward=silu_mul_backward,
    heads_forward=heads_forward,
    heads_backward=heads_backward,
    attention_forward=attention_forward,
    attention_backward=attention_backward,
)


def draft_operators(device: torch.device) -> SimpleNamespace:
    """The fused set on CUDA, the plain one elsewhere."""
    if device.type != "cuda":
        return TORCH
    from exactspec.train import block_attention, draft_kernels, kernels

    return SimpleNamespace(
        norm_forward=kernels.add_norm,
        norm_backward=draft_kernels.norm_backward,
        silu_mul=kernels.silu_mul,
        silu_mul_backward=draft_kernels.silu_mul_backward,
        heads_forward=draft_kernels.heads_forward,
        heads_backward=draft_kernels.heads_backward,
        attention_forward=block_attention.attention_forward,
        attention_backward=block_attention.attention_backward,
    )
