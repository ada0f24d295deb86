"""Kernels of a captured decode round: index tensors from a few numbers per request, and the sequential draw of a block.

Notation: R requests of a bucket, G draft tokens, V vocabulary, r rank of the sequential head.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.markov import FEW, draw_step_few, winner_kernel
from exactspec.backend.cuda.sampling import to_gumbel
from exactspec.backend.cuda.tiles import next_power_of_2
from exactspec.types import ForwardBatch

TOKENS_PER_PROGRAM = 128
REQUESTS_PER_PROGRAM = 16


@dataclass(slots=True)
class RoundInputs:
    """What the host says of each request, in buffers whose addresses a graph keeps. Inactive rows are padding."""

    anchors: Tensor  # [R] int64
    positions: Tensor  # [R] int64, the anchor's
    seeds: Tensor  # [R] int64
    output_positions: Tensor  # [R] int64, of the first draw
    active: Tensor  # [R] int64, 0 or 1
    temperatures: Tensor  # [R] float32, 0 for greedy
    page_table: Tensor  # [R, P] int32

    def first(self, count: int) -> RoundInputs:
        """The first `count` requests, as views."""
        return RoundInputs(
            self.anchors[:count], self.positions[:count], self.seeds[:count], self.output_positions[:count],
            self.active[:count], self.temperatures[:count], self.page_table[:count],
        )  # fmt: skip


@triton.jit
def _rows_kernel(
    anchors, positions, seeds, output_positions, active, temperatures, page_table, page_stride,
    token_ids, row_positions, slots, kv_len, q_start, row_seeds, row_outputs, row_temperatures, fill_id,
    R, PAGE: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: the rows anchor .. anchor + NUM_ROWS - 1 of request r; rows of padding write nowhere."""
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    ok = lane < NUM_ROWS
    is_active = tl.load(active + r) != 0
    position = tl.where(is_active, tl.load(positions + r), 0).to(tl.int32)
    at = position + lane
    page = tl.load(
        page_table + r * page_stride + at // PAGE, mask=ok & (lane * 0 + is_active.to(tl.int32) > 0), other=0
    )
    row = r * NUM_ROWS + lane
    tl.store(row_positions + row, at, mask=ok)
    tl.store(slots + row, tl.where(lane * 0 + is_active.to(tl.int32) > 0, page * PAGE + at % PAGE, -1), mask=ok)
    anchor = tl.load(anchors + r)
    tl.store(token_ids + row, tl.where(lane == 0, anchor, fill_id), mask=ok)
    tl.store(kv_len + r, tl.where(is_active, position + NUM_ROWS, 0))
    tl.store(q_start + r, r * NUM_ROWS)
    if r == R - 1:
        tl.store(q_start + R, R * NUM_ROWS)
    tl.store(row_seeds + row, tl.load(seeds + r) + lane * 0, mask=ok)
    tl.store(row_outputs + row, tl.load(output_positions + r) + lane, mask=ok)
    tl.store(row_temperatures + row, tl.load(temperatures + r) + lane * 0.0, mask=ok)


@dataclass(slots=True)
class RoundRows:
    """Rows of all requests of a bucket as a ForwardBatch, and what their draws need."""

    batch: ForwardBatch
    seeds: Tensor  # [T] int64
    output_positions: Tensor  # [T] int64
    temperatures: Tensor  # [T] float32


def draft_rows(inputs: RoundInputs, num_rows: int, page_size: int, fill_id: int) -> RoundRows:
    """Rows that see each other, at positions anchor .. anchor + num_rows - 1. Token ids: the anchor, then fill_id."""
    count, width = inputs.page_table.shape
    device = inputs.anchors.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    total = count * num_rows
    token_ids = empty(total, torch.int64)
    row_positions, slots = empty(total, torch.int32), empty(total, torch.int32)
    kv_len, q_start = empty(count, torch.int32), empty(count + 1, torch.int32)
    seeds, outputs = empty(total, torch.int64), empty(total, torch.int64)
    temperatures = empty(total, torch.float32)
    _rows_kernel[(count,)](
        inputs.anchors, inputs.positions, inputs.seeds, inputs.output_positions, inputs.active, inputs.temperatures,
        inputs.page_table, inputs.page_table.stride(0), token_ids, row_positions, slots, kv_len, q_start, seeds,
        outputs, temperatures, fill_id, count, PAGE=page_size, NUM_ROWS=num_rows,
        BLOCK=next_power_of_2(num_rows), num_warps=1,
    )  # fmt: skip
    batch = ForwardBatch(
        token_ids=token_ids, positions=row_positions, slots=slots, q_start=q_start, kv_len=kv_len,
        page_table=inputs.page_table, logit_rows=empty(0, torch.int64), page_size=page_size, causal=False,
        max_kv_len=width * page_size, max_q_len=num_rows,
    )  # fmt: skip
    return RoundRows(batch, seeds, outputs, temperatures)


@triton.jit
def _block_noise(seeds, positions, STREAM: tl.constexpr, chunk, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr):
    """Gumbel noise [BLOCK_V, BLOCK_R] of a chunk's tokens for many (seed, position) pairs."""
    group = (chunk * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)).to(tl.uint32)[:, None]
    shape = group * 0 + (positions * 0).to(tl.uint32)[None, :]
    low = shape + (positions & 0xFFFFFFFF).to(tl.uint32)[None, :]
    high = shape + ((positions >> 32) & 0xFFFFFFFF).to(tl.uint32)[None, :]
    key = seeds[None, :] + shape.to(tl.int64)
    w0, w1, w2, w3 = tl.philox(key, shape + group, low, high, shape + STREAM)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.permute(tl.reshape(words, (BLOCK_V // 4, BLOCK_R, 4)), (0, 2, 1))
    return to_gumbel(tl.reshape(words, (BLOCK_V, BLOCK_R)))


@triton.jit(do_not_specialize=["R"])
def _step_kernel(
    base, base_stride, latent, w2, temperatures, seeds, positions, step, part_score, part_id, R, VALID, CHUNKS,
    RANK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, STREAM: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Program (chunk of tokens, tile of requests): best of (base + w2 @ latent) / T + noise in the chunk."""
    chunk = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    r_ok = r < R
    w = tl.load(
        w2 + token.to(tl.int64)[:, None] * RANK + k[None, :],
        mask=(token < VALID)[:, None] & (k < RANK)[None, :],
        other=0.0,
    )
    u = tl.load(latent + r[None, :] * RANK + k[:, None], mask=r_ok[None, :] & (k < RANK)[:, None], other=0.0)
    ok = (token < VALID)[:, None] & r_ok[None, :]
    score = tl.load(base + r.to(tl.int64)[None, :] * base_stride + token[:, None], mask=ok, other=float("-inf"))
    score = tl.dot(w, u.to(w.dtype), score)
    if not GREEDY:
        temperature = tl.load(temperatures + r, mask=r_ok, other=0.0)[None, :]
        position = tl.load(positions + r, mask=r_ok, other=0) + step
        noise = _block_noise(tl.load(seeds + r, mask=r_ok, other=0), position, STREAM, chunk, BLOCK_V, BLOCK_R)
        hot = tl.where(temperature > 0.0, temperature, 1.0) + score * 0.0
        score = tl.where(temperature + score * 0.0 > 0.0, score / hot + noise, score)
    score = tl.where(ok, score, float("-inf"))
    top = tl.max(score, 0)
    best = tl.min(tl.where(score == top[None, :], token[:, None], 2147483647), 0)
    tl.store(part_score + r * CHUNKS + chunk, top, mask=r_ok)
    tl.store(part_id + r * CHUNKS + chunk, best, mask=r_ok)


def draw_step(
    base: Tensor,
    latent: Tensor,
    w2: Tensor,
    w1: Tensor,
    step: int,
    ids: Tensor,
    previous: Tensor,
    sampled: tuple[Tensor, Tensor, Tensor] | None,
    stream: int,
    valid_vocab: int,
) -> None:
    """Draws draft position `step` for all requests: ids[r] = argmax((base[r] + w2 @ latent[r]) / T + noise).

    base [R, V] float32 and ids [R] int64 may be strided; latent [R, r] float32, w1 and w2 [V, r];
    previous [R, r] float32 receives w1[ids]. sampled: (temperatures, seeds, output positions) [R] or None.
    """
    count, rank = latent.shape
    if count <= FEW:
        draw_step_few(base, latent, w2, w1, step, ids, previous, sampled, stream, valid_vocab)
        return
    chunks = triton.cdiv(valid_vocab, TOKENS_PER_PROGRAM)
    score = torch.empty((count, chunks), dtype=torch.float32, device=base.device)
    token = torch.empty((count, chunks), dtype=torch.int32, device=base.device)
    temperatures, seeds, positions = sampled or (latent, ids, ids)
    block_k = max(16, next_power_of_2(rank))
    _step_kernel[(chunks, triton.cdiv(count, REQUESTS_PER_PROGRAM))](
        base, base.stride(0), latent, w2, temperatures, seeds, positions, step, score, token, count, valid_vocab,
        chunks, RANK=rank, BLOCK_K=block_k, BLOCK_V=TOKENS_PER_PROGRAM, BLOCK_R=REQUESTS_PER_PROGRAM, STREAM=stream,
        GREEDY=sampled is None, num_warps=4,
    )  # fmt: skip
    winner_kernel[(count,)](
        score, token, ids, ids.stride(0), w1, previous, chunks, w1.shape[0], RANK=rank, BLOCK_K=block_k,
        BLOCK=next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
