# mypy: disable-error-code="no-untyped-def"
"""Fused Triton operators of a draft's training forward and backward; `draft_ops.py` holds their plain torch twins.

Imported on CUDA devices only (or in Triton's interpreter, for tests). Gradients of norm weights are summed in two
steps, so that they do not depend on the order in which programs finish.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1024  # of kernels that sum over rows


@triton.jit
def _norm_backward(
    total, weight, grad_normed, grad_total, grad_x, grad_weight, rows, width, eps,
    HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * width + cols
        x = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + at, mask=mask, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        y = x * inverse
        lean = grad * w
        out = inverse * (lean - y * (tl.sum(lean * y, 0) / width))
        if HAS_TOTAL:
            out += tl.load(grad_total + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), mask=mask)
        summed += grad * y
    tl.store(grad_weight + program * width + cols, summed, mask=mask)


def norm_backward(
    total: Tensor, weight: Tensor, eps: float, grad_normed: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `draft_ops.norm_backward`, the twin."""
    rows, width = total.shape
    programs = min(rows, _PROGRAMS)
    grad_x = torch.empty_like(total)
    partial = torch.empty(programs, width, dtype=torch.float32, device=total.device)
    given = grad_normed if grad_total is None else grad_total.contiguous()
    _norm_backward[(programs,)](
        total, weight, grad_normed, given, grad_x, partial, rows, width, eps,
        HAS_TOTAL=grad_total is not None, BLOCK=triton.next_power_of_2(width),
    )  # fmt: skip
    return grad_x, partial.sum(0)


@triton.jit
def _silu_mul_backward(gate_up, grad, out, width, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=mask, other=0.0).to(tl.float32)
    outer = tl.load(grad + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = outer * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out + row * 2 * width + cols, of_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + row * 2 * width + width + cols, (outer * gate * share).to(out.dtype.element_ty), mask=mask)


def silu_mul_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """See `draft_ops.silu_mul_backward`, the twin."""
    rows, width = grad.shape
    out = torch.empty_like(gate_up)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_backward[(rows, triton.cdiv(width, block))](gate_up, grad, out, width, BLOCK=block)
    return out


@triton.jit
def _heads_forward(
    rows, norms, positions, cos, sin, out, heads, turned, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (dims < HALF)
    turns = head < turned
    at = row * heads * 2 * HALF + head * 2 * HALF + dims
    first = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + at + HALF, mask=mask, other=0.0).to(tl.float32)
    x, y = first, second
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        there = turns & (dims < HALF)
        x *= inverse * tl.load(norms + head * 2 * HALF + dims, mask=there, other=0.0).to(tl.float32)
        y *= inverse * tl.load(norms + head * 2 * HALF + HALF + dims, mask=there, other=0.0).to(tl.float32)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * HALF + dims)
    s = tl.load(sin + position * HALF + dims)
    tl.store(out + at, tl.where(turns, x * c - y * s, first).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + HALF, tl.where(turns, y * c + x * s, second).to(out.dtype.element_ty), mask=mask)


def heads_forward(
    rows: Tensor, norms: Tensor | None, positions: Tensor, cos: Tensor, sin: Tensor, num_turned: int, eps: float
) -> Tensor:
    """See `draft_ops.heads_forward`, the twin. D / 2 must be a power of two."""
    half = cos.shape[1]
    heads = rows.shape[1] // (2 * half)
    out = torch.empty_like(rows)
    _heads_forward[(rows.shape[0],)](
        rows, cos if norms is None else norms.contiguous(), positions, cos, sin, out, heads, num_turned, eps,
        HAS_NORM=norms is not None, HALF=half, HEADS=triton.next_power_of_2(heads),
    )  # fmt: skip
    return out


@triton.jit
def _heads_backward(
    rows, norms, positions, cos, sin, grad, out, grad_norms, num_rows, heads, turned, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (dims < HALF)
    turns = head < turned
    there = turns & (dims < HALF)
    sum_x = tl.zeros([HEADS, HALF], tl.float32)
    sum_y = tl.zeros([HEADS, HALF], tl.float32)
    w_x = tl.load(norms + head * 2 * HALF + dims, mask=there & HAS_NORM, other=1.0).to(tl.float32)
    w_y = tl.load(norms + head * 2 * HALF + HALF + dims, mask=there & HAS_NORM, other=1.0).to(tl.float32)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = row * heads * 2 * HALF + head * 2 * HALF + dims
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        h = tl.load(grad + at + HALF, mask=mask, other=0.0).to(tl.float32)
        position = tl.load(positions + row).to(tl.int64)
        c = tl.load(cos + position * HALF + dims)
        s = tl.load(sin + position * HALF + dims)
        back_x = g * c + h * s
        back_y = h * c - g * s
        if HAS_NORM:
            x = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(rows + at + HALF, mask=mask, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
            x *= inverse
            y *= inverse
            sum_x += back_x * x
            sum_y += back_y * y
            back_x *= w_x
            back_y *= w_y
            mean = ((tl.sum(back_x * x, 1) + tl.sum(back_y * y, 1)) / (2 * HALF))[:, None]
            back_x = inverse * (back_x - x * mean)
            back_y = inverse * (back_y - y * mean)
        tl.store(out + at, tl.where(turns, back_x, g).to(out.dtype.element_ty), mask=mask)
        tl.store(out + at + HALF, tl.where(turns, back_y, h).to(out.dtype.element_ty), mask=mask)
    if HAS_NORM:
        goal = grad_norms + (program * turned + head) * 2 * HALF + dims
        tl.store(goal, sum_x, mask=there)
        tl.store(goal + HALF, sum_y, mask=there)


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
    """See `draft_ops.heads_backward`, the twin."""
    half = cos.shape[1]
    heads = rows.shape[1] // (2 * half)
    programs = min(rows.shape[0], _PROGRAMS)
    out = torch.empty_like(rows)
    partial = torch.empty(programs, num_turned, 2 * half, dtype=torch.float32, device=rows.device)
    _heads_backward[(programs,)](
        rows, cos if norms is None else norms.contiguous(), positions, cos, sin, grad, out, partial,
        rows.shape[0], heads, num_turned, eps,
        HAS_NORM=norms is not None, HALF=half, HEADS=triton.next_power_of_2(heads),
    )  # fmt: skip
    return out, None if norms is None else partial.sum(0)
