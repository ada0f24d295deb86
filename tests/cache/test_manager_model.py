"""Any history of the cache manager against a naive model: one dictionary entry per cached page prefix."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from made_requests import RememberingPool, make_request

from exactspec.cache import CacheManager
from exactspec.types import RunningRequest

Prefix = tuple[str, tuple[int, ...]]  # namespace, tokens of whole pages


class NaiveCache:
    """Every cached page under its full token prefix, with the time of its last use."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.held: dict[str, list[Prefix]] = {}  # request id -> its shared prefixes, shortest first
        self.clock = 0

    def prefixes(self, request: RunningRequest, num_tokens: int) -> list[Prefix]:
        ends = range(self.page_size, num_tokens + 1, self.page_size)
        return [(request.request.cache_namespace, tuple(request.token_ids[:end])) for end in ends]

    def longest(self, request: RunningRequest, max_cached: int) -> list[Prefix]:
        limit = min(max_cached, len(request.token_ids) - 1)
        found = []
        for prefix in self.prefixes(request, limit):
            if prefix not in self.page:
                break
            found.append(prefix)
        return found

    def touch(self, prefixes: list[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.used[prefix] = self.clock

    def locked(self) -> set[Prefix]:
        return {prefix for prefixes in self.held.values() for prefix in prefixes}

    def evict(self, count: int) -> list[int]:
        pages = []
        for _ in range(count):
            parents = {(space, tokens[: -self.page_size]) for space, tokens in self.page}
            locked = self.locked()
            leaves = [p for p in self.page if p not in parents and p not in locked]
            victim = min(leaves, key=lambda p: self.used[p])
            pages.append(self.page.pop(victim))
            del self.used[victim]
        return pages


class CacheMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(page_size=st.sampled_from([1, 2, 3]), num_pages=st.integers(3, 16))
    def start(self, page_size: int, num_pages: int) -> None:
        self.cache = CacheManager(num_pages, page_size)
        self.naive = NaiveCache(page_size)
        self.pool = RememberingPool(page_size)
        self.running: list[RunningRequest] = []

    @rule(
        target=requests,
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        namespace=st.sampled_from(["", "other"]),
        max_cached=st.sampled_from([99, 99, 99, 0, 1, 4, 7]),
    )
    def acquire(self, tokens: list[int], namespace: str, max_cached: int) -> RunningRequest:
        request = make_request(tokens, namespace)
        expected = self.naive.longest(request, max_cached)
        assert self.cache.cached_len(request, max_cached) == len(expected) * self.cache.page_size
        self.cache.acquire(request, max_cached)
        assert request.pages == [self.naive.page[prefix] for prefix in expected]
        assert request.stats.cached_tokens == request.kv_len == len(expected) * self.cache.page_size
        self.naive.held[request.request.request_id] = expected
        self.naive.touch(expected)
        self.running.append(request)
        return request

    @rule(request=requests, num_tokens=st.integers(0, 40))
    def reserve(self, request: RunningRequest, num_tokens: int) -> None:
        before = list(request.pages)
        missing = max(0, self.cache.pages_for(num_tokens) - len(before))
        evictable = len(self.naive.page) - len(self.naive.locked())
        assert (self.cache.num_cached, self.cache.num_evictable) == (len(self.naive.page), evictable)
        possible = missing <= self.cache.num_free + evictable
        short = max(0, missing - self.cache.num_free)
        assert self.cache.reserve(request, num_tokens) == possible
        if not possible:
            assert request.pages == before
            return
        evicted = self.naive.evict(short)
        assert len(request.pages) == len(before) + missing
        assert set(evicted) <= set(request.pages[len(before) :])

    @rule(request=requests, new_tokens=st.lists(st.integers(0, 1), max_size=5), keep_anchor=st.booleans())
    def compute(self, request: RunningRequest, new_tokens: list[int], keep_anchor: bool) -> None:
        """Writes K/V as far as there are pages; the newest token may stay an anchor without K/V."""
        request.token_ids += new_tokens
        end = min(len(request.pages) * self.cache.page_size, len(request.token_ids) - keep_anchor)
        if end > request.kv_len:
            self.pool.write(request, request.kv_len, end)
            request.kv_len = end

    @rule(request=requests)
    def shrink(self, request: RunningRequest) -> None:
        before = list(request.pages)
        self.cache.shrink(request)
        needed = self.cache.pages_for(max(request.kv_len, request.prefill_end) + 1)
        assert request.pages == before[: max(needed, 0)]

    def _commit_model(self, request: RunningRequest, pages: list[int]) -> None:
        name = request.request.request_id
        held = self.naive.held[name]
        prefixes = self.naive.prefixes(request, request.kv_len)
        if len(prefixes) <= len(held):
            return
        for prefix, page in zip(prefixes, pages, strict=False):
            self.naive.page.setdefault(prefix, page)
        self.naive.touch(prefixes[len(held) :])
        self.naive.held[name] = prefixes

    @rule(request=requests)
    def commit(self, request: RunningRequest) -> None:
        before = list(request.pages)
        self.cache.commit(request)
        self._commit_model(request, before)
        held = self.naive.held[request.request.request_id]
        assert request.num_shared_pages == len(held)
        assert request.pages[: len(held)] == [self.naive.page[prefix] for prefix in held]
        assert request.pages[len(held) :] == before[len(held) :]

    @rule(request=consumes(requests))
    def release(self, request: RunningRequest) -> None:
        before = list(request.pages)
        self._commit_model(request, before)
        self.cache.release(request)
        self.naive.touch(self.naive.held.pop(request.request.request_id))
        self.running.remove(request)
        assert (request.pages, request.kv_len, request.cache_node) == ([], 0, None)

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        output=st.lists(st.integers(0, 2), max_size=4),
    )
    def whole_request(self, tokens: list[int], output: list[int]) -> None:
        """From acquire to release at once: fills the tree, so that eviction has a choice."""
        request = self.acquire(tokens, "", 99)
        self.reserve(request, len(tokens) + len(output))
        self.compute(request, [], keep_anchor=False)
        self.commit(request)
        self.compute(request, output, keep_anchor=True)
        self.release(request)

    @rule(target=requests, request=consumes(requests))
    def retract_and_resume(self, request: RunningRequest):
        self.release(request)
        request.stats.num_retracted += 1
        cached = request.stats.cached_tokens
        expected = self.naive.longest(request, 99)
        self.cache.acquire(request, 99)
        assert request.stats.cached_tokens == cached
        assert request.kv_len == len(expected) * self.cache.page_size
        self.naive.held[request.request.request_id] = expected
        self.naive.touch(expected)
        self.running.append(request)
        return multiple(request)

    @rule()
    def flush(self) -> None:
        assert self.cache.flush() == (not self.running)
        if not self.running:
            self.naive.page.clear()
            self.naive.used.clear()
            assert self.cache.num_free == self.cache.num_pages

    @invariant()
    def nothing_is_lost_or_overwritten(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity(self.running)
        for request in self.running:
            self.pool.check(request)
        assert self.cache.num_cached == len(self.naive.page)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
