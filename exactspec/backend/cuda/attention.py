"""Ragged paged attention whose bits for a row depend on the row and its keys alone.

Keys run in blocks of 64 anchored at position 0, in order, inside fixed splits of SPLIT_KEYS keys; the splits' partial
results are merged in order. A key that a row may not see contributes an exact zero, so neither other rows of a tile nor
keys beyond the row's last one change anything. One row tile serves every q_len, because the layout of the reduction
follows it. Two schedules give the same bits: `whole` walks all splits of a row tile in one program, `split` gives each
split to a program of its own and merges in a second kernel. Twin: twins.attention.
"""

from __future__ import annotations

# ruff: noqa: N803, N806 (kernels write sizes in capitals, as the field does)
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.launch import OFF, launch_options, wait_for_input
from exactspec.backend.cuda.tiles import next_power_of_2
from exactspec.types import ForwardBatch

KEY_BLOCK = 64
SPLIT_KEYS = 256
ROW_TILE = 64
MAX_PARTIAL_BYTES = 1 << 29
COMBINE_HEADS = 8
NUM_WARPS = 4
PROGRAMS_PER_SM = 2
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["R", "T"])
def _plan_kernel(
    q_start, kv_len, positions, items, num_items, row_last, R, T,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r lists request r's work items (first row, end of rows, request, split) and its rows' last keys.

    Program R writes the number of items and marks the padding rows. No search: each program sums what lies before it.
    """
    r = tl.program_id(0)
    every = tl.arange(0, BLOCK_R)
    before = every < r
    lens = tl.load(q_start + every + 1, mask=before, other=0) - tl.load(q_start + every, mask=before, other=0)
    counts = (lens + TOKENS - 1) // TOKENS
    if not WHOLE:
        counts = counts * ((tl.load(kv_len + every, mask=before, other=0) + SPLIT - 1) // SPLIT)
    first_item = tl.sum(counts, 0)
    lane = tl.arange(0, BLOCK)
    low = tl.load(q_start + r)
    if r == R:
        tl.store(num_items, first_item)
        for start in tl.range(low, T, BLOCK):
            tl.store(row_last + start + lane, lane * 0 - 1, mask=start + lane < T)
    else:
        high = tl.load(q_start + r + 1)
        keys = tl.load(kv_len + r)
        splits = 1 if WHOLE else tl.maximum((keys + SPLIT - 1) // SPLIT, 1)
        tiles = (high - low + TOKENS - 1) // TOKENS
        count = tiles if WHOLE else tiles * ((keys + SPLIT - 1) // SPLIT)
        for start in tl.range(0, count, BLOCK):
            item = start + lane
            ok = item < count
            at = items + (first_item + item) * 4
            tl.store(at, low + item // splits * TOKENS, mask=ok)
            tl.store(at + 1, lane * 0 + high, mask=ok)
            tl.store(at + 2, lane * 0 + r, mask=ok)
            tl.store(at + 3, item % splits, mask=ok)
        for start in tl.range(low, high, BLOCK):
            row = start + lane
            ok = row < high
            last = lane * 0 + keys - 1
            if CAUSAL:
                last = tl.load(positions + row, mask=ok, other=0)
            tl.store(row_last + row, last, mask=ok)


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
    lane = tl.arange(0, BLOCK_N)
    # pages are known a block ahead, so that loads of keys and values depend on nothing that is still on its way
    page = tl.load(pages + (low + lane) // PAGE, mask=low + lane < high, other=0)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key = start + lane
        there = key < high
        offset = (page.to(tl.int64) * PAGE + key % PAGE) * KV_STRIDE
        page = tl.load(pages + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < high, other=0)
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


@triton.jit(do_not_specialize=["T", "window"])
def _attention_kernel(
    q, k_pool, v_pool, out, part_acc, part_ml, positions, row_last, page_table, page_stride, items, num_items,
    T, scale, window,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent over work items (request, row tile, split unless WHOLE) x kv head; tile rows are tokens x group."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    KV_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    lane = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    pid = tl.program_id(0)
    total_items = tl.load(num_items) * KV_HEADS
    at = items + pid // KV_HEADS * 4
    row0, row_end, r, part = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    wait_for_input(PDL)  # the plan is complete before any kernel of the first layer starts: items may be read before
    for item in tl.range(pid, total_items, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        token = row0 + lane // GROUP
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
        pages = page_table + tl.cast(r, tl.int64) * page_stride
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
            o = acc * tl.div_rn(1.0, safe)[:, None]
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
            # a row whose keys all lie in split 0 is finished here: merging one split changes no bit
            done = ok & (last < SPLIT - part * SPLIT)
            some = ok & (last >= SPLIT)
            safe = tl.where(total > 0.0, total, 1.0)
            o = (acc * tl.div_rn(1.0, safe)[:, None]).to(out.dtype.element_ty)
            tl.store(out + rows[:, None] * HEAD_DIM + d[None, :], o, mask=done[:, None] & d_ok[None, :])
            base = tl.cast(part, tl.int64) * T * Q_HEADS + rows
            tl.store(part_acc + base[:, None] * HEAD_DIM + d[None, :], acc, mask=some[:, None] & d_ok[None, :])
            tl.store(part_ml + base * 2, m, mask=some)
            tl.store(part_ml + base * 2 + 1, total, mask=some)
        next_at = items + tl.minimum(item + tl.num_programs(0), total_items - 1) // KV_HEADS * 4
        row0, row_end = tl.load(next_at), tl.load(next_at + 1)
        r, part = tl.load(next_at + 2), tl.load(next_at + 3)


@triton.jit
def _load_part(part_acc, part_ml, split, end, T, row, head, d, ok, Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A split's partial result; beyond the last split, the last one's once more."""
    base = (tl.cast(T, tl.int64) * tl.minimum(split, end - 1) + row) * Q_HEADS + head
    m = tl.load(part_ml + base * 2, mask=head < Q_HEADS, other=float("-inf"))
    total = tl.load(part_ml + base * 2 + 1, mask=head < Q_HEADS, other=0.0)
    acc = tl.load(part_acc + base[:, None] * HEAD_DIM + d[None, :], mask=ok, other=0.0)
    return m, total, acc


@triton.jit
def _merge_if(there, m, total, acc, m_s, total_s, acc_s):
    """_merge where there [rows] is such a split."""
    m_new, total_new, acc_new = _merge(m, total, acc, m_s, total_s, acc_s)
    return tl.where(there, m_new, m), tl.where(there, total_new, total), tl.where(there[:, None], acc_new, acc)


@triton.jit(do_not_specialize=["T", "window"])
def _combine_kernel(
    part_acc, part_ml, positions, row_last, out, T, window,
    Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, group of heads): merges the splits of a row with more than one, up to its last key, in order."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    head_ok = head < Q_HEADS
    ok = head_ok[:, None] & (d < HEAD_DIM)[None, :]
    last = tl.load(row_last + row)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(tl.load(positions + row) - window + 1, 0) // SPLIT
    wait_for_input(PDL)
    if last >= SPLIT:
        m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        end, same = tl.cdiv(last + 1, SPLIT), head * 0
        for start in tl.range(low, end, 4):  # four at once: one after the other, each would wait for its own loads
            m0, t0, a0 = _load_part(part_acc, part_ml, start, end, T, row, head, d, ok, Q_HEADS, HEAD_DIM)
            m1, t1, a1 = _load_part(part_acc, part_ml, start + 1, end, T, row, head, d, ok, Q_HEADS, HEAD_DIM)
            m2, t2, a2 = _load_part(part_acc, part_ml, start + 2, end, T, row, head, d, ok, Q_HEADS, HEAD_DIM)
            m3, t3, a3 = _load_part(part_acc, part_ml, start + 3, end, T, row, head, d, ok, Q_HEADS, HEAD_DIM)
            m, total, acc = _merge(m, total, acc, m0, t0, a0)
            m, total, acc = _merge_if(start + 1 + same < end, m, total, acc, m1, t1, a1)
            m, total, acc = _merge_if(start + 2 + same < end, m, total, acc, m2, t2, a2)
            m, total, acc = _merge_if(start + 3 + same < end, m, total, acc, m3, t3, a3)
        safe = tl.where(total > 0.0, total, 1.0)
        o = acc * tl.div_rn(1.0, safe)[:, None]
        rows = tl.cast(row, tl.int64) * Q_HEADS + head
        tl.store(out + rows[:, None] * HEAD_DIM + d[None, :], o.to(out.dtype.element_ty), mask=ok)


@cache
def _num_stages(block_d: int, device: torch.device) -> int:
    """Blocks of keys and values on their way: two while one is used, where two such programs fit a multiprocessor."""
    if device.type != "cuda":
        return 2
    room = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    block = KEY_BLOCK * block_d * 2
    return 3 if PROGRAMS_PER_SM * (ROW_TILE * block_d * 2 + 3 * 2 * block + 1024) <= room else 2


@dataclass(slots=True)
class AttentionPlan:
    """What all layers of one forward share: the schedule and the device-side list of work."""

    whole: bool
    programs: int
    items: Tensor  # [most items, 4] int32
    num_items: Tensor  # [1] int32
    row_last: Tensor  # [T] int32, the last key a row sees, -1 for padding
    part_acc: Tensor | None  # [splits, T, heads, D] float32
    part_ml: Tensor | None  # [splits, T, heads, 2] float32


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
    most = max_items(batch, group, kv_heads, whole)
    items = torch.empty((most // kv_heads, 4), dtype=torch.int32, device=device)
    num_items = torch.empty(1, dtype=torch.int32, device=device)
    row_last = torch.empty(rows, dtype=torch.int32, device=device)
    _plan_kernel[(requests + 1,)](
        batch.q_start, batch.kv_len, batch.positions, items, num_items, row_last, requests, rows,
        TOKENS=ROW_TILE // group, SPLIT=SPLIT_KEYS, WHOLE=whole, CAUSAL=batch.causal,
        BLOCK_R=max(16, next_power_of_2(requests)), BLOCK=128, num_warps=4,
    )  # fmt: skip
    part_acc = part_ml = None
    if not whole:
        part_acc = torch.empty((splits, rows, q_heads, head_dim), dtype=torch.float32, device=device)
        part_ml = torch.empty((splits, rows, q_heads, 2), dtype=torch.float32, device=device)
    programs = min(most, num_sms * PROGRAMS_PER_SM)
    return AttentionPlan(whole, programs, items, num_items, row_last, part_acc, part_ml)


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: ForwardBatch,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    out: Tensor,
    pdl: int = OFF,
    merge_pdl: int = OFF,
) -> Tensor:
    """q [T, heads, D], pools of one layer [slots, kv heads, D] -> out [T, heads * D], all in the model's dtype."""
    rows, q_heads, head_dim = q.shape
    kv_heads = k_pool.shape[1]
    block_d = max(16, next_power_of_2(head_dim))
    launch = launch_options(pdl)
    part_acc = out if plan.part_acc is None else plan.part_acc
    part_ml = out if plan.part_ml is None else plan.part_ml
    has_window = window is not None
    _attention_kernel[(plan.programs,)](
        q, k_pool, v_pool, out, part_acc, part_ml, batch.positions, plan.row_last, batch.page_table,
        batch.page_table.stride(0), plan.items, plan.num_items, rows, scale * LOG2_E, window or 0,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=ROW_TILE, BLOCK_N=KEY_BLOCK,
        SPLIT=SPLIT_KEYS, PAGE=batch.page_size, WHOLE=plan.whole, HAS_WINDOW=has_window,
        STAGES=_num_stages(block_d, q.device), PDL=pdl, num_warps=NUM_WARPS, **launch,
    )  # fmt: skip
    if not plan.whole:
        _combine_kernel[(rows, triton.cdiv(q_heads, COMBINE_HEADS))](
            part_acc, part_ml, batch.positions, plan.row_last, out, rows, window or 0, Q_HEADS=q_heads,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_H=COMBINE_HEADS, SPLIT=SPLIT_KEYS, HAS_WINDOW=has_window,
            PDL=merge_pdl, num_warps=4, **launch_options(merge_pdl),
        )  # fmt: skip
    return out
