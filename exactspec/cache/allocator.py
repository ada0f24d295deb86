"""Hands out pages of the KV pools. Target and draft pools are indexed by the same page ids."""

from __future__ import annotations

from collections.abc import Iterable

from exactspec.errors import ConfigError, ExactSpecError


class CacheIntegrityError(ExactSpecError, RuntimeError):
    """The book-keeping of KV pages contradicts itself: a defect of the engine, never of a request."""


class PagePool:
    """A stack of free page ids 0 .. num_pages - 1. Allocation order is deterministic; a double free raises."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest ids are handed out first
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def allocate(self, count: int) -> list[int] | None:
        """`count` page ids, or None (and nothing changed) when fewer are free."""
        if count <= 0:
            return []
        if count > len(self._free):
            return None
        pages = self._free[-count:]
        del self._free[-count:]
        pages.reverse()
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise CacheIntegrityError(f"page {page} is outside the pool of {self.num_pages} pages")
            if self._is_free[page]:
                raise CacheIntegrityError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self._free.append(page)
