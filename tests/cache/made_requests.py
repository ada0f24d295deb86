"""Requests for cache tests, and a KV pool that remembers which token prefix each slot was computed from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from exactspec.cache import CacheManager
from exactspec.types import Request, RunningRequest, SamplingParams

_numbers = itertools.count()


def make_request(tokens: Sequence[int], namespace: str = "", max_new_tokens: int = 64) -> RunningRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    request = Request(f"q{next(_numbers)}", tuple(tokens), params, seed=0, cache_namespace=namespace)
    return RunningRequest(request, list(tokens), max_tokens=len(tokens) + max_new_tokens)


def run_to_end(cache: CacheManager, prompt: Sequence[int], output: Sequence[int] = (), namespace: str = "") -> int:
    """One request from acquire to release, K/V of the last output token not written; returns its cached tokens."""
    request = make_request(prompt, namespace)
    cache.acquire(request, len(prompt) - 1)
    assert cache.reserve(request, len(prompt) + len(output) + 1)
    request.kv_len = len(prompt)
    cache.commit(request)
    if output:
        request.token_ids.extend(output)
        request.kv_len = len(request.token_ids) - 1
    cache.release(request)
    return request.stats.cached_tokens


class RememberingPool:
    """K/V stand-in: the slot of position i holds the namespace and all tokens up to i, as real K/V depend on them."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def write(self, request: RunningRequest, start: int, end: int) -> None:
        for position in range(start, end):
            self._slots[self._slot(request, position)] = self._content(request, position)

    def check(self, request: RunningRequest) -> None:
        for position in range(request.kv_len):
            found = self._slots.get(self._slot(request, position))
            assert found == self._content(request, position), f"position {position} was overwritten: {found}"

    def _slot(self, request: RunningRequest, position: int) -> int:
        return request.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _content(self, request: RunningRequest, position: int) -> tuple[str, tuple[int, ...]]:
        return request.request.cache_namespace, tuple(request.token_ids[: position + 1])
