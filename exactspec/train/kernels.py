# mypy: disable-error-code="no-untyped-def"
"""Fused Triton operators for training on CUDA. Each has its plain torch twin in `ops.py`, which is the truth.

Imported on CUDA devices only (or in Triton's interpreter, for tests).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.train.ops import Coupling


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[M, 2 I], gate first -> silu(gate) * up [M, I]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)
    return out


@triton.jit
def _add_norm(x, branch, weight, total_out, norm_out, width, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    value = tl.load(x + row * width + cols, mask=mask, other=0.0)
    if HAS_BRANCH:
        value += tl.load(branch + row * width + cols, mask=mask, other=0.0)
        tl.store(total_out + row * width + cols, value, mask=mask)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale * tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(norm_out + row * width + cols, normed.to(norm_out.dtype.element_ty), mask=mask)


def add_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, branch [M, H] -> (x + branch, its RMSNorm); without a branch (x, its RMSNorm)."""
    rows, width = x.shape
    total = x if branch is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    _add_norm[(rows,)](
        x, x if branch is None else branch, weight, total, normed, width, eps,
        HAS_BRANCH=branch is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return total, normed


@triton.jit
def _rope(qkv, positions, cos, sin, row_stride, HALF: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + position * HALF + dims)
    s = tl.load(sin + position * HALF + dims)
    head = tl.program_id(1) * HEADS + heads
    at = qkv + row * row_stride + head * HEAD_DIM + dims
    first = tl.load(at).to(tl.float32)
    second = tl.load(at + HALF).to(tl.float32)
    tl.store(at, (first * c - second * s).to(qkv.dtype.element_ty))
    tl.store(at + HALF, (second * c + first * s).to(qkv.dtype.element_ty))


def rope_(qkv: Tensor, num_heads: int, head_dim: int, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first num_heads heads of each row of qkv [M, *] in place (rotate-half)."""
    heads = num_heads & -num_heads  # a power of two that divides num_heads
    _rope[(qkv.shape[0], num_heads // heads)](
        qkv, positions, cos, sin, qkv.stride(0), HALF=cos.shape[1], HEAD_DIM=head_dim, HEADS=heads
    )


@triton.jit
def _decode_attention(
    qkv, k_cache, v_cache, lengths, out, slot_stride, head_stride, row_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + slot)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, BLOCK)
    in_group = rows[:, None] < GROUP
    q_at = slot * row_stride + (kv_head * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    q = tl.load(qkv + q_at, mask=in_group, other=0.0)
    base = slot * slot_stride + kv_head * head_stride
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(0, length, BLOCK):
        here = start + keys < length
        k = tl.load(k_cache + base + (start + keys[None, :]) * HEAD_DIM + dims[:, None], mask=here[None, :], other=0.0)
        scores = tl.where(here[None, :], tl.dot(q, k) * scale, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_cache + base + (start + keys[:, None]) * HEAD_DIM + dims[None, :], mask=here[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    out_at = slot * (KV_HEADS * GROUP * HEAD_DIM) + (kv_head * GROUP + rows[:, None]) * HEAD_DIM + dims[None, :]
    acc = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=in_group)


def decode_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, num_heads: int, scale: float
) -> Tensor:
    """One query row per slot over a static cache.

    qkv [S, *] (the query heads first), caches [S, kv_heads, L, D], lengths [S] keys in use -> [S, num_heads * D].
    """
    slots, kv_heads, _, head_dim = k_cache.shape
    out = qkv.new_empty(slots, num_heads * head_dim)
    group = num_heads // kv_heads
    _decode_attention[(slots, kv_heads)](
        qkv, k_cache, v_cache, lengths, out, k_cache.stride(0), k_cache.stride(1), qkv.stride(0), scale,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, ROWS=max(16, triton.next_power_of_2(group)), BLOCK=64,
    )  # fmt: skip
    return out


@triton.jit
def _write_cache(
    qkv, k_cache, v_cache, positions, slot_stride, head_stride, row_stride, q_width,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM)
    position = tl.load(positions + slot).to(tl.int64)
    source = qkv + slot * row_stride + q_width + head * HEAD_DIM + dims
    goal = slot * slot_stride + head * head_stride + position * HEAD_DIM + dims
    tl.store(k_cache + goal, tl.load(source))
    tl.store(v_cache + goal, tl.load(source + KV_HEADS * HEAD_DIM))


def write_cache(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, num_heads: int) -> None:
    """Stores each slot's new key and value (already rotated) at its position."""
    slots, kv_heads, _, head_dim = k_cache.shape
    _write_cache[(slots, kv_heads)](
        qkv, k_cache, v_cache, positions, k_cache.stride(0), k_cache.stride(1), qkv.stride(0), num_heads * head_dim,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim,
    )  # fmt: skip


@triton.jit
def _sample(logits, temperature, min_p, seeds, positions, out, vocab, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    temp = tl.load(temperature + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        z = tl.load(logits + row * vocab + start + cols, mask=here, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, z)
    peak = tl.max(top, 0)
    hot = temp > 0.0
    inverse = 1.0 / tl.where(hot, temp, 1.0)
    floor = peak + tl.log(tl.maximum(tl.load(min_p + row), 1e-30)) / inverse  # min-p of the tempered distribution
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        z = tl.load(logits + row * vocab + start + cols, mask=here, other=-float("inf")).to(tl.float32)
        uniform = tl.rand(seed, position * vocab + start + cols)
        noise = -tl.log(-tl.log(tl.maximum(uniform, 1e-10)) + 1e-20)
        score = tl.where(hot, z * inverse + noise, z)
        score = tl.where(here & ((z >= floor) | (hot == 0)), score, -float("inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_at = tl.where(better, start + cols, best_at)
    peak_score = tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(best == peak_score, best_at, vocab), 0))


def sample(logits: Tensor, temperature: Tensor, min_p: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws one token a row: logits [S, V]; temperature (0: argmax), min_p, seeds, positions [S] -> ids [S] int32."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _sample[(rows,)](logits, temperature, min_p, seeds, positions, out, vocab, BLOCK=4096, num_warps=8)
    return out


@triton.jit
def _mix(x):
    """A 32-bit mixing function (two rounds of xor-shift and multiply); see `ops.coupling_noise`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _coupling_noise(start, cols):
    uniform = (_mix(start + cols.to(tl.uint32)) >> 9).to(tl.float32)  # 23 bits: with 24 it could round to 1
    return -tl.log(-tl.log((uniform + 0.5) * 1.1920928955078125e-07))


@triton.jit
def _running(top, total, at, value, cols):
    """One more block for a running maximum, its place and the sum of exponentials below it, lane by lane."""
    new_top = tl.maximum(top, value)
    total = total * tl.exp(top - new_top) + tl.exp(value - new_top)
    return new_top, total, tl.where(value > top, cols, at)


@triton.jit
def _joined(top, total, at, vocab):
    """Lanes together: log-sum-exp and argmax (the lowest)."""
    peak = tl.max(top, 0)
    log_sum = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    return log_sum, tl.min(tl.where(top == peak, at, vocab), 0)


@triton.jit
def _distance_loss(
    draft, target, labels, weights, ce_out, l1_out, match_out, coupled_out, agree_out, seed, first_row,
    vocab, ce_weight, l1_weight, coupled_weight, heat, COUPLED: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    ninf = -float("inf")
    low = tl.full([BLOCK], -1e30, tl.float32)
    none = tl.zeros([BLOCK], tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    z_top, z_sum, z_at = low, none, first
    t_top, t_sum, t_at = low, none, first
    c_top, c_sum, c_at = low, none, first  # (draft + noise) * heat: what the draft would draw
    y_top, y_sum, y_at = low, none, first  # target + noise: what the target draws
    noise_start = _mix(tl.load(seed).to(tl.uint32) + (first_row + tl.program_id(0)).to(tl.uint32))
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        z = tl.load(draft + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        t = tl.load(target + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        z_top, z_sum, z_at = _running(z_top, z_sum, z_at, z, start + cols)
        t_top, t_sum, t_at = _running(t_top, t_sum, t_at, t, start + cols)
        if COUPLED:
            noise = _coupling_noise(noise_start, start + cols)
            c_top, c_sum, c_at = _running(c_top, c_sum, c_at, (z + noise) * heat, start + cols)
            y_at = tl.where(t + noise > y_top, start + cols, y_at)
            y_top = tl.maximum(y_top, t + noise)
    z_log, z_best = _joined(z_top, z_sum, z_at, vocab)
    t_log, t_best = _joined(t_top, t_sum, t_at, vocab)
    c_log, guess = _joined(c_top, c_sum, c_at, vocab)
    _, drawn = _joined(y_top, y_sum, y_at, vocab)
    gap = tl.zeros([BLOCK], tl.float32)
    lean = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        z = tl.load(draft + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        t = tl.load(target + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        q = tl.exp(z - z_log)
        p = tl.exp(t - t_log)
        gap += tl.abs(q - p)
        lean += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    lean_all = tl.sum(lean, 0)
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    tl.store(ce_out + row, z_log - tl.load(draft + row * vocab + label).to(tl.float32))
    tl.store(l1_out + row, tl.sum(gap, 0))
    tl.store(match_out + row, tl.where(z_best == t_best, 1.0, 0.0))
    if COUPLED:
        of_drawn = tl.load(draft + row * vocab + drawn).to(tl.float32) + _coupling_noise(noise_start, drawn)
        tl.store(coupled_out + row, c_log - of_drawn * heat)
        tl.store(agree_out + row, tl.where(guess == drawn, 1.0, 0.0))
    tl.debug_barrier()  # the gradient overwrites the logits: every read of one logit comes first
    for start in range(0, vocab, BLOCK):
        here = start + cols < vocab
        z = tl.load(draft + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        t = tl.load(target + row * vocab + start + cols, mask=here, other=ninf).to(tl.float32)
        q = tl.exp(z - z_log)
        p = tl.exp(t - t_log)
        side = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
        grad = l1_weight * q * (side - lean_all) + ce_weight * (q - tl.where(start + cols == label, 1.0, 0.0))
        if COUPLED:
            share = tl.exp((z + _coupling_noise(noise_start, start + cols)) * heat - c_log)
            grad += coupled_weight * heat * (share - tl.where(start + cols == drawn, 1.0, 0.0))
        tl.store(draft + row * vocab + start + cols, (weight * grad).to(draft.dtype.element_ty), mask=here)


def distance_loss_(
    draft: Tensor,
    target: Tensor,
    labels: Tensor,
    weights: Tensor,
    ce_weight: float,
    l1_weight: float,
    coupling: Coupling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """See `ops.distance_loss_`, the twin."""
    rows, vocab = draft.shape
    ce, l1, match = (torch.empty(rows, dtype=torch.float32, device=draft.device) for _ in range(3))
    coupled, agree = (None, None) if coupling is None else (torch.empty_like(ce), torch.empty_like(ce))
    _distance_loss[(rows,)](
        draft, target, labels, weights, ce, l1, match, coupled, agree,
        labels if coupling is None else coupling.seed, 0 if coupling is None else coupling.first_row,
        vocab, ce_weight, l1_weight, 0.0 if coupling is None else coupling.weight,
        1.0 if coupling is None else 1.0 / coupling.temperature, COUPLED=coupling is not None, BLOCK=4096, num_warps=16,
    )  # fmt: skip
    return ce, l1, match, coupled, agree
