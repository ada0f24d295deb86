"""Continuous batching: which requests run in a step, and which rows of them.

Order of service is priority (larger first), then arrival. All decodes run in every step; prefill rows share the step
under a budget, of which a waiting request gets its share before running prefills of a lower priority. The pages of a
whole prefill are reserved at admission, so only decoding can run out of memory; then the request that is last in the
order of service is retracted. Why nothing starves and no two requests retract each other forever: the first running
request is retracted by nobody, gets rows in every step, and fits the pool alone.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from exactspec.cache.allocator import CacheIntegrityError
from exactspec.cache.manager import CacheManager
from exactspec.errors import ConfigError, QueueFullError, RequestError
from exactspec.scheduler.plan import PrefillChunk, StepPlan
from exactspec.scheduler.queue import ServiceQueue
from exactspec.types import RunningRequest

SHARED_MIN = 32  # tokens of a common prompt that are worth a wait


def max_cached_tokens(request: RunningRequest) -> int:
    """Most tokens that may come from the prefix cache: those whose rows the reply does not need.

    The prompt logprob of position p needs row p - 1. Once there is output the prompt rows are done with; a retraction
    before that voids what was scored, and the prefill starts again (PrefillChunk.is_first).
    """
    limit = len(request.token_ids) - 1
    if request.params.prompt_logprobs is not None and request.num_output == 0:
        limit = min(limit, max(request.params.prompt_logprob_start - 1, 0))
    return limit


class Scheduler:
    """Owns the waiting queue and the running set, and moves pages through the cache manager.

    gamma_rows: slots that a decode round writes, 1 + gamma. prefill_chunk: most prefill rows of a step.
    headroom_tokens: a request is admitted only if all could then grow by so many tokens each (or to their limits):
    who would soon be retracted again had better wait.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_running_requests: int,
        prefill_chunk: int,
        max_waiting: int | None = None,
        gamma_rows: int = 1,
        headroom_tokens: int = 32,
        wait_for_shared_prefix: bool = True,
    ) -> None:
        limits = [("max_running_requests", max_running_requests), ("prefill_chunk", prefill_chunk)]
        for name, value in [*limits, ("gamma_rows", gamma_rows)]:
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.cache = cache
        self.max_running_requests = max_running_requests
        self.prefill_chunk = prefill_chunk
        self.max_waiting = max_waiting
        self.gamma_rows = gamma_rows
        self.headroom_tokens = headroom_tokens
        self.wait_for_shared_prefix = wait_for_shared_prefix
        self.num_retractions = 0  # ever
        self._waiting = ServiceQueue()
        self._running = ServiceQueue()
        self._by_id: dict[str, RunningRequest] = {}
        self._fresh: set[str] = set()  # admitted, no chunk planned yet
        self._next_arrival = 0
        self._nobody_fits = False  # the last plan admitted all it could, and nothing has changed since

    # ---- requests come and go ------------------------------------------------------------------------------

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of num_tokens prompt and output tokens in all can run, alone at the worst."""
        return self.cache.pages_for(num_tokens + self.gamma_rows) <= self.cache.num_pages

    def add(self, request: RunningRequest) -> None:
        """Queues a request and gives it its arrival number.

        Raises QueueFullError, or RequestError when the pool can never hold it or its id is in use.
        """
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, the limit is {self.max_waiting}")
        if request.request.request_id in self._by_id:
            raise RequestError("request_id", f"{request.request.request_id!r} is in use")
        if not request.token_ids:
            raise RequestError("prompt", "must hold at least one token")
        if not self.fits(max(request.max_tokens, request.prompt_len)):
            field = "max_new_tokens" if self.fits(request.prompt_len) else "prompt"
            room = self.cache.num_pages * self.cache.page_size - self.gamma_rows
            raise RequestError(field, f"{request.max_tokens} tokens cannot fit the KV pool, which has room for {room}")
        request.arrival = self._next_arrival
        self._next_arrival += 1
        self._by_id[request.request.request_id] = request
        self._waiting.add(request)
        self._nobody_fits = False

    def finish(self, request: RunningRequest) -> None:
        """Takes a running request out; its pages go to the prefix cache or are freed."""
        self._running.remove(request)
        self.cache.release(request)
        self._forget(request)

    def abort(self, request_id: str) -> RunningRequest | None:
        """Takes a request out wherever it is; None if there is none of that id. Call it between steps only."""
        request = self._by_id.get(request_id)
        if request is None:
            return None
        if request in self._running:
            self.finish(request)
        else:
            self._waiting.remove(request)
            self._forget(request)
        return request

    def _forget(self, request: RunningRequest) -> None:
        self._nobody_fits = False
        del self._by_id[request.request.request_id]
        self._fresh.discard(request.request.request_id)

    def prefilled(self, request: RunningRequest) -> None:
        """A chunk is in the pool, kv_len says so: a complete prompt is shared from now on."""
        if not request.is_prefilling:
            self.cache.commit(request)

    def force_retract(self, request: RunningRequest) -> None:
        """Sends a running request back to the queue, as a full pool would. Call it between steps only."""
        self._running.remove(request)
        self.cache.release(request)
        self._fresh.discard(request.request.request_id)
        request.stats.num_retracted += 1
        self.num_retractions += 1
        self._waiting.add(request)
        self._nobody_fits = False

    def find(self, request_id: str) -> RunningRequest | None:
        return self._by_id.get(request_id)

    def requests(self) -> list[RunningRequest]:
        """Running ones, then waiting ones, each in order of service."""
        return [*self._running, *self._waiting]

    def running(self) -> list[RunningRequest]:
        return list(self._running)

    @property
    def running_set(self) -> Set[RunningRequest]:
        """The running requests, unordered, as they are at any time: a view."""
        return self._running.members

    def is_running(self, request: RunningRequest) -> bool:
        return request in self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._by_id

    @property
    def may_admit(self) -> bool:
        """A waiting request might start if a step were planned now. Growing running requests make no room for it."""
        return bool(self._waiting) and not self._nobody_fits

    def check_integrity(self) -> None:
        self.cache.check_integrity(self.requests())

    # ---- a step --------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step. The step planned before must be over, its kv_len and token_ids updated."""
        plan = StepPlan()
        budget = self.prefill_chunk
        prefilling = []
        for request in self.running():
            if request.is_prefilling:  # or just retracted: then it is sorted out below
                prefilling.append(request)
            elif self._reserve_round(request, plan):
                plan.decodes.append(request)
        for request in prefilling.copy():
            if not plan.retracted:
                budget = self._admit(budget, prefilling, plan, above=request.request.priority)
            if budget and self.is_running(request):
                budget -= self._plan_chunk(request, budget, plan)
        if not plan.retracted:  # else memory is short: nobody new
            self._admit(budget, prefilling, plan)
            self._nobody_fits = not plan.prefills
        return plan

    def reserve_ahead(self, requests: Sequence[RunningRequest]) -> bool:
        """Room for two decode rounds of each request, the first of them not committed yet; nobody is retracted for it.

        False: there is not room for all; what was reserved by then stays reserved.
        """
        rows, page_size, reserve = self.gamma_rows, self.cache.page_size, self.cache.reserve
        for request in requests:
            if request.kv_len + 2 * rows <= len(request.pages) * page_size:
                continue
            if not reserve(request, min(request.kv_len + 2 * rows, request.max_tokens + rows - 1)):
                return False
        return True

    def _reserve_round(self, request: RunningRequest, plan: StepPlan) -> bool:
        """Room for a decode round; False when `request` itself had to be retracted for lack of it.

        Victims come from the end of the running list, `request` and those before it are planned already.
        """
        while not self.cache.reserve(request, request.kv_len + self.gamma_rows):
            victim = self._running.last
            if len(self._running) == 1:
                raise CacheIntegrityError(
                    f"request {request.request.request_id} is alone and finds no room for {request.kv_len} + "
                    f"{self.gamma_rows} tokens in {self.cache.num_pages} pages of {self.cache.page_size}"
                )
            self.force_retract(victim)
            plan.retracted.append(victim)
            if victim is request:
                return False
        return True

    def _plan_chunk(self, request: RunningRequest, budget: int, plan: StepPlan) -> int:
        """Adds the next chunk of a prefill; returns its rows."""
        start, prefill_end = request.kv_len, request.prefill_end
        end = min(prefill_end, start + budget)
        is_first = request.request.request_id in self._fresh
        self._fresh.discard(request.request.request_id)
        plan.prefills.append(PrefillChunk(request, start, end, is_first, end == prefill_end))
        return end - start

    def _admit(self, budget: int, prefilling: list[RunningRequest], plan: StepPlan, above: int | None = None) -> int:
        """Starts waiting requests in order of service, until one has to wait: nobody overtakes it. With `above` only
        those of a higher priority. Returns the prefill rows that are left."""
        if not self._waiting or (above is not None and self._waiting.first.request.priority <= above):
            return budget
        growth = sum(self._growth_pages(request) for request in self._running)
        while self._waiting and budget and len(self._running) < self.max_running_requests:
            request = self._waiting.first
            if above is not None and request.request.priority <= above:
                break
            if self._prefix_is_coming(request, prefilling) or not self._start(request, growth):
                break
            growth += self._growth_pages(request)
            if request.is_prefilling:
                budget -= self._plan_chunk(request, budget, plan)
                prefilling.append(request)
            else:  # resumed, and everything before the anchor was still cached
                self._fresh.discard(request.request.request_id)
                plan.decodes.append(request)
        return budget

    def _growth_pages(self, request: RunningRequest) -> int:
        """Pages that a running request will want for its next headroom_tokens tokens."""
        tokens = min(len(request.token_ids) + self.headroom_tokens, request.max_tokens)
        return max(0, self.cache.pages_for(tokens + self.gamma_rows) - len(request.pages))

    def _start(self, request: RunningRequest, growth: int) -> bool:
        """Moves a waiting request to the running ones if there is memory; else changes nothing."""
        cache = self.cache
        cache.acquire(request, max_cached_tokens(request))
        crowded = self._growth_pages(request) + growth > cache.num_available
        if crowded or not cache.reserve(request, request.prefill_end + self.gamma_rows):
            cache.release(request)
            return False
        self._waiting.remove(request)
        self._running.add(request)
        self._fresh.add(request.request.request_id)
        return True

    def _prefix_is_coming(self, request: RunningRequest, prefilling: list[RunningRequest]) -> bool:
        """A running prefill is about to compute at least a page of this prompt: waiting for it saves the rows twice.

        The wait is bounded by that prefill, which gets rows in every step.
        """
        if not (prefilling and self.wait_for_shared_prefix and self.cache.prefix_cache):
            return False
        limit = max_cached_tokens(request)
        wanted = self.cache.cached_len(request, limit) + self.cache.page_size * self.cache.pages_for(SHARED_MIN)
        head = request.token_ids[:wanted]
        namespace = request.request.cache_namespace
        return wanted <= limit and any(
            other.request.cache_namespace == namespace
            and other.prefill_end >= wanted
            and other.token_ids[:wanted] == head
            for other in prefilling
        )
