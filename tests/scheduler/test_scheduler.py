"""The scheduler told as stories: order, chunks, memory, and who is refused."""

import pytest
from simulated_engine import SimulatedEngine, make_request, unconstrained

from exactspec.cache import CacheManager
from exactspec.errors import ConfigError, QueueFullError, RequestError
from exactspec.scheduler import PrefillChunk, Scheduler, max_cached_tokens


def chunks(plan) -> list[tuple[str, int, int]]:
    return [(chunk.request.request.request_id, chunk.start, chunk.end) for chunk in plan.prefills]


def names(requests) -> list[str]:
    return [request.request.request_id for request in requests]


# ---- chunks and order ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_into_chunks_and_the_rest_of_the_budget_goes_on() -> None:
    engine = SimulatedEngine.make(100, 4, prefill_chunk=10)
    engine.scheduler.add(make_request("a", range(23), 3))
    engine.scheduler.add(make_request("b", range(50, 58), 3))
    assert chunks(engine.step()) == [("a", 0, 10)]
    assert chunks(engine.step()) == [("a", 10, 20)]
    plan = engine.step()
    assert chunks(plan) == [("a", 20, 23), ("b", 0, 7)]
    assert [(chunk.is_first, chunk.is_last) for chunk in plan.prefills] == [(False, True), (True, False)]
    plan = engine.step()
    assert (chunks(plan), names(plan.decodes)) == ([("b", 7, 8)], ["a"])


def test_decodes_are_in_every_step_and_cost_no_prefill_budget() -> None:
    engine = SimulatedEngine.make(200, 4, prefill_chunk=4)
    for name in "abc":
        engine.scheduler.add(make_request(name, [ord(name)] * 4, 50))
        engine.step()
    engine.scheduler.add(make_request("late", range(12), 5))
    plan = engine.step()
    assert (names(plan.decodes), chunks(plan)) == (["a", "b", "c"], [("late", 0, 4)])


def test_priority_comes_before_arrival_and_arrival_decides_among_equals() -> None:
    engine = SimulatedEngine.make(200, 4, max_running_requests=1)
    for name, priority in [("a", 0), ("b", 0), ("urgent", 5), ("c", 0), ("never mind", -1)]:
        engine.scheduler.add(make_request(name, [1, 2, 3], 2, priority))
    engine.run()
    assert engine.finished == ["urgent", "a", "b", "c", "never mind"]


def test_a_long_prefill_makes_way_for_those_of_higher_priority_alone() -> None:
    engine = SimulatedEngine.make(100, 4, prefill_chunk=10)
    engine.scheduler.add(make_request("long", range(60), 3))
    assert chunks(engine.step()) == [("long", 0, 10)]
    engine.scheduler.add(make_request("equal", [70, 71], 3))
    engine.scheduler.add(make_request("urgent", range(80, 92), 3, 2))
    engine.scheduler.add(make_request("probe", [99], 1, 3))
    assert chunks(engine.step()) == [("probe", 0, 1), ("urgent", 0, 9)]
    assert chunks(engine.step()) == [("urgent", 9, 12), ("long", 10, 17)]
    assert engine.finished == ["probe"]
    engine.run()
    assert engine.finished == ["probe", "urgent", "long", "equal"]


def test_nobody_overtakes_a_request_that_waits_for_memory() -> None:
    engine = SimulatedEngine.make(12, 4, max_running_requests=8, headroom_tokens=0)
    engine.scheduler.add(make_request("runs", range(20), 12))
    engine.step()
    engine.scheduler.add(make_request("big", range(100, 130), 2))
    engine.scheduler.add(make_request("small", [7], 2))
    while "runs" not in engine.finished:
        plan = engine.step()
        assert not {"big", "small"} & {name for name, _, _ in chunks(plan)}
    engine.run()
    assert engine.finished == ["runs", "big", "small"] or engine.finished == ["runs", "small", "big"]


def test_the_first_token_comes_with_the_last_chunk_and_only_then() -> None:
    request = make_request("a", range(8), 4)
    assert not PrefillChunk(request, 0, 4, True, False).emits
    assert PrefillChunk(request, 4, 8, False, True).emits
    request.token_ids += [1, 2]  # resumed after a retraction: the anchor is known
    assert not PrefillChunk(request, 8, 9, False, True).emits


def test_prefill_makes_progress_with_a_budget_of_one() -> None:
    engine = SimulatedEngine.make(100, 16, prefill_chunk=1)
    for name in "ab":
        engine.scheduler.add(make_request(name, [ord(name)] * 5, 3))
    engine.run()
    assert engine.finished == ["a", "b"]


# ---- the prefix cache ------------------------------------------------------------------------------------------


def test_a_second_turn_starts_behind_its_cached_prefix() -> None:
    engine = SimulatedEngine.make(100, 4)
    first = make_request("a", range(10), 6)
    engine.scheduler.add(first)
    engine.run()
    second = make_request("b", [*first.token_ids, 90, 91], 2)
    engine.scheduler.add(second)
    assert chunks(engine.step()) == [("b", 12, 18)]
    assert second.stats.cached_tokens == 12


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    prompt = list(range(100))
    engine = SimulatedEngine.make(200, 4, prefill_chunk=64)
    for number in range(6):
        engine.scheduler.add(make_request(f"sample {number}", prompt, 4))
    engine.run()
    assert engine.prefill_rows == 100 + 5 * 4  # 96 tokens come from the cache: the last one is always computed
    patient = engine.steps
    engine = SimulatedEngine.make(200, 4, prefill_chunk=64, wait_for_shared_prefix=False)
    for number in range(6):
        engine.scheduler.add(make_request(f"sample {number}", prompt, 4))
    engine.run()
    assert engine.prefill_rows > 200
    assert engine.steps >= patient


def test_short_common_beginnings_are_not_waited_for() -> None:
    engine = SimulatedEngine.make(200, 4)
    engine.scheduler.add(make_request("a", [*range(16), 1], 4))
    engine.scheduler.add(make_request("b", [*range(16), 2], 4))
    assert len(engine.step().prefills) == 1 + 1


@pytest.mark.parametrize(
    ("start", "limit"), [(0, 0), (1, 0), (2, 1), (9, 8), (19, 18)], ids=["all", "1", "2", "9", "last"]
)
def test_rows_that_prompt_logprobs_need_are_not_taken_from_the_cache(start: int, limit: int) -> None:
    request = make_request("a", range(20), 4, prompt_logprobs=1, prompt_logprob_start=start)
    assert max_cached_tokens(request) == limit
    request.token_ids.append(7)
    assert max_cached_tokens(request) == 20  # scored already: a resume may take everything before the anchor


def test_without_prompt_logprobs_all_but_the_last_token_may_be_cached() -> None:
    assert max_cached_tokens(make_request("a", range(20), 4)) == 19


# ---- memory ----------------------------------------------------------------------------------------------------


def test_the_youngest_is_retracted_and_goes_on_where_it_was() -> None:
    engine = SimulatedEngine.make(16, 4, 3, headroom_tokens=0)
    requests = [make_request(name, [ord(name)] * 8, 30) for name in "abc"]
    for request in requests:
        engine.scheduler.add(request)
    retracted = []
    while not engine.scheduler.idle:
        retracted += names(engine.step().retracted)
    assert retracted
    assert retracted[0] == "c"
    assert "a" not in retracted
    assert engine.scheduler.num_retractions == len(retracted) == sum(r.stats.num_retracted for r in requests)
    for request in requests:
        assert engine.rounds[request.request.request_id] == unconstrained(request, 3)


def test_priority_protects_from_retraction() -> None:
    engine = SimulatedEngine.make(16, 4, 3, headroom_tokens=0)
    for name, priority in [("a", 0), ("b", 1), ("c", 2)]:
        engine.scheduler.add(make_request(name, [ord(name)] * 8, 30, priority))
    retracted = []
    while not engine.scheduler.idle:
        retracted += names(engine.step().retracted)
    assert retracted[0] == "a"
    assert "c" not in retracted


def test_a_resumed_request_computes_only_what_was_evicted() -> None:
    engine = SimulatedEngine.make(100, 4)
    request = make_request("a", range(30), 20)
    engine.scheduler.add(request)
    for _ in range(5):
        engine.step()
    rows, tokens = engine.prefill_rows, len(request.token_ids)
    engine.scheduler.force_retract(request)
    assert (request.pages, request.kv_len) == ([], 0)
    engine.step()
    assert engine.prefill_rows - rows == (tokens - 1) % 4
    engine.run()
    assert request.stats.num_retracted == 1
    assert engine.rounds["a"] == unconstrained(request, 0)


def test_a_resumed_request_with_everything_cached_decodes_at_once() -> None:
    engine = SimulatedEngine.make(100, 1)
    engine.scheduler.add(make_request("a", range(30), 20))
    for _ in range(5):
        engine.step()
    engine.scheduler.force_retract(engine.scheduler.running()[0])
    plan = engine.step()
    assert (names(plan.decodes), chunks(plan)) == (["a"], [])


def test_a_retraction_before_the_first_token_starts_the_prefill_again() -> None:
    engine = SimulatedEngine.make(100, 4, prefill_chunk=8)
    request = make_request("a", range(30), 5, prompt_logprobs=0)
    engine.scheduler.add(request)
    engine.step()
    engine.scheduler.force_retract(request)
    plan = engine.step()
    assert chunks(plan) == [("a", 0, 8)]
    assert plan.prefills[0].is_first


def test_a_full_pool_does_not_thrash() -> None:
    """Four long requests in a pool for one and a half: retractions stay few beside the number of steps."""
    for page_size in (1, 4, 16):
        engine = SimulatedEngine.make(192 // page_size, page_size, 3, headroom_tokens=0)
        for name in "abcd":
            engine.scheduler.add(make_request(name, [ord(name)] * 20, 100))
        engine.run()
        assert engine.steps > 80
        assert 0 < engine.scheduler.num_retractions <= 6


@pytest.mark.parametrize(("headroom", "retracts"), [(0, True), (32, False)])
def test_headroom_keeps_newcomers_out_that_would_be_retracted_soon(headroom: int, retracts: bool) -> None:
    engine = SimulatedEngine.make(64, 1, headroom_tokens=headroom)
    engine.scheduler.add(make_request("long", [1] * 40, 23))
    engine.step()
    for number in range(5):
        engine.scheduler.add(make_request(f"short {number}", [2, number, 0], 12))
    engine.run()
    assert (engine.scheduler.num_retractions > 0) == retracts
    assert len(engine.finished) == 6


# ---- refusals --------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    scheduler = Scheduler(CacheManager(4, 4), max_running_requests=4, prefill_chunk=8, gamma_rows=4)
    assert scheduler.fits(12)
    assert not scheduler.fits(13)
    scheduler.add(make_request("fits", range(6), 6))
    with pytest.raises(RequestError, match="room for 12") as refusal:
        scheduler.add(make_request("too long", range(6), 7))
    assert refusal.value.field == "max_new_tokens"
    with pytest.raises(RequestError) as refusal:
        scheduler.add(make_request("prompt too long", range(13), 1))
    assert refusal.value.field == "prompt"
    assert names(scheduler.requests()) == ["fits"]


def test_the_largest_request_that_fits_really_runs() -> None:
    for page_size in (1, 4, 16):
        engine = SimulatedEngine.make(64 // page_size, page_size, 7)
        assert engine.scheduler.fits(56)
        engine.scheduler.add(make_request("other", [5] * 20, 20))
        engine.scheduler.add(make_request("largest", range(30), 26))
        engine.run()
        assert sorted(engine.finished) == ["largest", "other"]


def test_a_full_queue_refuses_and_goes_on() -> None:
    scheduler = Scheduler(CacheManager(40, 4), max_running_requests=1, prefill_chunk=8, max_waiting=2)
    for name in "ab":
        scheduler.add(make_request(name, [1, 2], 2))
    with pytest.raises(QueueFullError, match="limit is 2"):
        scheduler.add(make_request("c", [1, 2], 2))
    scheduler.schedule()
    scheduler.add(make_request("c", [1, 2], 2))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(CacheManager(40, 4), max_running_requests=1, prefill_chunk=8)
    scheduler.add(make_request("a", [1], 1))
    with pytest.raises(RequestError, match="request_id"):
        scheduler.add(make_request("a", [1], 1))
    assert scheduler.abort("a") is not None
    scheduler.add(make_request("a", [1], 1))


@pytest.mark.parametrize("name", ["max_running_requests", "prefill_chunk", "gamma_rows"])
def test_impossible_settings_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SimulatedEngine.make(10, 4, **{name: 0})


# ---- aborts ----------------------------------------------------------------------------------------------------


def test_an_abort_finds_a_request_wherever_it_is() -> None:
    engine = SimulatedEngine.make(60, 4, 3, max_running_requests=2, prefill_chunk=8)
    scheduler = engine.scheduler
    for name in ("decoding", "prefilling", "waiting"):
        scheduler.add(make_request(name, [len(name)] * (4 if name == "decoding" else 30), 30))
    engine.step()
    assert scheduler.abort("unknown") is None
    for name in ("waiting", "prefilling", "decoding"):
        request = scheduler.abort(name)
        assert request is not None
        assert request.pages == []
        assert scheduler.abort(name) is None
        scheduler.check_integrity()
    assert scheduler.idle
    assert engine.cache.num_free + engine.cache.num_cached == 60
