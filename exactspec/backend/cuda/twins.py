"""Torch twins of the Triton kernels: the same function in plain operators, float32, any device. For tests only.

The twin of the noise is torch_ref.noise.gumbel; that of a whole stack is TorchStack.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import RopeTable
from exactspec.types import ForwardBatch


def gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """x [M, K], weight [N or 2N, K] -> [M, N] float32. activation: "none", "silu" or "gelu_tanh" (gate rows first)."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias
    if activation != "none":
        gate, up = y.chunk(2, dim=-1)
        y = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    return y if residual is None else y + residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[M, H] -> [M, H]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def add_parts(parts: Tensor, residual: Tensor | None) -> Tensor:
    """parts [ranks, M, H] -> [M, H], in rank order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if residual is None else residual + total


def rope_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rope: RopeTable,
    positions: Tensor,
    slots: Tensor,
    q_heads: int,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
) -> Tensor:
    """Writes k_pool and v_pool [slots, kv heads, D]; returns q [T, q heads, D] float32. Slot -1 writes nothing."""
    kv_heads, head_dim = k_pool.shape[1:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
        q = rms_norm(q, q_norm, eps) if q_norm is not None else q
    cos, sin = rope.cos[positions.long()][:, None], rope.sin[positions.long()][:, None]
    kept = slots >= 0
    k_pool[slots[kept].long()] = _turn(k, cos, sin)[kept].to(k_pool.dtype)
    v_pool[slots[kept].long()] = v[kept].to(v_pool.dtype)
    return _turn(q, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: ForwardBatch, scale: float, window: int | None
) -> Tensor:
    """q [T, heads, D], pools [slots, kv heads, D] -> [T, heads * D] float32; softmax over all visible keys at once."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    group = q.shape[1] // k_pool.shape[1]
    starts = batch.q_start.tolist()
    for r, kv_len in enumerate(batch.kv_len.tolist()):
        rows = slice(starts[r], starts[r + 1])
        key = torch.arange(kv_len, device=q.device)
        slots = batch.page_table[r].long()[key // batch.page_size] * batch.page_size + key % batch.page_size
        k = k_pool[slots].float().repeat_interleave(group, 1)
        v = v_pool[slots].float().repeat_interleave(group, 1)
        position = batch.positions[rows].long()[:, None]
        seen = key <= position if batch.causal else torch.ones_like(key <= position)
        if window is not None:
            seen = seen & (key > position - window)
        scores = torch.einsum("thd,khd->htk", q[rows].float(), k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("htk,khd->thd", weights, v)
    return out.flatten(1)


def draw(logits: Tensor, temperatures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, raw logprobs, logsumexp) of argmax(logits / T + noise), the argmax where T = 0; ties to the lowest id."""
    hot = temperatures > 0
    scores = torch.where(hot[:, None], logits / temperatures.clamp_min(1e-30)[:, None] + noise, logits)
    best = scores == scores.max(-1, keepdim=True).values
    ids = best.int().argmax(-1)  # the first of equals
    lse = torch.logsumexp(logits, -1)
    return ids, logits.gather(1, ids[:, None])[:, 0] - lse, lse
