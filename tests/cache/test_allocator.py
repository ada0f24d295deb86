"""The page allocator: deterministic, whole or nothing, and never a page twice."""

import pytest

from exactspec.cache import CacheIntegrityError, PagePool
from exactspec.errors import ConfigError


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first == [0, 1]
    assert second == [2, 3, 4]
    assert pool.num_free == 0
    pool.free([3, 1])
    assert sorted(pool.allocate(2) or []) == [1, 3]


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_the_same_history_gives_the_same_pages() -> None:
    def history(pool: PagePool) -> list[list[int] | None]:
        taken = [pool.allocate(3), pool.allocate(2)]
        pool.free(taken[0] or [])
        return [*taken, pool.allocate(4), pool.allocate(1)]

    assert history(PagePool(10)) == history(PagePool(10))


def test_misuse_is_named() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1) or []
    pool.free(pages)
    with pytest.raises(CacheIntegrityError, match="page 0 is freed twice"):
        pool.free(pages)
    with pytest.raises(CacheIntegrityError, match="page 7 is outside"):
        pool.free([7])
    with pytest.raises(ConfigError, match="num_pages"):
        PagePool(0)
