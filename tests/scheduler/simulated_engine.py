"""An engine without a model around the real scheduler and cache; every answer has a truth computed without them.

The next token, and how many drafts of a round are accepted, are pure functions of the tokens so far. K/V are stood in
for by a digest of the whole prefix, so that reading a slot which somebody else wrote is noticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from exactspec.cache import CacheManager
from exactspec.scheduler import Scheduler, StepPlan
from exactspec.scheduler.queue import service_order
from exactspec.types import Request, RunningRequest, SamplingParams

Round = tuple[int, tuple[int, ...]]  # kv_len after the round, tokens emitted by it


def make_request(name: str, prompt: Sequence[int], max_new_tokens: int, priority: int = 0, **extra) -> RunningRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens, **extra)
    request = Request(name, tuple(prompt), params, seed=0, priority=priority)
    return RunningRequest(request, list(prompt), max_tokens=len(prompt) + max_new_tokens)


def digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(",".join(map(str, tokens)).encode())


def draw(tokens: Sequence[int]) -> int:
    return digest(tokens) % 5


def play_round(tokens: list[int], max_tokens: int, gamma: int) -> tuple[int, ...]:
    """What a round of drafts and a bonus emits behind `tokens`, cut at the limit."""
    count = min(1 + digest(tokens) % (gamma + 1), max_tokens - len(tokens))
    known = list(tokens)
    for _ in range(count):
        known.append(draw(known))
    return tuple(known[len(tokens) :])


def unconstrained(request: RunningRequest, gamma: int) -> list[Round]:
    """The rounds of a request that is alone in the world."""
    tokens, rounds = list(request.request.prompt_ids), []
    if request.max_tokens > len(tokens):
        tokens.append(draw(tokens))
        rounds.append((len(tokens) - 1, (tokens[-1],)))
    while len(tokens) < request.max_tokens:
        emitted = play_round(tokens, request.max_tokens, gamma)
        tokens += emitted
        rounds.append((len(tokens) - 1, emitted))
    return rounds


@dataclass
class SimulatedEngine:
    cache: CacheManager
    scheduler: Scheduler
    slots: dict[int, int] = field(default_factory=dict)  # slot -> digest of the prefix it was computed from
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    trace: list[tuple] = field(default_factory=list)  # all that was planned, for comparing runs
    prefill_rows: int = 0
    steps: int = 0

    @classmethod
    def make(
        cls, num_pages: int, page_size: int, gamma: int = 0, *, prefix_cache: bool = True, **options
    ) -> SimulatedEngine:
        cache = CacheManager(num_pages, page_size, prefix_cache)
        settings = {"max_running_requests": 8, "prefill_chunk": 32, "gamma_rows": 1 + gamma} | options
        return cls(cache, Scheduler(cache, **settings))

    @property
    def gamma(self) -> int:
        return self.scheduler.gamma_rows - 1

    def step(self) -> StepPlan:
        before = self.scheduler.running()
        plan = self.scheduler.schedule()
        self.check_plan(plan, before)
        self.steps += 1
        for chunk in plan.prefills:
            self._prefill(chunk)
        for request in plan.decodes:
            self._decode(request)
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        while not self.scheduler.idle:
            self.step()
            assert self.steps < max_steps, "the schedule does not come to an end"

    def _prefill(self, chunk) -> None:
        request = chunk.request
        assert chunk.start == request.kv_len < chunk.end <= request.prefill_end
        self._check_kv(request)
        self._write(request, chunk.start, chunk.end)
        self.prefill_rows += chunk.num_rows
        request.kv_len = chunk.end
        emits = chunk.emits
        self.scheduler.prefilled(request)
        if emits and request.max_tokens > request.prompt_len:
            self._emit(request, (draw(request.token_ids),))
        elif emits:
            self._finish(request)

    def _decode(self, request: RunningRequest) -> None:
        assert request.kv_len == len(request.token_ids) - 1
        self._check_kv(request)
        for position in range(request.kv_len, request.kv_len + 1 + self.gamma):  # the whole block, right or wrong
            self.slots[self._slot(request, position)] = -1
        before = len(request.token_ids)
        emitted = play_round(request.token_ids, request.max_tokens, self.gamma)
        self._write(request, before - 1, before)
        self._emit(request, emitted)

    def _emit(self, request: RunningRequest, emitted: tuple[int, ...]) -> None:
        first = len(request.token_ids)
        request.token_ids += emitted
        if request.kv_len == first - 1:  # a decode round: accepted drafts have their K/V
            self._write(request, first, len(request.token_ids) - 1)
            request.kv_len = len(request.token_ids) - 1
        self.rounds.setdefault(request.request.request_id, []).append((request.kv_len, emitted))
        if len(request.token_ids) >= request.max_tokens:
            self._finish(request)

    def _finish(self, request: RunningRequest) -> None:
        self.finished.append(request.request.request_id)
        self.scheduler.finish(request)

    def _slot(self, request: RunningRequest, position: int) -> int:
        size = self.cache.page_size
        return request.pages[position // size] * size + position % size

    def _write(self, request: RunningRequest, start: int, end: int) -> None:
        for position in range(start, end):
            self.slots[self._slot(request, position)] = digest(request.token_ids[: position + 1])

    def _check_kv(self, request: RunningRequest) -> None:
        for position in range(request.kv_len):
            found = self.slots.get(self._slot(request, position))
            assert found == digest(request.token_ids[: position + 1]), f"wrong K/V at position {position}"

    def check_plan(self, plan: StepPlan, before: list[RunningRequest]) -> None:
        """The rules of service, whatever the load."""
        scheduler = self.scheduler
        self.trace.append(
            (
                [(chunk.request.request.request_id, chunk.start, chunk.end, chunk.is_first) for chunk in plan.prefills],
                [request.request.request_id for request in plan.decodes],
                [request.request.request_id for request in plan.retracted],
            )
        )
        planned = [chunk.request for chunk in plan.prefills] + plan.decodes
        running, waiting = scheduler.running(), scheduler.requests()[scheduler.num_running :]
        assert len(planned) == len(set(planned))
        assert set(planned) <= set(running)
        assert planned or scheduler.idle, "a step without progress"
        assert all(request in planned for request in running if not request.is_prefilling), "a decode was left out"
        assert plan.num_prefill_rows <= scheduler.prefill_chunk
        assert len(running) <= scheduler.max_running_requests
        for request in plan.decodes:
            assert len(request.pages) * self.cache.page_size >= request.kv_len + scheduler.gamma_rows
        for chunk in plan.prefills:
            assert len(chunk.request.pages) * self.cache.page_size >= chunk.end
        admitted = [request for request in running if request not in before]
        if admitted and waiting:
            assert max(map(service_order, admitted)) < min(map(service_order, waiting)), "somebody was overtaken"
        if plan.retracted:
            assert running, "the only one was retracted"
            assert min(map(service_order, plan.retracted)) > max(map(service_order, running))
