"""Random loads on tiny pools: everybody ends, in order, with exactly the rounds of a request that runs alone."""

from __future__ import annotations

import random

import pytest
from simulated_engine import SimulatedEngine, make_request, unconstrained

from exactspec.types import RunningRequest


def random_requests(rng: random.Random, engine: SimulatedEngine, count: int) -> list[RunningRequest]:
    """Prompts with common beginnings; only such that the pool can hold alone."""
    stem = [rng.randrange(3) for _ in range(60)]
    requests = []
    while len(requests) < count:
        shared = rng.choice([0, 0, 10, 25, 60])
        prompt = stem[:shared] + [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        request = make_request(
            f"r{len(requests)}", prompt, rng.choice([0, 1, 5, 20, 60]), priority=rng.choice([0, 0, 0, 0, 2])
        )
        if engine.scheduler.fits(request.max_tokens):
            requests.append(request)
    return requests


def random_engine(rng: random.Random, page_size: int) -> SimulatedEngine:
    gamma = rng.choice([0, 3, 7])
    least = -(-(45 + gamma + 1) // page_size)
    return SimulatedEngine.make(
        rng.choice([least, least + least // 2, least * 2, least * 40]),
        page_size,
        gamma,
        prefix_cache=rng.random() < 0.7,
        max_running_requests=rng.choice([1, 4, 16]),
        prefill_chunk=rng.choice([1, 7, 64]),
        headroom_tokens=rng.choice([0, 0, 0, 32]),
        wait_for_shared_prefix=rng.random() < 0.7,
    )


def play(seed: int, page_size: int, abort_rate: float) -> tuple[SimulatedEngine, list[RunningRequest], set[str]]:
    rng = random.Random(seed)
    engine = random_engine(rng, page_size)
    requests = random_requests(rng, engine, 25)
    todo, aborted = list(reversed(requests)), set[str]()
    while todo or not engine.scheduler.idle:
        while todo and rng.random() < 0.4:
            engine.scheduler.add(todo.pop())
        engine.step()
        if rng.random() < abort_rate and engine.scheduler.requests():
            victim = rng.choice(engine.scheduler.requests())
            assert engine.scheduler.abort(victim.request.request_id) is victim
            aborted.add(victim.request.request_id)
            engine.scheduler.check_integrity()
        assert engine.steps < 20_000
    return engine, requests, aborted


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("abort_rate", [0.0, 0.05])
def test_every_answer_is_that_of_a_request_alone(page_size: int, abort_rate: float) -> None:
    retractions = 0
    for seed in range(30):
        engine, requests, aborted = play(seed, page_size, abort_rate)
        retractions += engine.scheduler.num_retractions
        for request in requests:
            name, truth = request.request.request_id, unconstrained(request, engine.gamma)
            seen = engine.rounds.get(name, [])
            assert seen == (truth[: len(seen)] if name in aborted else truth)
        assert set(engine.finished) | aborted == {request.request.request_id for request in requests}
        assert engine.cache.num_free + engine.cache.num_cached == engine.cache.num_pages
        assert engine.cache.flush()
        assert engine.cache.num_free == engine.cache.num_pages
    assert retractions > 10, "the load never ran out of memory: this test tests nothing"


def test_the_same_load_gives_the_same_schedule() -> None:
    for seed in range(5):
        assert play(seed, 4, 0.05)[0].trace == play(seed, 4, 0.05)[0].trace


def test_random_retractions_change_nothing() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        engine = random_engine(rng, rng.choice([1, 4, 16]))
        requests = random_requests(rng, engine, 12)
        for request in requests:
            engine.scheduler.add(request)
        while not engine.scheduler.idle:
            engine.step()
            for request in engine.scheduler.running():
                if request.stats.num_retracted < 4 and rng.random() < 0.2:
                    engine.scheduler.force_retract(request)
            engine.scheduler.check_integrity()
            assert engine.steps < 20_000
        for request in requests:
            assert engine.rounds.get(request.request.request_id, []) == unconstrained(request, engine.gamma)


def test_an_endless_stream_of_arrivals_starves_nobody() -> None:
    """A long request among a steady stream of short ones, more than the pool can take at a time."""
    engine = SimulatedEngine.make(24, 4, 3, max_running_requests=4, prefill_chunk=8)
    engine.scheduler.add(make_request("long", [1] * 40, 40))
    for number in range(300):
        engine.scheduler.add(make_request(f"short {number}", [2, number % 7, number], 10))
        engine.step()
        if "long" in engine.finished:
            break
    assert "long" in engine.finished
    assert engine.steps < 100
