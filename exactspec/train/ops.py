"""The operators that training fuses on CUDA, in plain torch. `operators(device)` picks the set.

All are free of gradients: the frozen target and the loss (whose gradient is written out) use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """[M, 2 I], gate first -> silu(gate) * up [M, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, branch [M, H] -> (x + branch, its RMSNorm); without a branch (x, its RMSNorm)."""
    total = x if branch is None else x + branch
    return total, F.rms_norm(total, weight.shape, weight, eps)


def rope_(qkv: Tensor, num_heads: int, head_dim: int, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first num_heads heads of each row of qkv [M, *] in place (rotate-half).

    cos and sin are float32 tables [max_positions, rotary / 2]; positions [M].
    """
    half = cos.shape[1]
    heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
    turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1)  # before any of it is overwritten
    heads[..., : 2 * half] = turned.to(qkv.dtype)


def write_cache(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, num_heads: int) -> None:
    """Stores each slot's new key and value (already rotated) at its position. Caches [S, kv_heads, L, D]."""
    slots, kv_heads, _, head_dim = k_cache.shape
    kv = qkv[:, num_heads * head_dim :].unflatten(1, (2, kv_heads, head_dim))
    rows = torch.arange(slots, device=qkv.device)
    k_cache[rows, :, positions.long()] = kv[:, 0]
    v_cache[rows, :, positions.long()] = kv[:, 1]


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, num_heads: int, scale: float
) -> Tensor:
    """One query row per slot over a static cache.

    qkv [S, *] (the query heads first), caches [S, kv_heads, L, D], lengths [S] keys in use -> [S, num_heads * D].
    """
    slots, kv_heads, _, head_dim = k_cache.shape
    longest = max(1, int(lengths.max()))
    q = qkv[:, : num_heads * head_dim].reshape(slots, kv_heads, num_heads // kv_heads, head_dim)
    seen = torch.arange(longest, device=qkv.device)[None] < lengths[:, None]
    scores = (q @ k_cache[:, :, :longest].transpose(-1, -2)).float() * scale
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(torch.float32).min)
    return (scores.softmax(-1).to(qkv.dtype) @ v_cache[:, :, :longest]).reshape(slots, num_heads * head_dim)


def sample(logits: Tensor, temperature: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws one token a row: logits [S, V]; temperature (0: argmax), min_p, seeds, positions [S] -> ids [S] int32.

    The draw is argmax(logits / T + Gumbel noise); the noise is a function of (seed, position) alone.
    """
    logits = logits.float()
    hot = temperature > 0
    scaled = logits / torch.where(hot, temperature, torch.ones_like(temperature))[:, None]
    keep = scaled >= scaled.amax(-1, keepdim=True) + min_p.clamp(min=1e-30).log()[:, None]
    noise = torch.stack([_gumbel(int(s), int(p), logits.shape[1]) for s, p in zip(seeds, positions, strict=True)])
    scores = (scaled + noise.to(logits.device)).masked_fill(~keep, -torch.inf)
    return torch.where(hot, scores.argmax(-1), logits.argmax(-1)).int()


def _gumbel(seed: int, position: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) & (2**63 - 1))
    return -torch.log(torch.empty(vocab).exponential_(generator=generator))


@dataclass(frozen=True)
class Coupling:
    """What Gumbel-coupled acceptance adds to the loss: draft and target draw with the same noise, and the draft's draw
    should be the target's. `seed` [1] integer on the device; `first_row` numbers the first row of the call."""

    weight: float
    temperature: float
    seed: Tensor
    first_row: int = 0


def coupling_noise(seed: Tensor, first_row: int, rows: int, vocab: int) -> Tensor:
    """Gumbel noise [rows, vocab] float32 from a cheap hash: enough for a loss, not for sampling."""
    numbers = torch.arange(first_row, first_row + rows, device=seed.device)
    start = _mix((seed.long() + numbers) & _WORD)[:, None]
    bits = _mix((start + torch.arange(vocab, device=seed.device)) & _WORD) >> 9  # with 24 bits it could round to 1
    return -torch.log(-torch.log((bits.float() + 0.5) * 2.0**-23))


_WORD = 2**32 - 1


def _mix(x: Tensor) -> Tensor:
    """int64 holding 32 bits -> the same, mixed."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    low, high = x & 0xFFFF, x >> 16  # the product of two words may not fit 63 bits
    x = (low * 0x846CA68B + ((high * 0x846CA68B & 0xFFFF) << 16)) & _WORD
    return x ^ (x >> 16)


def distance_loss_(
    draft: Tensor,
    target: Tensor,
    labels: Tensor,
    weights: Tensor,
    ce_weight: float,
    l1_weight: float,
    coupling: Coupling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy and L1 distance of each row, and the gradient of their weighted sum, written over `draft`.

    draft, target [N, V] logits; labels [N]; weights [N] float32. With q = softmax(draft), p = softmax(target):
    ce = -log q[label]; l1 = sum |q - p| (twice the total variation, arXiv 2607.05147 section 3.3). With `coupling`
    also coupled = -log softmax((draft + g) / temperature)[argmax(target + g)] for Gumbel noise g, and agree: whether
    draft + g has the same argmax, which is what coupled acceptance asks for.
    Returns ce, l1, match (1 where both have the same argmax), coupled, agree (None without coupling), float32 [N];
    `draft` then holds weights * d(ce_weight * ce + l1_weight * l1 + coupling.weight * coupled) / d draft.
    """
    log_q = draft.float().log_softmax(-1)
    q, p = log_q.exp(), target.float().log_softmax(-1).exp()  # alike, so that equal rows give no gradient
    ce = -log_q.gather(1, labels.long()[:, None])[:, 0]
    l1 = (q - p).abs().sum(-1)
    match = (draft.argmax(-1) == target.argmax(-1)).float()
    side = (q - p).sign()
    grad = l1_weight * q * (side - (side * q).sum(-1, keepdim=True)) + ce_weight * q
    grad.scatter_add_(1, labels.long()[:, None], torch.full_like(grad[:, :1], -ce_weight))
    coupled = agree = None
    if coupling is not None:
        noise = coupling_noise(coupling.seed, coupling.first_row, *draft.shape)
        guess, drawn = draft.float() + noise, (target.float() + noise).argmax(-1)
        log_share = (guess / coupling.temperature).log_softmax(-1)
        coupled = -log_share.gather(1, drawn[:, None])[:, 0]
        agree = (guess.argmax(-1) == drawn).float()
        pull = coupling.weight / coupling.temperature
        grad += pull * log_share.exp()
        grad.scatter_add_(1, drawn[:, None], torch.full_like(grad[:, :1], -pull))
    draft.copy_(grad * weights[:, None])
    return ce, l1, match, coupled, agree


TORCH = SimpleNamespace(
    silu_mul=silu_mul,
    add_norm=add_norm,
    rope_=rope_,
    write_cache=write_cache,
    decode_attention=decode_attention,
    sample=sample,
    distance_loss_=distance_loss_,
)


def operators(device: torch.device) -> SimpleNamespace | ModuleType:
    """The fused set on CUDA, the plain one elsewhere."""
    if device.type == "cuda":
        from exactspec.train import kernels

        return kernels
    return TORCH
