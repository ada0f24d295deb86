"""The cache manager told as stories: what is found again, what goes first, what is refused."""

import pytest
from made_requests import RememberingPool, make_request, run_to_end

from exactspec.cache import CacheIntegrityError, CacheManager
from exactspec.errors import ConfigError

PAGE_SIZES = [1, 4, 16]


# ---- prefix hits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_output", [1, 2, 15, 16, 17, 40])
def test_a_follow_up_turn_finds_the_whole_conversation(page_size: int, num_output: int) -> None:
    cache = CacheManager(200, page_size)
    prompt, output = list(range(37)), list(range(500, 500 + num_output))
    assert run_to_end(cache, prompt, output) == 0
    found = run_to_end(cache, [*prompt, *output, 900, 901, 902])
    assert found == (len(prompt) + num_output - 1) // page_size * page_size


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_with_pages_of_one_token_exactly_the_common_prefix_is_found(length: int) -> None:
    cache = CacheManager(100, 1)
    run_to_end(cache, range(length))
    assert run_to_end(cache, [*range(length), 77, 78]) == length
    assert run_to_end(cache, [*range(length), 99, 78]) == length
    assert run_to_end(cache, [*range(length), 77, 78, 79]) == length + 2


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_last_prompt_token_is_always_computed(page_size: int) -> None:
    cache = CacheManager(100, page_size)
    prompt = list(range(32))
    run_to_end(cache, prompt)
    assert run_to_end(cache, prompt) == 31 // page_size * page_size


def test_a_limit_on_cached_tokens_is_kept_to() -> None:
    cache = CacheManager(100, 4)
    run_to_end(cache, range(32))
    for limit, found in [(0, 0), (3, 0), (4, 4), (11, 8), (31, 28), (-1, 0)]:
        request = make_request(range(32))
        assert cache.cached_len(request, limit) == found
        cache.acquire(request, limit)
        assert (request.kv_len, len(request.pages), request.stats.cached_tokens) == (found, found // 4, found)
        cache.release(request)


def test_namespaces_never_share() -> None:
    cache = CacheManager(100, 4)
    run_to_end(cache, range(20), namespace="alice")
    assert run_to_end(cache, range(20), namespace="bob") == 0
    assert run_to_end(cache, range(20)) == 0
    assert run_to_end(cache, range(20), namespace="alice") == 16
    assert cache.num_cached == 15


def test_a_namespace_that_holds_nothing_is_forgotten() -> None:
    cache = CacheManager(4, 1)
    for number in range(50):
        run_to_end(cache, [1, 2], namespace=f"user {number}")
    assert len(list(cache.tree.nodes())) <= 4  # two namespaces of one root and one node each
    cache.check_integrity([])


def test_sampled_branches_of_a_prefix_live_side_by_side() -> None:
    cache = CacheManager(400, 4)
    prompt = list(range(40))
    for branch in range(5):
        run_to_end(cache, prompt, [100 + branch] * 20)
    for branch in range(5):
        assert run_to_end(cache, [*prompt, *[100 + branch] * 20, 7]) == 59 // 4 * 4
    assert cache.num_cached == 10 + 5 * 5  # the prompt once; the second turns filled one page more each


def test_a_few_dozen_long_conversations_stay_between_turns() -> None:
    cache = CacheManager(36 * 2048 // 16, 16)
    histories = [[number * 10_000 + i for i in range(1000)] for number in range(36)]
    for turn in range(2):
        for history in histories:
            found = run_to_end(cache, history, [turn] * 500)
            assert found == (0 if turn == 0 else (len(history) - 2) // 16 * 16)
            history += [*[turn] * 500, -1]
    assert cache.num_evicted == 0


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    cache = CacheManager(20, 4, prefix_cache=False)
    assert run_to_end(cache, range(20)) == 0
    assert run_to_end(cache, range(20)) == 0
    assert (cache.num_free, cache.num_cached) == (20, 0)
    assert cache.flush()


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    cache = CacheManager(50, 4)
    request = make_request(range(10))
    cache.acquire(request, 9)
    assert cache.reserve(request, 12)
    request.kv_len = 10
    cache.release(request)
    request.stats.num_retracted += 1
    cache.acquire(request, 9)
    assert request.kv_len == 8
    assert request.stats.cached_tokens == 0


# ---- sharing while running -------------------------------------------------------------------------------------


def test_two_that_computed_the_same_prefix_end_up_on_the_same_pages() -> None:
    cache, pool = CacheManager(20, 4), RememberingPool(4)
    first, second = make_request(range(18)), make_request([*range(18), 50, 51, 52])
    for request in (first, second):
        cache.acquire(request, len(request.token_ids) - 1)
        assert cache.reserve(request, len(request.token_ids) + 1)
        request.kv_len = len(request.token_ids)
        pool.write(request, 0, request.kv_len)
    cache.commit(first)
    cache.commit(second)
    assert second.pages[:4] == first.pages[:4]
    assert cache.num_cached == 5
    assert cache.num_free == 20 - 5 - 1 - 1  # the tree's, first's tail, second's tail
    for request in (first, second):
        pool.check(request)
    cache.check_integrity([first, second])


def test_a_prefix_in_use_is_never_evicted() -> None:
    cache = CacheManager(6, 1)
    holder = make_request([1, 2, 3])
    run_to_end(cache, [1, 2, 3])
    cache.acquire(holder, 2)
    run_to_end(cache, [7, 8, 9])
    hungry = make_request([4])
    cache.acquire(hungry, 0)
    assert not cache.reserve(hungry, 5)
    assert (cache.num_available, hungry.pages) == (4, [])
    assert cache.reserve(hungry, 4)
    assert holder.pages
    assert set(holder.pages).isdisjoint(hungry.pages)
    cache.check_integrity([holder, hungry])


def test_a_split_below_a_running_request_leaves_it_alone() -> None:
    cache = CacheManager(30, 1)
    long = make_request([1, 2, 3, 4, 5, 6])
    cache.acquire(long, 5)
    assert cache.reserve(long, 7)
    long.kv_len = 6
    cache.commit(long)
    pages = list(long.pages)
    run_to_end(cache, [1, 2, 9])
    run_to_end(cache, [1, 2, 3, 9])
    assert long.pages == pages
    cache.check_integrity([long])
    cache.release(long)
    cache.check_integrity([])
    assert run_to_end(cache, [1, 2, 3, 4, 5, 6, 7]) == 6


# ---- eviction --------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = CacheManager(12, 1)
    for first_token in (10, 20, 30):
        run_to_end(cache, [first_token + i for i in range(4)])
    run_to_end(cache, [10, 11, 12, 13])  # 10 is used again: the order is now 20, 30, 10
    big = make_request([99])
    cache.acquire(big, 0)
    assert cache.reserve(big, 3)
    probes = {first: make_request([first + i for i in range(4)] + [0]) for first in (10, 20, 30)}
    assert {first: cache.cached_len(probe, 99) for first, probe in probes.items()} == {10: 4, 20: 1, 30: 4}
    assert cache.reserve(big, 5)
    assert {first: cache.cached_len(probe, 99) for first, probe in probes.items()} == {10: 4, 20: 0, 30: 3}


def test_a_shared_stem_outlives_its_branches() -> None:
    cache = CacheManager(10, 1)
    run_to_end(cache, [1, 2, 3, 4])
    run_to_end(cache, [1, 2, 5, 6])
    run_to_end(cache, [8, 9])
    big = make_request([99])
    cache.acquire(big, 0)
    assert cache.reserve(big, 6)  # 2 free ones, then 4, 3 and 6, 5
    assert cache.cached_len(make_request([1, 2, 3]), 9) == 2
    assert cache.cached_len(make_request([8, 9, 0]), 9) == 2
    assert cache.reserve(big, 8)
    assert cache.cached_len(make_request([1, 2, 3]), 9) == 0
    assert cache.cached_len(make_request([8, 9, 0]), 9) == 2


def test_the_end_of_a_request_counts_as_a_use() -> None:
    cache = CacheManager(8, 1)
    early = make_request([1, 2, 3])
    cache.acquire(early, 2)
    assert cache.reserve(early, 3)
    early.kv_len = 3
    cache.commit(early)
    run_to_end(cache, [4, 5, 6])
    cache.release(early)  # begun before the other, ended after it
    big = make_request([99])
    cache.acquire(big, 0)
    assert cache.reserve(big, 5)
    assert cache.cached_len(make_request([1, 2, 3, 0]), 9) == 3
    assert cache.cached_len(make_request([4, 5, 6, 0]), 9) == 0


def test_looking_does_not_refresh() -> None:
    cache = CacheManager(6, 1)
    run_to_end(cache, [1, 2])
    run_to_end(cache, [3, 4])
    for _ in range(3):
        assert cache.cached_len(make_request([1, 2, 0]), 9) == 2
    big = make_request([99])
    cache.acquire(big, 0)
    assert cache.reserve(big, 4)
    assert cache.cached_len(make_request([1, 2, 0]), 9) == 0
    assert cache.cached_len(make_request([3, 4, 0]), 9) == 2


# ---- shrinking, flushing, misuse -------------------------------------------------------------------------------


def test_shrink_returns_what_the_block_did_not_use() -> None:
    cache = CacheManager(20, 4)
    request = make_request(range(7))
    cache.acquire(request, 6)
    assert cache.reserve(request, 7 + 16)
    request.kv_len = 3
    cache.shrink(request)
    assert len(request.pages) == 2  # 7 prompt tokens and the anchor: the rest of the prefill keeps its room
    request.token_ids += [50, 51]
    request.kv_len = 8
    cache.shrink(request)
    assert cache.reserve(request, 20)
    cache.shrink(request)
    assert len(request.pages) == 3  # eight tokens and the anchor
    cache.check_integrity([request])


def test_flush_waits_for_the_last_holder() -> None:
    cache = CacheManager(20, 4)
    run_to_end(cache, range(12))
    request = make_request(range(12))
    cache.acquire(request, 11)
    assert not cache.flush()
    assert cache.num_cached == 3
    cache.release(request)
    assert cache.flush()
    assert (cache.num_free, cache.num_cached) == (20, 0)
    assert run_to_end(cache, range(12)) == 0


def test_releasing_twice_is_harmless_and_acquiring_twice_is_not() -> None:
    cache = CacheManager(20, 4)
    request = make_request(range(12))
    cache.acquire(request, 11)
    with pytest.raises(CacheIntegrityError, match="already holds"):
        cache.acquire(request, 11)
    cache.release(request)
    cache.release(request)
    cache.check_integrity([request])


def test_a_commit_beyond_what_exists_is_refused() -> None:
    cache = CacheManager(20, 4)
    request = make_request(range(8))
    cache.acquire(request, 7)
    assert cache.reserve(request, 4)
    request.kv_len = 8
    with pytest.raises(CacheIntegrityError, match="1 pages and 8 tokens for kv_len 8"):
        cache.commit(request)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_size"):
        CacheManager(10, 0)


# ---- the integrity check sees what it should -------------------------------------------------------------------


def _busy_cache() -> tuple[CacheManager, list]:
    cache = CacheManager(40, 4)
    requests = [make_request([*range(12), number]) for number in range(2)]
    for request in requests:
        cache.acquire(request, 12)
        assert cache.reserve(request, 20)
        request.kv_len = 13
        cache.commit(request)
    cache.check_integrity(requests)
    return cache, requests


def test_the_check_sees_a_lost_page() -> None:
    cache, requests = _busy_cache()
    requests[0].pages.pop()
    with pytest.raises(CacheIntegrityError, match="the pool has 40"):
        cache.check_integrity(requests)


def test_the_check_sees_a_page_with_two_owners() -> None:
    cache, requests = _busy_cache()
    requests[0].pages[-1] = requests[1].pages[-1]
    with pytest.raises(CacheIntegrityError, match="belongs to request"):
        cache.check_integrity(requests)


def test_the_check_sees_a_page_that_is_free_and_used() -> None:
    cache, requests = _busy_cache()
    cache.pool.free([requests[0].pages[-1]])
    with pytest.raises(CacheIntegrityError, match="is free and belongs to"):
        cache.check_integrity(requests)


def test_the_check_sees_an_unbalanced_lock() -> None:
    cache, requests = _busy_cache()
    requests[0].cache_node.lock += 1
    with pytest.raises(CacheIntegrityError, match="locks"):
        cache.check_integrity(requests)


def test_the_check_sees_a_leak_by_a_request_that_left() -> None:
    cache, requests = _busy_cache()
    with pytest.raises(CacheIntegrityError, match="have left"):
        cache.check_integrity(requests[:1])


def test_the_check_sees_foreign_pages_in_the_shared_part() -> None:
    cache, requests = _busy_cache()
    requests[0].pages[0], requests[0].pages[1] = requests[0].pages[1], requests[0].pages[0]
    with pytest.raises(CacheIntegrityError, match="not those of the prefix cache"):
        cache.check_integrity(requests)
