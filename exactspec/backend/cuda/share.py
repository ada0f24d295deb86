"""Which drafts a captured round verifies, and where their rows stand: the verify batch is ragged, of a fixed row count.

The host says how many drafts a round verifies in all, before they are drafted (a graph has one number of rows). The
device gives those places to the drafts that are likeliest to survive, over all requests (DSpark, arXiv 2607.05147,
section 3.2: in falling order of prefix survival). Every request keeps its anchor row.

Notation: R requests of a bucket, G draft tokens, T rows of the batch: R anchors, and the places.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.decode import RoundInputs, RoundRows
from exactspec.backend.cuda.seats import LIMIT, MOST_DRAFTS
from exactspec.backend.cuda.tiles import next_power_of_2
from exactspec.types import ForwardBatch

REQUESTS_AT_ONCE = 16
ROWS_AT_ONCE = 64


@triton.jit
def _survivals(message, stride, positions, active, survival, r, lane, R, G: tl.constexpr):
    """[requests, drafts]: survival of the drafts that may be verified, -1 for the others."""
    is_row = r < R
    room = tl.load(message + LIMIT * stride + r, mask=is_row, other=0) - tl.load(positions + r, mask=is_row, other=0)
    room = tl.minimum(room - 2, tl.load(message + MOST_DRAFTS * stride + r, mask=is_row, other=0))
    room = tl.where(tl.load(active + r, mask=is_row, other=0) != 0, room, 0)
    counts = (lane[None, :] < room[:, None]) & (lane < G)[None, :]
    return tl.where(counts, tl.load(survival + r[:, None] * G + lane[None, :], mask=counts, other=0.0), -1.0)


@triton.jit(do_not_specialize=["R", "places"])
def _share_kernel(
    message, stride, positions, active, survival, lens, R, places, G: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program r: of request r's drafts, those with fewer than `places` drafts before them in the order. Equal ones go
    by place in the block, then by request, so that survivals that are the same for all are shared evenly."""
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    room = tl.load(message + LIMIT * stride + r) - tl.load(positions + r) - 2  # RunningRequest.draft_room
    room = tl.minimum(room, tl.load(message + MOST_DRAFTS * stride + r)) * tl.load(active + r)
    counts = (lane < room) & (lane < G)
    own = tl.where(counts, tl.load(survival + r * G + lane, mask=counts, other=0.0), -1.0)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, R, BLOCK_R):
        other = start + tl.arange(0, BLOCK_R)
        theirs = _survivals(message, stride, positions, active, survival, other, lane, R, G)
        order = lane[None, :] * R + other[:, None]
        theirs = tl.reshape(theirs, (1, BLOCK_R * BLOCK))
        order = tl.reshape(order, (1, BLOCK_R * BLOCK))
        earlier = order < (lane * R + r)[:, None]
        ahead = (theirs > own[:, None]) | ((theirs == own[:, None]) & earlier)
        before += tl.sum((ahead & (theirs >= 0.0)).to(tl.int32), 1)
    tl.store(lens + r, tl.sum(((own >= 0.0) & (before < places)).to(tl.int64), 0))


def share_places(message: Tensor, inputs: RoundInputs, survival: Tensor, places: int) -> Tensor:
    """How many drafts of each request are verified: [R] int64, `places` in all or as many as there are.

    survival [R, G] float32, within 0 .. 1 and falling along a block (so that the likeliest drafts are prefixes).
    """
    count, gamma = survival.shape
    lens = torch.empty(count, dtype=torch.int64, device=survival.device)
    _share_kernel[(count,)](
        message, message.stride(0), inputs.positions, inputs.active, survival, lens, count, places, G=gamma,
        BLOCK=max(2, next_power_of_2(gamma)), BLOCK_R=REQUESTS_AT_ONCE, num_warps=1,
    )  # fmt: skip
    return lens


@triton.jit(do_not_specialize=["R", "T"])
def _ragged_kernel(
    lens, anchors, positions, seeds, output_positions, active, temperatures, page_table, page_stride, drafts,
    draft_stride, token_ids, row_positions, slots, kv_len, q_start, row_seeds, row_outputs, row_temperatures, R, T,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Program r: the rows of request r, behind those of the requests before it. Program R: the rows of nobody."""
    r = tl.program_id(0)
    every = tl.arange(0, BLOCK_R)
    first = tl.sum(tl.load(lens + every, mask=every < r, other=-1) + 1, 0)
    tl.store(q_start + r, first)
    if r == R:
        at_end = tl.arange(0, TAIL)
        for start in tl.range(first, T, TAIL):
            nobody = start + at_end
            there = nobody < T
            tl.store(token_ids + nobody, at_end * 0, mask=there)
            tl.store(row_positions + nobody, at_end * 0, mask=there)
            tl.store(slots + nobody, at_end * 0 - 1, mask=there)
            tl.store(row_seeds + nobody, at_end * 0, mask=there)
            tl.store(row_outputs + nobody, at_end * 0, mask=there)
            tl.store(row_temperatures + nobody, at_end * 0.0, mask=there)
    else:
        lane = tl.arange(0, BLOCK)
        length = tl.load(lens + r)
        ok = lane <= length
        is_active = tl.load(active + r) != 0
        position = tl.where(is_active, tl.load(positions + r), 0).to(tl.int32)
        at = position + lane
        writes = ok & (lane * 0 + is_active.to(tl.int32) > 0)
        page = tl.load(page_table + r * page_stride + at // PAGE, mask=writes, other=0)
        row = first + lane
        token = tl.load(drafts + r * draft_stride + lane - 1, mask=ok & (lane > 0), other=0)
        tl.store(token_ids + row, tl.where(lane == 0, tl.load(anchors + r), token), mask=ok)
        tl.store(row_positions + row, at, mask=ok)
        tl.store(slots + row, tl.where(writes, page * PAGE + at % PAGE, -1), mask=ok)
        tl.store(kv_len + r, tl.where(is_active, position + 1 + length.to(tl.int32), 0))
        tl.store(row_seeds + row, tl.load(seeds + r) + lane * 0, mask=ok)
        tl.store(row_outputs + row, tl.load(output_positions + r) + lane, mask=ok)
        tl.store(row_temperatures + row, tl.load(temperatures + r) + lane * 0.0, mask=ok)


def verify_rows(inputs: RoundInputs, lens: Tensor, drafts: Tensor, num_rows: int, page_size: int) -> RoundRows:
    """The verify batch: each request's anchor and its first lens[r] drafts, end to end, in num_rows rows.

    lens [R] int64, with R + sum at most num_rows; drafts [R, G] int64. Rows behind the last request's belong to nobody
    and write no K/V, nor do those of inactive requests.
    """
    (count, width), gamma = inputs.page_table.shape, drafts.shape[1]
    device = lens.device

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    token_ids = empty(num_rows, torch.int64)
    row_positions, slots = empty(num_rows, torch.int32), empty(num_rows, torch.int32)
    kv_len, q_start = empty(count, torch.int32), empty(count + 1, torch.int32)
    seeds, outputs = empty(num_rows, torch.int64), empty(num_rows, torch.int64)
    temperatures = empty(num_rows, torch.float32)
    _ragged_kernel[(count + 1,)](
        lens, inputs.anchors, inputs.positions, inputs.seeds, inputs.output_positions, inputs.active,
        inputs.temperatures, inputs.page_table, inputs.page_table.stride(0), drafts, drafts.stride(0), token_ids,
        row_positions, slots, kv_len, q_start, seeds, outputs, temperatures, count, num_rows, PAGE=page_size,
        BLOCK=max(2, next_power_of_2(gamma + 1)), BLOCK_R=next_power_of_2(count), TAIL=ROWS_AT_ONCE, num_warps=1,
    )  # fmt: skip
    batch = ForwardBatch(
        token_ids=token_ids, positions=row_positions, slots=slots, q_start=q_start, kv_len=kv_len,
        page_table=inputs.page_table, logit_rows=empty(0, torch.int64), page_size=page_size, causal=True,
        max_kv_len=width * page_size, max_q_len=gamma + 1,
    )  # fmt: skip
    return RoundRows(batch, seeds, outputs, temperatures)
