"""Batches, chunks, prefix hits, retraction and aborts: none may be seen in an answer, and no page may be lost."""

from __future__ import annotations

import random

import pytest
import torch
from fakes import TINY_VOCAB, tiny_model
from scripted import Gathered, ScriptedDrafter, make_engine, request, run, silent, sometimes

RANDOM = random.Random(3)
PROMPTS = [[RANDOM.randrange(256) for _ in range(length)] for length in (3, 9, 17, 26, 40, 33)]


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def mixed_requests(longer=0):
    """Greedy and sampled, with and without penalties, logprobs and prompt logprobs."""
    requests = []
    for number, prompt in enumerate(PROMPTS):
        requests.append(
            request(
                f"m{number}",
                prompt,
                seed=number,
                temperature=(0.0, 0.7, 1.0)[number % 3],
                max_new_tokens=12 + number + longer,
                ignore_eos=True,
                logprobs=2 if number % 2 else None,
                prompt_logprobs=1 if number % 3 == 0 else None,
                prompt_logprob_start=number,
                frequency_penalty=0.5 if number == 4 else 0.0,
            )
        )
    return requests


@pytest.fixture(scope="module")
def truth(target):
    answers = {}
    for one in mixed_requests():
        answers.update(run(make_engine(ScriptedDrafter(silent, 0), target=target, prefix_cache=False), [one]))
    return answers


def assert_same(found, truth):
    for name, expected in truth.items():
        assert found[name].answer == expected.answer, name
        assert found[name].prompt_logprobs == expected.prompt_logprobs, name


def drafter(truth):
    return ScriptedDrafter(sometimes({name: g.token_ids for name, g in truth.items()}, TINY_VOCAB), 4)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [3, 512])
def test_batches_and_chunks_do_not_show(target, truth, page_size, chunk):
    engine = make_engine(drafter(truth), target=target, page_size=page_size, prefill_chunk=chunk)
    assert_same(run(engine, mixed_requests()), truth)


def test_prefix_hits_do_not_show_not_even_in_accept_lengths(target, truth):
    engine = make_engine(drafter(truth), target=target)
    cold = run(engine, mixed_requests())
    warm = run(engine, mixed_requests())
    assert_same(cold, truth)
    assert_same(warm, truth)
    assert sum(g.stats.cached_tokens for g in warm.values()) > sum(g.stats.cached_tokens for g in cold.values())
    for name in truth:
        assert warm[name].stats.accepted_per_round == cold[name].stats.accepted_per_round


def test_retraction_does_not_show(target):
    requests = mixed_requests(longer=50)
    truth = run(make_engine(ScriptedDrafter(silent, 0), target=target, num_pages=400), requests)
    free = run(make_engine(drafter(truth), target=target, num_pages=400), requests)
    engine = make_engine(drafter(truth), target=target, num_pages=40)
    tight = run(engine, requests)
    assert sum(g.stats.num_retracted for g in tight.values()) > 0
    assert_same(tight, truth)
    for name in truth:
        assert tight[name].stats.accepted_per_round == free[name].stats.accepted_per_round
    assert engine.flush_cache()
    assert engine.cache.num_free == 40


def test_forced_retraction_at_every_step(target, truth):
    engine = make_engine(drafter(truth), target=target, prefill_chunk=5)
    gathered = {one.request_id: Gathered() for one in mixed_requests()}
    for one in mixed_requests():
        engine.add(one)
    steps = 0
    while engine.has_work():
        for output in engine.step():
            gathered[output.request_id].take(output)
        running = engine.scheduler.running()
        if running and steps % 3 == 0:
            engine.scheduler.force_retract(running[steps % len(running)])
        engine.check_integrity()
        steps += 1
        assert steps < 3000
    assert_same(gathered, truth)


@pytest.mark.parametrize("steps_before", [1, 2, 4, 9])
def test_all_running_ones_retracted_and_the_cache_emptied(target, truth, steps_before):
    engine = make_engine(drafter(truth), target=target, prefill_chunk=20)
    gathered = {one.request_id: Gathered() for one in mixed_requests()}
    for one in mixed_requests():
        engine.add(one)
    for _ in range(steps_before):
        for output in engine.step():
            gathered[output.request_id].take(output)
    running = engine.scheduler.running()
    assert running
    assert not engine.flush_cache(while_waiting=True)  # they hold pages
    engine.retract_running()
    engine.check_integrity()
    assert not engine.flush_cache()
    assert engine.flush_cache(while_waiting=True)
    assert engine.cache.num_free == engine.cache.num_pages
    while engine.has_work():
        for output in engine.step():
            gathered[output.request_id].take(output)
    assert_same(gathered, truth)
    assert all(request.stats.num_retracted == 1 for request in running)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_aborts_at_any_moment_return_all_memory(target, truth, page_size, prefix_cache):
    chance = random.Random(page_size)
    engine = make_engine(
        drafter(truth), target=target, page_size=page_size, prefix_cache=prefix_cache, num_pages=400, prefill_chunk=7
    )
    alive: set[str] = set()
    ended: dict[str, str] = {}
    names = list(truth)
    for number in range(60):
        name = names[number % len(names)]
        base = next(one for one in mixed_requests() if one.request_id == name)
        if name not in alive:
            engine.add(base)
            alive.add(name)
        for output in engine.step():
            if output.finish is not None:
                alive.discard(output.request_id)
                ended[output.request_id] = output.finish.kind
        if alive and chance.random() < 0.4:
            victim = chance.choice(sorted(alive))
            assert engine.abort(victim)
        engine.check_integrity()
    while engine.has_work():
        engine.step()
    assert engine.flush_cache()
    assert engine.cache.num_free == 400
    assert set(ended.values()) <= {"length", "abort"}
    assert "abort" in ended.values()
    assert not engine.abort("unknown")


def test_greedy_requests_are_not_disturbed_by_sampled_neighbours(target):
    greedy = [request(f"g{i}", PROMPTS[i % 6], temperature=0.0, max_new_tokens=10, ignore_eos=True) for i in range(6)]
    sampled = [
        request(f"s{i}", PROMPTS[i % 6], seed=i, temperature=1.0, top_k=5, max_new_tokens=10, ignore_eos=True)
        for i in range(6)
    ]
    alone = {}
    for one in greedy + sampled:
        alone.update(run(make_engine(ScriptedDrafter(silent, 0), target=target), [one]))
    mixed = [one for pair in zip(greedy, sampled, strict=True) for one in pair]
    together = run(make_engine(ScriptedDrafter(silent, 0), target=target), mixed)
    for name, expected in alone.items():
        assert together[name].answer == expected.answer


def test_hidden_states_have_one_row_per_token(target, truth):
    engine = make_engine(drafter(truth), target=target, hidden_states=True, prefill_chunk=5, prefix_cache=False)
    asked = request(
        "m1", PROMPTS[1], seed=1, temperature=0.7, max_new_tokens=9, ignore_eos=True, return_hidden_states=True
    )
    found = run(engine, [asked])["m1"]
    first = next(output for output in found.outputs if output.prompt_hidden is not None)
    assert first.prompt_hidden.shape == (len(PROMPTS[1]), target.spec.hidden_size)
    assert len(found.hidden) == 9
    assert (found.hidden[0] == first.prompt_hidden[-1]).all()
    logits = target.logits(first.prompt_hidden[-1:])
    assert logits.shape == (1, TINY_VOCAB)


@pytest.mark.parametrize("thrown_back_after", [1, 2, 4, 5, 7])
def test_hidden_states_of_a_request_that_was_thrown_back(target, truth, thrown_back_after):
    """In the middle of its prefill (of nine tokens, two a step), and after: no row twice, none missing."""
    asked = request(
        "m1", PROMPTS[1], seed=1, temperature=0.7, max_new_tokens=9, ignore_eos=True, return_hidden_states=True
    )
    rows = []
    for disturbed in (False, True):
        engine = make_engine(drafter(truth), target=target, hidden_states=True, prefill_chunk=2, prefix_cache=False)
        engine.add(asked)
        gathered, steps = Gathered(), 0
        while engine.has_work():
            for output in engine.step():
                gathered.take(output)
            steps += 1
            if disturbed and steps == thrown_back_after and engine.scheduler.running():
                engine.retract_running()
        (prompt,) = [output.prompt_hidden for output in gathered.outputs if output.prompt_hidden is not None]
        rows.append(torch.cat([prompt, *(row[None] for row in gathered.hidden)]))
        assert gathered.stats.num_retracted == int(disturbed)
    assert torch.equal(*rows)
    assert len(rows[0]) == len(PROMPTS[1]) + 9
