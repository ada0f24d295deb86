"""Who holds which KV page: free, owned by the prefix cache, or private to one running request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from exactspec.cache.allocator import CacheIntegrityError, PagePool
from exactspec.cache.radix import RadixTree
from exactspec.errors import ConfigError
from exactspec.types import RunningRequest


class CacheManager:
    """The only writer of `pages`, `num_shared_pages` and `cache_node` of a request.

    A request's first num_shared_pages pages belong to the tree (locked there), the others to the request alone.
    Only tokens whose K/V are in the pool (token_ids[:kv_len], all committed) ever enter the tree.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size)
        self.num_evicted = 0  # pages taken from the tree, ever
        self._holders: set[RunningRequest] = set()

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Pages owned by the prefix cache, in use or not."""
        return self.tree.num_pages

    @property
    def num_evictable(self) -> int:
        return self.tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that `reserve` can still hand out: free ones and evictable ones."""
        return self.pool.num_free + self.tree.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def cached_len(self, request: RunningRequest, max_cached: int) -> int:
        """Tokens that `acquire` would find now; changes nothing."""
        if not self.prefix_cache:
            return 0
        limit = self._max_pages(request, max_cached)
        return self.tree.match_len(request.request.cache_namespace, request.token_ids, limit) * self.page_size

    def acquire(self, request: RunningRequest, max_cached: int) -> None:
        """Starts a request on its longest cached prefix: whole pages, at most max_cached tokens, never all tokens.

        Sets pages, num_shared_pages, cache_node, kv_len and, on the first admission, stats.cached_tokens.
        """
        if request in self._holders:
            raise CacheIntegrityError(f"request {request.request.request_id} already holds its prefix")
        self._holders.add(request)
        request.pages = []
        if self.prefix_cache:
            limit = self._max_pages(request, max_cached)
            node, pages = self.tree.lock_prefix(request.request.cache_namespace, request.token_ids, limit)
            request.cache_node, request.pages = node, pages
        request.num_shared_pages = len(request.pages)
        request.kv_len = request.num_shared_pages * self.page_size
        if request.stats.num_retracted == 0:
            request.stats.cached_tokens = request.kv_len

    def _max_pages(self, request: RunningRequest, max_cached: int) -> int:
        return max(0, min(max_cached, len(request.token_ids) - 1)) // self.page_size

    def reserve(self, request: RunningRequest, num_tokens: int) -> bool:
        """Makes request.pages cover num_tokens tokens, evicting if needed. False: impossible, nothing changed."""
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        short = missing - self.pool.num_free
        if short > 0:
            if short > self.tree.num_evictable:
                return False
            self.pool.free(self.tree.evict(short))
            self.num_evicted += short
        pages = self.pool.allocate(missing)
        if pages is None:
            raise CacheIntegrityError(f"{missing} pages were promised, {self.pool.num_free} are free")
        request.pages.extend(pages)
        return True

    def shrink(self, request: RunningRequest) -> None:
        """Returns whole pages behind those that the K/V, the rest of the prefill and the anchor need."""
        keep = self.pages_for(max(request.kv_len, request.prefill_end) + 1)
        if keep < len(request.pages):
            self.pool.free(request.pages[keep:])
            del request.pages[keep:]

    def commit(self, request: RunningRequest) -> None:
        """Enters all full pages of token_ids[:kv_len] into the prefix cache, to be shared from now on.

        Pages that the tree already holds for these tokens replace the request's own, which are freed: their bits are
        equal by contract C2. A page table built before is out of date afterwards.
        """
        full = request.kv_len // self.page_size
        shared = request.num_shared_pages
        if not self.prefix_cache or full <= shared:
            return
        if request not in self._holders or full > len(request.pages) or request.kv_len > len(request.token_ids):
            raise CacheIntegrityError(
                f"request {request.request.request_id} has {len(request.pages)} pages and "
                f"{len(request.token_ids)} tokens for kv_len {request.kv_len}"
            )
        tokens = request.token_ids[shared * self.page_size : full * self.page_size]
        node, known = self.tree.extend(request.cache_node, tokens, request.pages[shared:full])
        if known:
            self.pool.free(request.pages[shared : shared + len(known)])
            request.pages[shared : shared + len(known)] = known
        request.cache_node, request.num_shared_pages = node, full

    def release(self, request: RunningRequest) -> None:
        """Commits, unlocks and frees everything; does nothing for a request that holds nothing."""
        if request not in self._holders:
            return
        self.commit(request)
        if request.cache_node is not None:
            self.tree.unlock(request.cache_node)
        self.pool.free(reversed(request.pages[request.num_shared_pages :]))
        request.pages = []
        request.cache_node, request.num_shared_pages, request.kv_len = None, 0, 0
        self._holders.discard(request)

    def flush(self) -> bool:
        """Empties the prefix cache; False (nothing changed) while any request holds pages."""
        if self._holders:
            return False
        self.pool.free(self.tree.clear())
        return True

    def check_integrity(self, requests: Iterable[RunningRequest]) -> None:
        """Raises CacheIntegrityError unless every page has exactly one owner and all locks are accounted for.

        `requests` are all unfinished requests; waiting ones must hold nothing.
        """
        everyone = set(requests)
        if not self._holders <= everyone:
            raise CacheIntegrityError(f"{len(self._holders - everyone)} requests have left and still hold pages")
        for request in everyone - self._holders:
            if request.pages or request.cache_node is not None or request.kv_len or request.num_shared_pages:
                raise CacheIntegrityError(f"request {request.request.request_id} holds pages that were not lent to it")
        running = list(self._holders)
        owner: dict[int, str] = {}
        for node in self.tree.nodes():
            for page in node.pages:
                self._claim(owner, page, "the prefix cache")
        for request in running:
            for page in request.pages[request.num_shared_pages :]:
                self._claim(owner, page, f"request {request.request.request_id}")
            self._check_request(request)
        self.tree.check(Counter(r.cache_node for r in running if r.cache_node is not None))
        if len(owner) + self.num_free != self.num_pages:
            raise CacheIntegrityError(f"{self.num_free} free + {len(owner)} owned pages, the pool has {self.num_pages}")

    def _claim(self, owner: dict[int, str], page: int, who: str) -> None:
        if page in owner:
            raise CacheIntegrityError(f"page {page} belongs to {owner[page]} and to {who}")
        if self.pool.is_free(page):
            raise CacheIntegrityError(f"page {page} is free and belongs to {who}")
        owner[page] = who

    def _check_request(self, request: RunningRequest) -> None:
        name, shared = request.request.request_id, request.num_shared_pages
        if request.kv_len > len(request.pages) * self.page_size:
            raise CacheIntegrityError(f"request {name}: kv_len {request.kv_len} in {len(request.pages)} pages")
        if request.cache_node is None:
            if shared:
                raise CacheIntegrityError(f"request {name}: {shared} shared pages without a lock")
            return
        tokens, pages = self.tree.path_pages(request.cache_node)
        if pages != request.pages[:shared] or tokens != request.token_ids[: shared * self.page_size]:
            raise CacheIntegrityError(f"request {name}: its {shared} shared pages are not those of the prefix cache")
