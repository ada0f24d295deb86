"""Row-wise kernels between the GEMMs: RMSNorm (+ residual), and q/k norm + RoPE + K/V write in one pass.

One program owns whole rows and reduces inside a row with a layout that depends on the row's width alone. Twins:
twins.rms_norm, twins.rope_write.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.base import RopeTable
from exactspec.backend.cuda.launch import OFF, launch_options, wait_for_input
from exactspec.backend.cuda.tiles import next_power_of_2

HEADS_PER_PROGRAM = 8


@triton.jit
def _rms_norm_kernel(
    x, weight, out, residual, sum_out, copy, copy_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, HAS_COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / rms(x) * weight; with ADD, sum_out = residual + that, and nothing else is written but `copy` of it."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    ok = cols < WIDTH
    w = tl.load(weight + cols, mask=ok, other=0.0)
    wait_for_input(PDL)
    values = tl.load(x + row * WIDTH + cols, mask=ok, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values) / WIDTH + eps)
    values = values * scale * w
    if ADD:
        values += tl.load(residual + row * WIDTH + cols, mask=ok, other=0.0)
        tl.store(sum_out + row * WIDTH + cols, values, mask=ok)
        if HAS_COPY:
            tl.store(copy + row * copy_stride + cols, values, mask=ok)
    else:
        tl.store(out + row * WIDTH + cols, values.to(out.dtype.element_ty), mask=ok)


def norm_warps(width: int) -> int:
    return 1 if width <= 512 else 4 if width <= 2048 else 8


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, pdl: int = OFF) -> Tensor:
    """x [M, H] float32, weight [H] float32 -> out [M, H] float32, or rounded to out's dtype."""
    rows, width = x.shape
    launch = launch_options(pdl)
    _rms_norm_kernel[(rows,)](
        x, weight, out, x, x, x, 0, eps, WIDTH=width, BLOCK=next_power_of_2(width), ADD=False, HAS_COPY=False, PDL=pdl,
        num_warps=norm_warps(width), **launch,
    )  # fmt: skip
    return out


def add_rms_norm(
    branch: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    out: Tensor,
    copy: Tensor | None = None,
    pdl: int = OFF,
) -> Tensor:
    """out = residual + rms_norm(branch): the second norm of a branch that has one. out may be residual."""
    rows, width = branch.shape
    launch = launch_options(pdl)
    _rms_norm_kernel[(rows,)](
        branch, weight, out, residual, out, out if copy is None else copy, 0 if copy is None else copy.stride(0), eps,
        WIDTH=width, BLOCK=next_power_of_2(width), ADD=True, HAS_COPY=copy is not None, PDL=pdl,
        num_warps=norm_warps(width), **launch,
    )  # fmt: skip
    return out


@triton.jit
def _add_parts_kernel(
    parts, part_stride, residual, out, copy, copy_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): the parts in order, then the residual."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    at = row * WIDTH + cols
    total = tl.load(parts + at, mask=ok, other=0.0)
    for i in tl.static_range(1, SIZE):
        total += tl.load(parts + i * part_stride + at, mask=ok, other=0.0)
    if HAS_RESIDUAL:
        total = tl.load(residual + at, mask=ok, other=0.0) + total
    tl.store(out + at, total, mask=ok)
    if HAS_COPY:
        tl.store(copy + row * copy_stride + cols, total, mask=ok)


def add_parts(parts: Tensor, residual: Tensor | None, out: Tensor, copy: Tensor | None = None) -> Tensor:
    """parts [ranks, M, H] float32 -> out [M, H] = residual + (parts[0] + parts[1] + ...), and once more into `copy`.

    out may be residual. Twin: twins.add_parts.
    """
    size, rows, width = parts.shape
    block = min(1024, next_power_of_2(width))
    _add_parts_kernel[(rows, triton.cdiv(width, block))](
        parts, parts.stride(0), out if residual is None else residual, out, out if copy is None else copy,
        0 if copy is None else copy.stride(0), WIDTH=width, BLOCK=block, SIZE=size, HAS_RESIDUAL=residual is not None,
        HAS_COPY=copy is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rope_kernel(
    qkv, qkv_stride, q_norm, k_norm, cos, sin, positions, slots, q_out, k_pool, v_pool, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, group of heads). Heads in order q, k, v; q goes to q_out, k and v to the pool at the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    half: tl.constexpr = ROTARY // 2
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = head >= Q_HEADS + KV_HEADS
    turned = (d < ROTARY)[None, :] & (head < Q_HEADS + KV_HEADS)[:, None]
    partner = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    # what the kernel before does not make is on its way while that one still runs
    if HAS_NORM:
        d_ok = d < HEAD_DIM
        wq, wk = tl.load(q_norm + d, mask=d_ok, other=0.0), tl.load(k_norm + d, mask=d_ok, other=0.0)
        pq, pk = tl.load(q_norm + partner, mask=d_ok, other=0.0), tl.load(k_norm + partner, mask=d_ok, other=0.0)
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    angle = position * half + tl.where(d < half, d, d - half)
    c = tl.load(cos + angle, mask=d < ROTARY, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=d < ROTARY, other=0.0)[None, :]
    s = tl.where((d < half)[None, :], -s, s)
    wait_for_input(PDL)
    ok = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    base = qkv + row * qkv_stride + head[:, None] * HEAD_DIM
    x = tl.load(base + d[None, :], mask=ok, other=0.0)
    y = tl.load(base + partner[None, :], mask=ok, other=0.0)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
        w = tl.where(is_q[:, None], wq[None, :], wk[None, :])
        p = tl.where(is_q[:, None], pq[None, :], pk[None, :])
        x = tl.where(is_v[:, None], x, x * scale[:, None] * w)
        y = tl.where(is_v[:, None], y, y * scale[:, None] * p)
    x = tl.where(turned, x * c + y * s, x)
    q_ptr = q_out + (row * Q_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(q_ptr, x.to(q_out.dtype.element_ty), mask=ok & is_q[:, None])
    stored = ok & (slot + head * 0 >= 0)[:, None]
    k_ptr = k_pool + (slot * KV_HEADS + head[:, None] - Q_HEADS) * HEAD_DIM + d[None, :]
    tl.store(k_ptr, x.to(k_pool.dtype.element_ty), mask=stored & is_k[:, None])
    v_ptr = v_pool + (slot * KV_HEADS + head[:, None] - Q_HEADS - KV_HEADS) * HEAD_DIM + d[None, :]
    tl.store(v_ptr, x.to(v_pool.dtype.element_ty), mask=stored & is_v[:, None])


def rope_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    rope: RopeTable,
    positions: Tensor,
    slots: Tensor,
    q_out: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    eps: float,
    pdl: int = OFF,
) -> None:
    """qkv [T, (q + 2 kv heads) * D] float32 (no q part if q_out is None) -> q_out [T, q heads, D] and the pool's rows.

    k_pool, v_pool: one layer, [slots, kv heads, D]. A row with slot -1 is padding and writes nothing to the pool.
    """
    kv_heads, head_dim = k_pool.shape[1], k_pool.shape[2]
    q_heads = 0 if q_out is None else q_out.shape[1]
    groups = triton.cdiv(q_heads + 2 * kv_heads, HEADS_PER_PROGRAM)
    launch = launch_options(pdl)
    some = k_norm if k_norm is not None else rope.cos
    _rope_kernel[(qkv.shape[0], groups)](
        qkv, qkv.stride(0), q_norm if q_norm is not None else some, some, rope.cos, rope.sin, positions, slots,
        k_pool if q_out is None else q_out, k_pool, v_pool, eps, Q_HEADS=q_heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, ROTARY=2 * rope.cos.shape[1], BLOCK_D=next_power_of_2(head_dim), BLOCK_H=HEADS_PER_PROGRAM,
        HAS_NORM=k_norm is not None, PDL=pdl, num_warps=4, **launch,
    )  # fmt: skip
