"""State of requests that stays on the device from round to round: a round can start before the host has read the last.

A request in captured rounds has a seat: its newest token, that token's position, its page table. A round's rows name
their seats in the message from the host. `take_seats` turns the message into the round's inputs, with the host's token
and position or, where the message says `carried`, with those that the round before left in the seat. `judge` decides
which drafts are accepted and leaves the next anchor in the seat. A request that has reached its length limit is
inactive from then on: its rows write no K/V.

Notation: R requests of a bucket, S seats, P pages of a seat, G draft tokens.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.decode import RoundInputs
from exactspec.backend.cuda.tiles import next_power_of_2


class Field(IntEnum):
    """Rows of a message [NUM_FIELDS, R] int64."""

    SEAT = 0
    CARRIED = 1  # 1: anchor and position are the seat's
    ANCHOR = 2
    POSITION = 3  # of the anchor
    SEED = 4
    OUTPUT_OFFSET = 5  # output position of the draw after the anchor, less the anchor's position
    LIMIT = 6  # tokens of prompt and output at which the request ends
    ACTIVE = 7  # 0: padding
    MOST_DRAFTS = 8  # drafts that count; fewer count where LIMIT is near
    DECREE = 9  # accepted drafts by decree (benchmarks), or -1: those that were drawn
    PAGE_INDEX = 10  # place in the page table that this round fills, or -1
    PAGE = 11  # the page that goes there
    TEMPERATURE = 12  # as float32 in the low half; 0 is greedy
    DIVISOR = 13  # as float32: what logits are divided by for logprobs; 0 asks for none


NUM_FIELDS = len(Field)
PAGES_AT_ONCE = 1024
SEAT, CARRIED, ANCHOR, POSITION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SEED, OUTPUT_OFFSET, LIMIT, ACTIVE = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
MOST_DRAFTS, DECREE, PAGE_INDEX, PAGE = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11)
TEMPERATURE, DIVISOR = tl.constexpr(12), tl.constexpr(13)


@dataclass(slots=True)
class Seats:
    """What stays on the device."""

    anchors: Tensor  # [S] int64
    positions: Tensor  # [S] int64
    page_table: Tensor  # [S, P] int32


def make_seats(count: int, pages: int, device: torch.device) -> Seats:
    anchors, positions = torch.zeros((2, count), dtype=torch.int64, device=device).unbind(0)
    return Seats(anchors, positions, torch.zeros((count, pages), dtype=torch.int32, device=device))


@triton.jit
def _float(number):
    """The float32 in the low half of an int64."""
    return (number & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _take_kernel(
    message, stride, seat_anchors, seat_positions, seat_pages, anchors, positions, seeds, output_positions, active,
    temperatures, page_table, P, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: inputs of row r of the bucket."""
    r = tl.program_id(0)
    seat = tl.load(message + SEAT * stride + r)
    carried = tl.load(message + CARRIED * stride + r) != 0
    anchor = tl.load(message + ANCHOR * stride + r)
    position = tl.load(message + POSITION * stride + r)
    if carried:
        anchor = tl.load(seat_anchors + seat)
        position = tl.load(seat_positions + seat)
    goes_on = (tl.load(message + ACTIVE * stride + r) != 0) & (position + 1 < tl.load(message + LIMIT * stride + r))
    tl.store(anchors + r, anchor)
    tl.store(positions + r, position)
    tl.store(seeds + r, tl.load(message + SEED * stride + r))
    tl.store(output_positions + r, position + tl.load(message + OUTPUT_OFFSET * stride + r))
    tl.store(active + r, goes_on.to(tl.int64))
    tl.store(temperatures + r, _float(tl.load(message + TEMPERATURE * stride + r)))
    index = tl.load(message + PAGE_INDEX * stride + r)
    page = tl.load(message + PAGE * stride + r).to(tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(seat_pages + seat * P + at, mask=at < P, other=0)
        pages = tl.where(at == index, page, pages)
        tl.store(seat_pages + seat * P + at, pages, mask=(at < P) & (at == index))
        tl.store(page_table + r * P + at, pages, mask=at < P)


def take_seats(message: Tensor, seats: Seats, inputs: RoundInputs) -> None:
    """message [NUM_FIELDS, >= R] int64 -> inputs of a bucket of R requests; new pages go to the seats' page tables."""
    count, pages = inputs.page_table.shape
    _take_kernel[(count,)](
        message, message.stride(0), seats.anchors, seats.positions, seats.page_table, inputs.anchors,
        inputs.positions, inputs.seeds, inputs.output_positions, inputs.active, inputs.temperatures,
        inputs.page_table, pages, BLOCK=min(next_power_of_2(pages), PAGES_AT_ONCE), num_warps=4,
    )  # fmt: skip


class Column(IntEnum):
    """Columns of a round's results [R, num_columns(G)] int64; three runs follow: G drafts, the G + 1 tokens of the
    request's rows (the first `ACCEPTED` + 1 are emitted), G survivals of the drafts as float32 bits."""

    ACCEPTED = 0
    VERIFIED = 1  # drafts that were
    PROPOSED = 2  # drafts that could have been
    FIRST_ROW = 3  # of the request, in the batch


DRAFTS = len(Column)
FIRST_RUN = tl.constexpr(DRAFTS)


def num_columns(gamma: int) -> int:
    return DRAFTS + 3 * gamma + 1


@triton.jit
def _judge_kernel(
    message, stride, positions, active, drafts, draft_stride, survival, lens, q_start, drawn, seat_anchors,
    seat_positions, results, result_stride, emitted, divisors, G: tl.constexpr, BLOCK: tl.constexpr,
    SCORE: tl.constexpr,
):  # fmt: skip
    """Program r: results[r], and the next anchor in its seat."""
    r = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    is_active = tl.load(active + r) != 0
    position = tl.load(positions + r)
    room = tl.load(message + LIMIT * stride + r) - position - 2  # RunningRequest.draft_room
    room = tl.maximum(tl.minimum(room, tl.load(message + MOST_DRAFTS * stride + r)), 0)
    length = tl.load(lens + r)
    first = tl.load(q_start + r)
    draft = tl.load(drafts + r * draft_stride + lane, mask=lane < G, other=-1)
    token = tl.load(drawn + first + lane, mask=lane <= length, other=-2)
    differs = (lane >= length) | (draft != token)
    count = tl.min(tl.where(differs, lane, BLOCK), 0).to(tl.int64)
    decree = tl.load(message + DECREE * stride + r)
    count = tl.where(decree >= 0, tl.minimum(decree, length), count)
    last = tl.sum(tl.where(lane == count, token, 0), 0)
    seat = tl.load(message + SEAT * stride + r)
    tl.store(seat_anchors + seat, last, mask=is_active)
    tl.store(seat_positions + seat, position + count + 1, mask=is_active)
    row = results + r * result_stride
    tl.store(row, count)
    tl.store(row + 1, length)
    tl.store(row + 2, room)
    tl.store(row + 3, first.to(tl.int64))
    run = row + FIRST_RUN + lane
    tl.store(run, draft, mask=lane < G)
    token = tl.where(lane < count, draft, token)  # the same, but for decrees
    tl.store(run + G, token, mask=lane <= G)
    chance = tl.load(survival + r * G + lane, mask=lane < G, other=0.0)
    tl.store(run + 2 * G + 1, chance.to(tl.int32, bitcast=True).to(tl.int64), mask=lane < G)
    if SCORE:
        divisor = _float(tl.load(message + DIVISOR * stride + r))
        wanted = (lane <= count) & is_active
        tl.store(emitted + first + lane, token, mask=lane <= length)
        tl.store(divisors + first + lane, tl.where(wanted, divisor, 0.0), mask=lane <= length)


def judge(
    message: Tensor,
    inputs: RoundInputs,
    seats: Seats,
    drafts: Tensor,
    survival: Tensor,
    lens: Tensor,
    q_start: Tensor,
    drawn: Tensor,
    results: Tensor,
    score: bool,
) -> tuple[Tensor, Tensor] | None:
    """Coupled acceptance: the drafts that equal the target's own draws, up to the first that differs, are accepted.

    drafts [R, G], the first lens[r] of which were verified in rows q_start[r] + 1 and on; drawn [T] int64; survival
    [R, G] float32, only handed on -> results [R, num_columns(G)] int64.
    `score`: also returns, for all T rows, the token each would emit and the divisor of its logits, 0 for rows that emit
    nothing or whose request wants no logprobs.
    """
    count, gamma = drafts.shape
    emitted, divisors = torch.zeros_like(drawn) if score else drawn, drawn
    if score:
        divisors = torch.zeros(drawn.shape, dtype=torch.float32, device=drawn.device)
    _judge_kernel[(count,)](
        message, message.stride(0), inputs.positions, inputs.active, drafts, drafts.stride(0), survival, lens, q_start,
        drawn, seats.anchors, seats.positions, results, results.stride(0), emitted, divisors, G=gamma,
        BLOCK=max(2, next_power_of_2(gamma + 1)), SCORE=score, num_warps=1,
    )  # fmt: skip
    return (emitted, divisors) if score else None
