# mypy: disable-error-code="no-untyped-def"
"""Attention of packed draft blocks as Triton kernels (`draft_ops.attention_forward` is the twin).

A block's n rows see the context strictly before their anchor and their own block. A program takes 64 // n blocks: it
walks over the context up to their last anchor, and over one tile of its own rows; nothing else is computed. With
anchors in rising order programs stop as early as they can. Online softmax and backward as in FlashAttention-2
(arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # rows of a program, and keys at a time


@triton.jit
def _forward(
    rows, context, anchors, out, lse, num_blocks, length, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    kv = head // (HEADS // KV)
    r = tl.arange(0, TILE)
    d = tl.arange(0, DP)[None, :]
    block = tile * (TILE // N) + r // N
    valid = (r < (TILE // N) * N) & (block < num_blocks)
    anchor = tl.load(anchors + batch * num_blocks + block, mask=valid, other=0).to(tl.int32)
    row = batch * num_blocks * N + tile * (TILE // N) * N + r
    at = row[:, None] * (HEADS + 2 * KV) * D + d
    mask = valid[:, None] & (d < D)
    q = tl.load(rows + at + head * D, mask=mask, other=0.0)
    k = tl.load(rows + at + (HEADS + kv) * D, mask=mask, other=0.0)
    v = tl.load(rows + at + (HEADS + KV + kv) * D, mask=mask, other=0.0)
    own = (r[:, None] // N == r[None, :] // N) & valid[None, :]
    own = own | (r[:, None] == r[None, :])  # spare rows see themselves: no row is empty
    scores = tl.where(own, tl.dot(q, tl.trans(k)) * scale, -1e30)
    top = tl.max(scores, 1)
    weights = tl.exp(scores - top[:, None])
    total = tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v)
    keys = tl.arange(0, TILE)
    base = context + batch * length * 2 * KV * D + kv * D
    for start in range(0, tl.max(anchor, 0), TILE):
        here = start + keys
        place = base + here[:, None] * 2 * KV * D + d
        inside = (here[:, None] < length) & (d < D)
        k = tl.load(place, mask=inside, other=0.0)
        v = tl.load(place + KV * D, mask=inside, other=0.0)
        seen = here[None, :] < anchor[:, None]
        scores = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        top = new_top
    acc = acc / total[:, None]
    tl.store(out + row[:, None] * HEADS * D + head * D + d, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row * HEADS + head, top + tl.log(total), mask=valid)


@triton.jit
def _backward_rows(
    rows, context, anchors, out, lse, grad, grad_rows, delta_out, num_blocks, length, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Gradients of queries, and of the blocks' own keys and values; notes delta = sum(grad * out) for the other."""
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // KV).to(tl.int64)
    kv = tl.program_id(1) % KV
    r = tl.arange(0, TILE)
    d = tl.arange(0, DP)[None, :]
    block = tile * (TILE // N) + r // N
    valid = (r < (TILE // N) * N) & (block < num_blocks)
    anchor = tl.load(anchors + batch * num_blocks + block, mask=valid, other=0).to(tl.int32)
    row = batch * num_blocks * N + tile * (TILE // N) * N + r
    at = row[:, None] * (HEADS + 2 * KV) * D + d
    mask = valid[:, None] & (d < D)
    own = (r[:, None] // N == r[None, :] // N) & valid[None, :] & valid[:, None]
    own_k = tl.load(rows + at + (HEADS + kv) * D, mask=mask, other=0.0)
    own_v = tl.load(rows + at + (HEADS + KV + kv) * D, mask=mask, other=0.0)
    keys = tl.arange(0, TILE)
    base = context + batch * length * 2 * KV * D + kv * D
    last = tl.max(anchor, 0)
    grad_k = tl.zeros([TILE, DP], tl.float32)
    grad_v = tl.zeros([TILE, DP], tl.float32)
    for member in range(HEADS // KV):
        head = kv * (HEADS // KV) + member
        outer_at = row[:, None] * HEADS * D + head * D + d
        q = tl.load(rows + at + head * D, mask=mask, other=0.0)
        outer = tl.load(grad + outer_at, mask=mask, other=0.0)
        mixed = tl.load(out + outer_at, mask=mask, other=0.0)
        log_sum = tl.load(lse + row * HEADS + head, mask=valid, other=0.0)
        delta = tl.sum(outer.to(tl.float32) * mixed.to(tl.float32), 1)
        tl.store(delta_out + row * HEADS + head, delta, mask=valid)
        scores = tl.where(own, tl.dot(q, tl.trans(own_k)) * scale - log_sum[:, None], -1e30)
        weights = tl.exp(scores)
        lean = weights * (tl.dot(outer, tl.trans(own_v)) - delta[:, None]) * scale
        grad_v += tl.dot(tl.trans(weights.to(outer.dtype)), outer)
        grad_k += tl.dot(tl.trans(lean.to(q.dtype)), q)
        grad_q = tl.dot(lean.to(own_k.dtype), own_k)
        for start in range(0, last, TILE):
            here = start + keys
            place = base + here[:, None] * 2 * KV * D + d
            inside = (here[:, None] < length) & (d < D)
            k = tl.load(place, mask=inside, other=0.0)
            v = tl.load(place + KV * D, mask=inside, other=0.0)
            seen = here[None, :] < anchor[:, None]
            weights = tl.exp(tl.where(seen, tl.dot(q, tl.trans(k)) * scale - log_sum[:, None], -1e30))
            lean = weights * (tl.dot(outer, tl.trans(v)) - delta[:, None]) * scale
            grad_q += tl.dot(lean.to(k.dtype), k)
        tl.store(grad_rows + at + head * D, grad_q.to(grad_rows.dtype.element_ty), mask=mask)
    tl.store(grad_rows + at + (HEADS + kv) * D, grad_k.to(grad_rows.dtype.element_ty), mask=mask)
    tl.store(grad_rows + at + (HEADS + KV + kv) * D, grad_v.to(grad_rows.dtype.element_ty), mask=mask)


@triton.jit
def _backward_context(
    rows, context, anchors, lse, grad, delta, grad_context, num_blocks, length, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Gradients of one tile of context keys and values, from every block behind it."""
    start = tl.program_id(0) * TILE
    batch = (tl.program_id(1) // KV).to(tl.int64)
    kv = tl.program_id(1) % KV
    r = tl.arange(0, TILE)
    d = tl.arange(0, DP)[None, :]
    here = start + tl.arange(0, TILE)
    place = (batch * length + here[:, None]) * 2 * KV * D + kv * D + d
    inside = (here[:, None] < length) & (d < D)
    k = tl.load(context + place, mask=inside, other=0.0)
    v = tl.load(context + place + KV * D, mask=inside, other=0.0)
    grad_k = tl.zeros([TILE, DP], tl.float32)
    grad_v = tl.zeros([TILE, DP], tl.float32)
    for first in range(0, num_blocks, TILE // N):
        block = first + r // N
        valid = (r < (TILE // N) * N) & (block < num_blocks)
        anchor = tl.load(anchors + batch * num_blocks + block, mask=valid, other=0).to(tl.int32)
        if tl.max(anchor, 0) > start:
            row = batch * num_blocks * N + first * N + r
            mask = valid[:, None] & (d < D)
            seen = here[None, :] < anchor[:, None]
            for member in range(HEADS // KV):
                head = kv * (HEADS // KV) + member
                q = tl.load(rows + row[:, None] * (HEADS + 2 * KV) * D + head * D + d, mask=mask, other=0.0)
                outer = tl.load(grad + row[:, None] * HEADS * D + head * D + d, mask=mask, other=0.0)
                log_sum = tl.load(lse + row * HEADS + head, mask=valid, other=0.0)
                shift = tl.load(delta + row * HEADS + head, mask=valid, other=0.0)
                weights = tl.exp(tl.where(seen, tl.dot(q, tl.trans(k)) * scale - log_sum[:, None], -1e30))
                lean = weights * (tl.dot(outer, tl.trans(v)) - shift[:, None]) * scale
                grad_v += tl.dot(tl.trans(weights.to(outer.dtype)), outer)
                grad_k += tl.dot(tl.trans(lean.to(q.dtype)), q)
    tl.store(grad_context + place, grad_k.to(grad_context.dtype.element_ty), mask=inside)
    tl.store(grad_context + place + KV * D, grad_v.to(grad_context.dtype.element_ty), mask=inside)


def _sizes(rows: Tensor, anchors: Tensor, kv_heads: int) -> tuple[int, int, dict[str, int]]:
    """(batch, blocks a sequence, the kernels' constants)."""
    batch, num_blocks = anchors.shape
    dim = rows.shape[3]
    constants = {
        "HEADS": rows.shape[2] - 2 * kv_heads, "KV": kv_heads, "N": rows.shape[1] // num_blocks, "D": dim,
        "DP": max(16, triton.next_power_of_2(dim)), "TILE": _TILE,
    }  # fmt: skip
    return batch, num_blocks, constants


def attention_forward(
    rows: Tensor, context: Tensor, anchors: Tensor, kv_heads: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `draft_ops.attention_forward`; keeps the log-sum-exp of the scores, [B, A * n, heads] float32."""
    batch, num_blocks, constants = _sizes(rows, anchors, kv_heads)
    heads, per_tile = constants["HEADS"], _TILE // constants["N"]
    out = rows.new_empty(batch, rows.shape[1], heads, rows.shape[3])
    lse = torch.empty(batch, rows.shape[1], heads, dtype=torch.float32, device=rows.device)
    grid = (triton.cdiv(num_blocks, per_tile), batch * heads)
    _forward[grid](rows, context, anchors, out, lse, num_blocks, context.shape[1], scale, **constants)
    return out, lse


def attention_backward(
    rows: Tensor, context: Tensor, anchors: Tensor, kv_heads: int, scale: float, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """See `draft_ops.attention_backward`."""
    batch, num_blocks, constants = _sizes(rows, anchors, kv_heads)
    length, per_tile = context.shape[1], _TILE // constants["N"]
    grad_rows, grad_context, delta = torch.empty_like(rows), torch.empty_like(context), torch.empty_like(lse)
    _backward_rows[(triton.cdiv(num_blocks, per_tile), batch * kv_heads)](
        rows, context, anchors, out, lse, grad, grad_rows, delta, num_blocks, length, scale, **constants
    )
    _backward_context[(triton.cdiv(length, _TILE), batch * kv_heads)](
        rows, context, anchors, lse, grad, delta, grad_context, num_blocks, length, scale, **constants
    )
    return grad_rows, grad_context
