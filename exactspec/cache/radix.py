"""The prefix cache: a radix tree whose edges are runs of whole pages of committed tokens.

A node owns the pages of its edge. A running request locks the node where its shared prefix ends; the lock counts
on every node up to the root, so a node with lock 0 has nothing locked below it and is evictable. Eviction takes
pages from the end of the least recently used unlocked leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

from exactspec.cache.allocator import CacheIntegrityError


class RadixNode:
    """`tokens` has page_size entries per page of `pages`; `lock` counts the locks here and below."""

    __slots__ = ("children", "last_used", "lock", "namespace", "pages", "parent", "tokens")

    def __init__(self, parent: RadixNode | None, tokens: list[int], pages: list[int], namespace: str) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.namespace = namespace
        self.children: dict[Hashable, RadixNode] = {}
        self.lock = 0
        self.last_used = 0


class RadixTree:
    """One tree per namespace. Methods that return pages to the caller never touch the page pool themselves."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0  # owned by the tree
        self.num_evictable = 0  # of these, on nodes with lock 0
        self._num_nodes = 0
        self._roots: dict[str, RadixNode] = {}
        self._clock = 0
        self._serial = 0
        self._leaves: list[tuple[int, int, RadixNode]] = []  # heap by last use; entries may be out of date

    # ---- locking -------------------------------------------------------------------------------------------

    def lock_prefix(self, namespace: str, tokens: Sequence[int], max_pages: int) -> tuple[RadixNode, list[int]]:
        """Locks the longest cached prefix of `tokens` of at most max_pages pages.

        Returns the node where it ends (the root of the namespace if nothing matches) and its pages.
        """
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = RadixNode(None, [], [], namespace)
        node, pages = self._walk(node, tokens, 0, max_pages)
        self._lock(node, None)
        return node, pages

    def unlock(self, node: RadixNode) -> None:
        """Gives one lock back and marks the whole prefix as just used."""
        self._clock += 1
        step: RadixNode | None = node
        while step is not None:
            if step.lock < 1:
                raise CacheIntegrityError("a prefix is unlocked more often than it was locked")
            step.lock -= 1
            step.last_used = self._clock
            if step.lock == 0:
                self.num_evictable += len(step.pages)
            step = step.parent
        self._now_unused(node)

    def extend(self, start: RadixNode, tokens: Sequence[int], pages: list[int]) -> tuple[RadixNode, list[int]]:
        """Inserts whole pages behind `start`, which the caller has locked; the lock moves to the returned node.

        tokens has page_size entries per page. Where the tree already holds these tokens its own pages are kept: the
        returned list (of at least length 0, at most len(pages)) are the tree's pages for the leading part, and the
        caller's pages of that part stay the caller's. The pages behind it now belong to the tree.
        """
        node, known = self._walk(start, tokens, 0, len(pages))
        if len(known) < len(pages):
            done = len(known)
            new = RadixNode(node, list(tokens[done * self.page_size :]), pages[done:], start.namespace)
            node.children[self._child_key(new.tokens, 0)] = new
            self._num_nodes += 1
            self.num_pages += len(new.pages)
            self.num_evictable += len(new.pages)
            node = new
        self._lock(node, start)
        return node, known

    def _lock(self, node: RadixNode, until: RadixNode | None) -> None:
        self._clock += 1
        step: RadixNode | None = node
        while step is not None and step is not until:
            if step.lock == 0:
                self.num_evictable -= len(step.pages)
            step.lock += 1
            step.last_used = self._clock
            step = step.parent

    # ---- walking -------------------------------------------------------------------------------------------

    def match_len(self, namespace: str, tokens: Sequence[int], max_pages: int) -> int:
        """Pages that `lock_prefix` would find; changes nothing, not even the order of eviction."""
        node, found = self._roots.get(namespace), 0
        while node is not None and found < max_pages and (found + 1) * self.page_size <= len(tokens):
            child = node.children.get(self._child_key(tokens, found * self.page_size))
            if child is None:
                break
            common = self._common_pages(child, tokens, found * self.page_size, max_pages - found)
            found += common
            if common < len(child.pages):
                break
            node = child
        return found

    def _walk(self, node: RadixNode, tokens: Sequence[int], start: int, max_pages: int) -> tuple[RadixNode, list[int]]:
        """Follows tokens[start:] down from `node`; splits the edge where they part, so the end is always a node."""
        pages: list[int] = []
        while len(pages) < max_pages and start + self.page_size <= len(tokens):
            child = node.children.get(self._child_key(tokens, start))
            if child is None:
                break
            common = self._common_pages(child, tokens, start, max_pages - len(pages))
            if common < len(child.pages):
                child = self._split(child, common)
            pages += child.pages
            start += common * self.page_size
            node = child
        return node, pages

    def _child_key(self, tokens: Sequence[int], start: int) -> Hashable:
        return tokens[start] if self.page_size == 1 else tuple(tokens[start : start + self.page_size])

    def _common_pages(self, child: RadixNode, tokens: Sequence[int], start: int, limit: int) -> int:
        """Leading pages that child's edge shares with tokens[start:]; at least 1, as the first was looked up."""
        size = self.page_size
        most = min(len(child.pages), limit, (len(tokens) - start) // size)
        edge, wanted = child.tokens[: most * size], list(tokens[start : start + most * size])
        if edge == wanted:
            return most
        differing = next(i for i, (a, b) in enumerate(zip(edge, wanted, strict=True)) if a != b)
        return differing // size

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Cuts node's edge after num_pages and returns the new upper node. `node` keeps its end and its holders."""
        cut = num_pages * self.page_size
        parent = node.parent
        assert parent is not None  # roots have no pages to cut
        upper = RadixNode(parent, node.tokens[:cut], node.pages[:num_pages], node.namespace)
        upper.lock, upper.last_used = node.lock, node.last_used
        parent.children[self._child_key(upper.tokens, 0)] = upper
        del node.tokens[:cut]
        del node.pages[:num_pages]
        node.parent = upper
        upper.children[self._child_key(node.tokens, 0)] = node
        self._num_nodes += 1
        return upper

    # ---- eviction ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> list[int]:
        """Takes up to num_pages pages out of the tree, least recently used first, and returns their ids."""
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            used, _, node = self._leaves[0]
            if not self._is_evictable_leaf(node, used):
                heapq.heappop(self._leaves)
                continue
            take = min(num_pages - len(freed), len(node.pages))
            freed.extend(reversed(node.pages[-take:]))
            self.num_pages -= take
            self.num_evictable -= take
            if take < len(node.pages):
                del node.pages[-take:]
                del node.tokens[-take * self.page_size :]
            else:
                heapq.heappop(self._leaves)
                self._remove_leaf(node)
        return freed

    def _is_evictable_leaf(self, node: RadixNode, used: int) -> bool:
        return node.parent is not None and node.lock == 0 and not node.children and node.last_used == used

    def _remove_leaf(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._child_key(node.tokens, 0)]
        node.parent = None
        self._num_nodes -= 1
        self._now_unused(parent)

    def _now_unused(self, node: RadixNode) -> None:
        """An unlocked leaf is up for eviction; a root without content is dropped: dead namespaces cost no memory."""
        if node.children or node.lock:
            return
        if node.parent is None:
            del self._roots[node.namespace]
        else:
            self._push_leaf(node)

    def _push_leaf(self, node: RadixNode) -> None:
        self._serial += 1
        heapq.heappush(self._leaves, (node.last_used, self._serial, node))
        if len(self._leaves) > 64 + 4 * self._num_nodes:
            self._leaves = [entry for entry in self._leaves if self._is_evictable_leaf(entry[2], entry[0])]
            heapq.heapify(self._leaves)

    def clear(self) -> list[int]:
        """Empties the tree and returns its pages. Only when nothing is locked."""
        if any(root.lock for root in self._roots.values()):
            raise CacheIntegrityError("the prefix cache cannot be cleared while a request uses it")
        pages = [page for node in self.nodes() for page in node.pages]
        self._roots.clear()
        self._leaves.clear()
        self.num_pages = self.num_evictable = self._num_nodes = 0
        return pages

    # ---- checks --------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path_pages(self, node: RadixNode) -> tuple[list[int], list[int]]:
        """(tokens, pages) from the root to the end of `node`."""
        path: list[RadixNode] = []
        step: RadixNode | None = node
        while step is not None:
            path.append(step)
            step = step.parent
        tokens = [token for part in reversed(path) for token in part.tokens]
        return tokens, [page for part in reversed(path) for page in part.pages]

    def check(self, holders: dict[RadixNode, int]) -> None:
        """Raises unless structure, counts and locks agree; `holders` counts the requests locked at each node."""
        known = set(self.nodes())
        for node in holders:
            if node not in known:
                raise CacheIntegrityError("a running request holds a node that is no longer in the prefix cache")
        pages = evictable = 0
        for node in known:
            self._check_node(node, holders.get(node, 0))
            pages += len(node.pages)
            evictable += len(node.pages) if node.lock == 0 else 0
        if (pages, evictable) != (self.num_pages, self.num_evictable):
            raise CacheIntegrityError(
                f"prefix cache counts {self.num_pages} pages, {self.num_evictable} evictable; has {pages}, {evictable}"
            )
        queued = {id(node) for used, _, node in self._leaves if self._is_evictable_leaf(node, used)}
        for node in known:
            if node.parent is not None and node.lock == 0 and not node.children and id(node) not in queued:
                raise CacheIntegrityError("an evictable leaf of the prefix cache is unknown to eviction")

    def _check_node(self, node: RadixNode, held: int) -> None:
        if node.lock != held + sum(child.lock for child in node.children.values()):
            raise CacheIntegrityError(
                f"a node with {held} holders and {len(node.children)} children has {node.lock} locks"
            )
        if len(node.tokens) != len(node.pages) * self.page_size or bool(node.pages) == (node.parent is None):
            raise CacheIntegrityError(f"a node has {len(node.tokens)} tokens for {len(node.pages)} pages")
        for key, child in node.children.items():
            if child.parent is not node or key != self._child_key(child.tokens, 0):
                raise CacheIntegrityError("a node of the prefix cache is filed under a wrong parent or key")
