"""Between host and device in captured rounds: one message out, one read-back, and who has which seat.

Buffers are allocated once. The host's ends are pinned and there are two of each, so that a round can be staged while
the one before it is still running; a buffer is used again only when the round that used it has ended.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from exactspec.backend.cuda.decode import RoundInputs
from exactspec.backend.cuda.seats import NUM_FIELDS, Field, make_seats, num_columns
from exactspec.logprobs.processor import output_plan
from exactspec.types import RunningRequest

REQUEST_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOP_BUCKETS = (0, 5, 20)  # alternatives per row that a captured round can score
ROUNDS_AT_ONCE = 2
PARTS = 2  # of a round that are timed: draft, verify
LEVELS = 4  # captured numbers of drafts above none: each is a graph


def request_bucket(count: int) -> int:
    return next(bucket for bucket in REQUEST_BUCKETS if count <= bucket)


@cache
def draft_levels(bucket: int, gamma: int) -> tuple[int, ...]:
    """The numbers of drafts, in all, that a captured round of a bucket can verify: none to all, in rising order."""
    return tuple(sorted({bucket * round(gamma * part / LEVELS) for part in range(LEVELS + 1)}))


def scores_on_device(request: RunningRequest) -> bool:
    """Its logprobs, if it asks for any, are numbers that a captured round makes (raw and scaled rows, few of them)."""
    plan = output_plan(request.params)
    return plan is None or (plan.kind != "processed" and plan.top_k <= TOP_BUCKETS[-1] and not plan.token_ids)


def is_plain(request: RunningRequest) -> bool:
    """Its draws need nothing but logits, temperature and noise."""
    params = request.params
    return not (
        params.has_penalties
        or params.has_filters
        or params.logit_bias
        or request.grammar is not None
        or request.num_output < params.min_new_tokens
    )


def needs_rows(request: RunningRequest) -> bool:
    """The host must see rows of the round itself, not only what the device made of them."""
    asked = request.request
    return not scores_on_device(request) or asked.sampling_mask is not None or asked.return_hidden_states


def divisor(request: RunningRequest) -> float:
    """What a plain request's logits are divided by before they are scored; 0 if it wants no scores from the device."""
    params = request.params
    if params.logprobs is None or not scores_on_device(request):
        return 0.0
    return params.temperature if params.logprobs_kind == "scaled" and not params.greedy else 1.0


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What a round's graphs depend on, and how many alternatives each request wants (None: no scores).

    The graphs of a round depend on one thing more: how many drafts are verified (`draft_levels`).
    """

    bucket: int
    sampled: bool  # somebody is not greedy
    top: int | None  # alternatives that are scored; None: nobody wants scores
    wanted: list[int | None]


@dataclass(slots=True, eq=False)
class _Seat:
    number: int
    pages: list[int]  # the request's own list: a request that was retracted comes back with another
    num_sent: int = 0  # pages of it that the device knows


class Slot:
    """The host's buffers of one round, the event that says they are done with, and marks between its parts."""

    def __init__(self, most: int, num_results: int, is_cuda: bool) -> None:
        self.message = torch.zeros((NUM_FIELDS, most), dtype=torch.int64, pin_memory=is_cuda)
        self.results = torch.zeros(num_results, dtype=torch.int64, pin_memory=is_cuda)
        self.rows, self.numbers = self.message.numpy(), self.results.numpy()
        self.done = torch.cuda.Event() if is_cuda else None
        self.marks: list[torch.cuda.Event | float] = []
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(PARTS + 1)] if is_cuda else []

    def mark(self) -> None:
        """The next part of the round begins, or the last one ends."""
        if not self._events:
            self.marks.append(time.perf_counter())
            return
        event = self._events[len(self.marks)]
        event.record()
        self.marks.append(event)

    def part_seconds(self) -> list[float] | None:
        """What each part took on the device, once the round has ended; None if nobody marked them."""
        if len(self.marks) <= PARTS:
            return None
        if not self._events:
            return [end - start for start, end in itertools.pairwise(cast("list[float]", self.marks))]
        return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(self._events)]

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class RoundStage:
    """Stages rounds of at most `most` requests with `pages` pages each and gamma drafts."""

    def __init__(self, most: int, pages: int, gamma: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.gamma, self.device = gamma, device
        self.seats = make_seats(most, pages, device)
        self.inputs = RoundInputs(
            zeros(most), zeros(most), zeros(most), zeros(most), zeros(most), zeros(most, dtype=torch.float32),
            zeros(most, pages, dtype=torch.int32),
        )  # fmt: skip
        self.message, self.drafts = zeros(NUM_FIELDS, most), zeros(most, gamma)
        self.confidence = zeros(most, gamma, dtype=torch.float32)
        # without a confidence head: an earlier draft of one request before a later one of another
        self.survival = (0.5 ** torch.arange(gamma, device=device)).expand(most, gamma).contiguous()
        size = self._size(most, most * (gamma + 1), TOP_BUCKETS[-1])
        self._results = zeros(size)
        self._slots = [Slot(most, size, device.type == "cuda") for _ in range(ROUNDS_AT_ONCE)]
        self._shape = RoundShape(1, False, None, [])
        self._rows = np.zeros((NUM_FIELDS, most), dtype=np.int64)
        self._rows[Field.PAGE_INDEX] = -1
        self._requests: list[RunningRequest] = []  # of the last round, in the order of its rows
        self._seats: list[_Seat] = []  # theirs
        self._free: list[int] = []
        self.forget()
        self.wait_seconds = 0.0  # spent waiting for the device, ever

    @property
    def most_pages(self) -> int:
        return self.seats.page_table.shape[1]

    # ---- where a round leaves its results ------------------------------------------------------------

    def _size(self, bucket: int, num_rows: int, top: int | None) -> int:
        """int64 numbers of a round's results: what `results` holds; then the packed scores."""
        scores = 0 if top is None else num_rows * (1 + 2 * top)
        return bucket * num_columns(self.gamma) + (scores + 1) // 2

    def results(self, bucket: int) -> Tensor:
        """[bucket, num_columns(G)] int64, as `seats.judge` fills it."""
        width = num_columns(self.gamma)
        return self._results[: bucket * width].view(bucket, width)

    def scores(self, bucket: int, num_rows: int, top: int) -> Tensor:
        """[num_rows, 1 + 2 * top] int32, as the logprob processor packs it."""
        first, width = 2 * bucket * num_columns(self.gamma), 1 + 2 * top
        return self._results.view(torch.int32)[first : first + num_rows * width].view(num_rows, width)

    # ---- a round's message ----------------------------------------------------------------------------

    def seat(self, requests: list[RunningRequest]) -> RoundShape:
        """Gives these requests seats, and theirs to others that had some; comes before `send` and the graphs."""
        if requests != self._requests:
            self._take_seats(requests)
        return self._shape

    def send(
        self,
        requests: list[RunningRequest],
        carried: bool,
        most_drafts: list[int] | None = None,
        decrees: int | list[int] = -1,
    ) -> Slot:
        """Sends what a round over the seated `requests` needs to know; returns its buffers for `fetch` and `read`.

        carried: every request was in the round before, which may be running still: the device knows its token and
        position better. most_drafts: how many drafts were proposed to each (None: as many as it may have).
        """
        count, rows = len(requests), self._rows
        rows[Field.CARRIED, :count] = carried
        if not carried:
            rows[Field.ANCHOR, :count] = [request.token_ids[-1] for request in requests]
            rows[Field.POSITION, :count] = [request.kv_len for request in requests]
        if most_drafts is not None:
            rows[Field.MOST_DRAFTS, :count] = most_drafts
        rows[Field.DECREE, :count] = decrees
        self._note_pages(requests)
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.wait()  # only a round that nobody read can be on its way still
        slot.marks.clear()
        np.copyto(slot.rows, rows)
        self.message.copy_(slot.message, non_blocking=True)
        return slot

    def forget(self) -> None:
        """Nobody has a seat: whoever is seated next is told to the device from the start."""
        self._requests, self._seats = [], []
        self._free = list(range(self.message.shape[1] - 1, -1, -1))

    def _take_seats(self, requests: list[RunningRequest]) -> None:
        known = dict(zip(self._requests, self._seats, strict=True))
        kept = [known.pop(request, None) for request in requests]
        self._free.extend(seat.number for seat in known.values())
        self._seats = [seat if seat is not None else _Seat(self._free.pop(), []) for seat in kept]
        self._requests = list(requests)
        count, rows = len(requests), self._rows
        rows[:, count:] = 0
        rows[Field.PAGE_INDEX, count:] = -1
        rows[Field.SEAT, :count] = [seat.number for seat in self._seats]
        rows[Field.SEED, :count] = [request.request.seed for request in requests]
        rows[Field.OUTPUT_OFFSET, :count] = [1 - request.prompt_len for request in requests]
        rows[Field.LIMIT, :count] = [request.max_tokens for request in requests]
        rows[Field.ACTIVE, :count] = 1
        caps = [request.request.max_drafts for request in requests]
        rows[Field.MOST_DRAFTS, :count] = [self.gamma if cap is None else min(cap, self.gamma) for cap in caps]
        temperatures = [0.0 if r.params.greedy else r.params.temperature for r in requests]
        rows[Field.TEMPERATURE, :count] = _bits(temperatures)
        divisors = [divisor(request) for request in requests]
        rows[Field.DIVISOR, :count] = _bits(divisors)
        wanted = [r.params.logprobs if d else None for r, d in zip(requests, divisors, strict=True)]
        most = max((top for top in wanted if top is not None), default=None)
        top = None if most is None else next(top for top in TOP_BUCKETS if most <= top)
        self._shape = RoundShape(request_bucket(count), any(temperatures), top, wanted)

    def _note_pages(self, requests: list[RunningRequest]) -> None:
        """One new page of a request travels in the message; more go ahead of it."""
        rows = self._rows
        rows[Field.PAGE_INDEX, : len(requests)] = -1
        many: list[tuple[_Seat, int]] = []
        for row, (request, seat) in enumerate(zip(requests, self._seats, strict=True)):
            pages = request.pages
            if pages is seat.pages and len(pages) == seat.num_sent:
                continue
            sent = seat.num_sent if pages is seat.pages and len(pages) > seat.num_sent else 0
            if len(pages) - sent == 1:
                rows[Field.PAGE_INDEX, row], rows[Field.PAGE, row] = sent, pages[-1]
            else:
                many.append((seat, sent))
            seat.pages, seat.num_sent = pages, len(pages)
        if many:
            width = self.most_pages
            places = [seat.number * width + at for seat, sent in many for at in range(sent, len(seat.pages))]
            pages_sent = [page for seat, sent in many for page in seat.pages[sent:]]
            index = torch.tensor(places, dtype=torch.int64).to(self.device)
            values = torch.tensor(pages_sent, dtype=torch.int32).to(self.device)
            self.seats.page_table.view(-1).index_copy_(0, index, values)

    # ---- a round's results ----------------------------------------------------------------------------

    def sent(self, slot: Slot) -> None:
        """All that uses the slot's buffers is on its way."""
        if slot.done is not None:
            slot.done.record()

    def fetch(self, slot: Slot, shape: RoundShape, num_rows: int) -> None:
        """Starts the one copy of a round's results."""
        size = self._size(shape.bucket, num_rows, shape.top)
        slot.results[:size].copy_(self._results[:size], non_blocking=True)
        self.sent(slot)

    def read(self, slot: Slot, shape: RoundShape, num_rows: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Waits for a round; its results as `results` and `scores` lay them out, valid until two rounds later."""
        start = time.perf_counter()
        slot.wait()
        self.wait_seconds += time.perf_counter() - start
        bucket, top, width = shape.bucket, shape.top, num_columns(self.gamma)
        results = slot.numbers[: bucket * width].reshape(bucket, width)
        if top is None:
            return results, None
        scores = slot.numbers.view(np.int32)[2 * bucket * width :][: num_rows * (1 + 2 * top)]
        return results, scores.reshape(num_rows, 1 + 2 * top)


def _bits(values: list[float]) -> np.ndarray:
    """float32 bits in the low half of int64."""
    return np.array(values, dtype=np.float32).view(np.uint32).astype(np.int64)
