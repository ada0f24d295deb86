"""Ragged paged attention whose bits for a row depend on the row and its keys alone.

Keys run in blocks of 64 anchored at position 0, in order, inside fixed splits of SPLIT_KEYS keys; the splits' partial results
are merged in order. A key that a row may not see contributes an exact zero, so neither the other rows of a tile nor
keys beyond the row's last one change anything. One row tile serves every q_len, because the layout of the reduction
follows it. Two schedules give the same bits: `whole` walks all splits of a row tile in one program, `split` gives each
split to a program of its own and merges in a second kernel. Twin: twins.attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from exactspec.backend.cuda.tiles import next_power_of_2
from exactspec.types import ForwardBatch

KEY_BLOCK = 64
SPLIT_KEYS = 256
ROW_TILE = 64
MAX_PARTIAL_BYTES = 1 << 29
COMBINE_HEADS = 8
LOG2_E = 1.4426950408889634


@triton.jit
def _find(bounds, value, COUNT, STEPS: tl.constexpr):
    """Largest i < COUNT with bounds[i] <= value; bounds rise and bounds[0] == 0."""
    low = 0
    high = COUNT
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        inside = tl.load(bounds + middle, mask=middle < COUNT, other=2147483647) <= value
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit(do_not_specialize=["R", "T"])
def _plan_kernel(
    q_start, kv_len, positions, work_start, row_last, R, T,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Program 0: work_start[R + 1], the running count of (row tile, split) items. The others: each row's last key."""
    pid = tl.program_id(0)
    if pid == 0:
        r = tl.arange(0, BLOCK_R)
        r_ok = r < R
        q_len = tl.load(q_start + r + 1, mask=r_ok, other=0) - tl.load(q_start + r, mask=r_ok, other=0)
        r_keys = tl.load(kv_len + r, mask=r_ok, other=0)
        items = (q_len + TOKENS - 1) // TOKENS
        if not WHOLE:
            items = items * ((r_keys + SPLIT - 1) // SPLIT)
        tl.store(work_start + r + 1, tl.cumsum(items, 0), mask=r_ok)
        tl.store(work_start, 0)
    else:
        t = (pid - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
        ok = t < T
        low = tl.zeros((BLOCK_T,), tl.int32)
        high = low + R
        for _ in tl.static_range(STEPS):
            middle = (low + high) // 2
            inside = tl.load(q_start + middle, mask=middle < R, other=2147483647) <= t
            low = tl.where(inside, middle, low)
            high = tl.where(inside, high, middle)
        keys = tl.load(kv_len + low, mask=ok, other=0)
        if CAUSAL:
            last = tl.load(positions + t, mask=ok, other=0)
        else:
            last = keys - 1
        inside = t < tl.load(q_start + R)
        tl.store(row_last + t, tl.where(inside, last, -1), mask=ok)


@triton.jit
def _attend_split(
    q, first, last, k_pool, v_pool, pages, low, high, scale,
    KV_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys low .. high of one split (low a multiple of BLOCK_N): running maximum (base 2), sum and weighted values."""
    d = tl.arange(0, BLOCK_D)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        there = key < high
        page = tl.load(pages + key // PAGE, mask=there, other=0)
        offset = (page.to(tl.int64) * PAGE + key % PAGE) * KV_STRIDE
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_pool + offset[None, :] + d[:, None], mask=there[None, :], other=0.0)
            v = tl.load(v_pool + offset[:, None] + d[None, :], mask=there[:, None], other=0.0)
        else:
            k = tl.load(k_pool + offset[None, :] + d[:, None], mask=there[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_pool + offset[:, None] + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        s = tl.dot(q, k) * scale
        seen = (key[None, :] <= last[:, None]) & (key[None, :] >= first[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - m_use[:, None])
        fade = tl.exp2(m - m_use)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        m = m_new
    return m, total, acc


@triton.jit
def _merge(m, total, acc, m_s, total_s, acc_s):
    """Adds a later split's partial result to the running one; acc is [rows, D]."""
    m_new = tl.maximum(m, m_s)
    m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - m_use)
    new = tl.exp2(m_s - m_use)
    total = tl.fma(total_s, new, total * old)
    new_acc = tl.zeros_like(acc) + new[:, None]
    acc = tl.fma(acc_s, new_acc, acc * old[:, None])
    return m_new, total, acc


@triton.jit(do_not_specialize=["R", "T", "window"])
def _attention_kernel(
    q, k_pool, v_pool, out, part_acc, part_ml, q_start, kv_len, positions, row_last, page_table, page_stride, work_start,
    R, T, scale, window,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent over work items (request, row tile, split unless WHOLE) x kv head; a tile's rows are tokens x group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    lane = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    num_items = tl.load(work_start + R) * KV_HEADS
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        work = item // KV_HEADS
        r = _find(work_start, work, R, STEPS)
        keys = tl.load(kv_len + r)
        local = work - tl.load(work_start + r)
        row0 = tl.load(q_start + r)
        row_end = tl.load(q_start + r + 1)
        num_splits = (keys + SPLIT - 1) // SPLIT
        part = tl.where(WHOLE, 0, local % num_splits)
        tile = tl.where(WHOLE, local, local // num_splits)
        token = row0 + tile * TOKENS + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        ok = (token < row_end) & (lane < TOKENS * GROUP)
        last = tl.load(row_last + token, mask=ok, other=-1)
        rows = token.to(tl.int64) * Q_HEADS + head
        q_tile = tl.load(q + rows[:, None] * HEAD_DIM + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        first = tl.zeros((BLOCK_M,), tl.int32)
        low = 0
        if HAS_WINDOW:
            first = tl.load(positions + token, mask=ok, other=2147483647) - window + 1
            low = tl.maximum(tl.min(first), 0) // BLOCK_N * BLOCK_N
        high = tl.max(last) + 1
        k_head = k_pool + kv_head * HEAD_DIM
        v_head = v_pool + kv_head * HEAD_DIM
        pages = page_table + r.to(tl.int64) * page_stride
        if WHOLE:
            m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for split in tl.range(low // SPLIT, tl.cdiv(high, SPLIT)):
                m_s, total_s, acc_s = _attend_split(
                    q_tile, first, last, k_head, v_head, pages,
                    tl.maximum(low, split * SPLIT), tl.minimum(high, (split + 1) * SPLIT), scale,
                    KV_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, STAGES,
                )  # fmt: skip
                m, total, acc = _merge(m, total, acc, m_s, total_s, acc_s)
            safe = tl.where(total > 0.0, total, 1.0)
            o = tl.div_rn(acc, tl.zeros_like(acc) + safe[:, None])
            tl.store(
                out + rows[:, None] * HEAD_DIM + d[None, :],
                o.to(out.dtype.element_ty),
                mask=ok[:, None] & d_ok[None, :],
            )
        else:
            m, total, acc = _attend_split(
                q_tile, first, last, k_head, v_head, pages,
                tl.maximum(low, part * SPLIT), tl.minimum(high, (part + 1) * SPLIT), scale,
                KV_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, STAGES,
            )  # fmt: skip
            base = part.to(tl.int64) * T * Q_HEADS + rows
            tl.store(part_acc + base[:, None] * HEAD_DIM + d[None, :], acc, mask=ok[:, None] & d_ok[None, :])
            tl.store(part_ml + base * 2, m, mask=ok)
            tl.store(part_ml + base * 2 + 1, total, mask=ok)


@triton.jit(do_not_specialize=["T", "window"])
def _combine_kernel(
    part_acc, part_ml, positions, row_last, out, T, window,
    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, group of heads): merges the row's splits in order. Splits past the row's last key are not read."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head_ok = head < Q_HEADS
    ok = head_ok[:, None] & (d < HEAD_DIM)[None, :]
    last = tl.load(row_last + row)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(tl.load(positions + row) - window + 1, 0) // SPLIT
    for split in tl.range(low, tl.cdiv(last + 1, SPLIT)):
        base = (tl.cast(T, tl.int64) * split + row) * Q_HEADS + head
        m_s = tl.load(part_ml + base * 2, mask=head_ok, other=float("-inf"))
        total_s = tl.load(part_ml + base * 2 + 1, mask=head_ok, other=0.0)
        acc_s = tl.load(part_acc + base[:, None] * HEAD_DIM + d[None, :], mask=ok, other=0.0)
        m, total, acc = _merge(m, total, acc, m_s, total_s, acc_s)
    safe = tl.where(total > 0.0, total, 1.0)
    o = tl.div_rn(acc, tl.zeros_like(acc) + safe[:, None])
    rows = row.to(tl.int64) * Q_HEADS + head
    tl.store(out + rows[:, None] * HEAD_DIM + d[None, :], o.to(out.dtype.element_ty), mask=ok)


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of one forward share: the schedule and the device-side list of work."""

    whole: bool
    programs: int
    work_start: Tensor  # [R + 1] int32
    row_last: Tensor  # [T] int32, the last key a row sees, -1 for padding
    part_acc: Tensor | None  # [splits, T, heads, D] float32
    part_ml: Tensor | None  # [splits, T, heads, 2] float32
    steps: int


def max_items(batch: ForwardBatch, group: int, kv_heads: int, whole: bool) -> int:
    """An upper bound of the number of work items, from host-side sizes alone."""
    tokens = ROW_TILE // group
    tiles = min(batch.num_rows, batch.num_requests + batch.num_rows // tokens)
    splits = 1 if whole else triton.cdiv(max(1, batch.max_kv_len), SPLIT_KEYS)
    return tiles * splits * kv_heads


def prefers_whole(rows: int, requests: int, kv_heads: int, group: int, num_sms: int) -> bool:
    """Enough row tiles to fill the device, or too many rows for partial results."""
    tiles = max(requests, rows // (ROW_TILE // group))
    return rows > 512 or tiles * kv_heads >= 4 * num_sms


def make_plan(
    batch: ForwardBatch, q_heads: int, kv_heads: int, head_dim: int, num_sms: int, whole: bool | None = None
) -> AttentionPlan:
    """Sizes by batch.max_kv_len and the row counts (host side); lengths are read on the device."""
    device = batch.kv_len.device
    rows, requests = batch.num_rows, batch.num_requests
    group = q_heads // kv_heads
    splits = triton.cdiv(max(1, batch.max_kv_len), SPLIT_KEYS)
    if whole is None:
        whole = prefers_whole(rows, requests, kv_heads, group, num_sms)
        whole = whole or splits * rows * q_heads * head_dim * 4 > MAX_PARTIAL_BYTES
    work_start = torch.empty(requests + 1, dtype=torch.int32, device=device)
    row_last = torch.empty(rows, dtype=torch.int32, device=device)
    steps = max(1, requests.bit_length() + 1)
    block_t = 256
    _plan_kernel[(1 + triton.cdiv(rows, block_t),)](
        batch.q_start, batch.kv_len, batch.positions, work_start, row_last, requests, rows,
        TOKENS=ROW_TILE // group, SPLIT=SPLIT_KEYS, WHOLE=whole, CAUSAL=batch.causal,
        BLOCK_R=max(16, next_power_of_2(requests)), BLOCK_T=block_t, STEPS=steps, num_warps=4,
    )  # fmt: skip
    part_acc = part_ml = None
    if not whole:
        part_acc = torch.empty((splits, rows, q_heads, head_dim), dtype=torch.float32, device=device)
        part_ml = torch.empty((splits, rows, q_heads, 2), dtype=torch.float32, device=device)
    programs = min(max_items(batch, group, kv_heads, whole), num_sms * 4)
    return AttentionPlan(whole, max(1, programs), work_start, row_last, part_acc, part_ml, steps)


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: ForwardBatch,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
    pdl: bool = False,
) -> Tensor:
    """q [T, heads, D], pools of one layer [slots, kv heads, D] -> out [T, heads * D], all in the model's dtype."""
    rows, q_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    block_d = max(16, next_power_of_2(head_dim))
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    part_acc = out if plan.part_acc is None else plan.part_acc
    part_ml = out if plan.part_ml is None else plan.part_ml
    has_window = window is not None
    _attention_kernel[(plan.programs,)](
        q, k_pool, v_pool, out, part_acc, part_ml, batch.q_start, batch.kv_len, batch.positions, plan.row_last,
        batch.page_table, batch.page_table.stride(0), plan.work_start, batch.num_requests, rows, scale * LOG2_E, window or 0,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=ROW_TILE, BLOCK_N=KEY_BLOCK,
        SPLIT=SPLIT_KEYS, PAGE=batch.page_size, STEPS=plan.steps, WHOLE=plan.whole, HAS_WINDOW=has_window,
        STAGES=2, PDL=pdl, num_warps=4, **launch,
    )  # fmt: skip
    if not plan.whole:
        _combine_kernel[(rows, triton.cdiv(q_heads, COMBINE_HEADS))](
            part_acc, part_ml, batch.positions, plan.row_last, out, rows, window or 0, Q_HEADS=q_heads, HEAD_DIM=head_dim,
            BLOCK_D=block_d, BLOCK_H=COMBINE_HEADS, SPLIT=SPLIT_KEYS, HAS_WINDOW=has_window, PDL=pdl,
            num_warps=4, **launch,
        )  # fmt: skip
    return out
