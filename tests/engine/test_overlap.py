"""Rounds launched before the one in front of them is read: the same answers, and never a token too many."""

from __future__ import annotations

import random

import pytest
from fakes import tiny_model
from flights import LaunchingRunner, launching
from scripted import Gathered, ScriptedDrafter, make_engine, oracle, request, run, silent, sometimes

from exactspec.engine.engine import Engine
from exactspec.engine.round import RoundRunner

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def truth(target):
    """Greedy answers of four prompts, 40 tokens each."""
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    found = run(engine, [asked(name, max_new_tokens=40) for name in "abcd"])
    return {name: found[name].token_ids for name in found}


def asked(name, **params):
    params.setdefault("temperature", 0.0)
    params.setdefault("ignore_eos", True)
    return request(name, [*PROMPT, *[ord(name)] * 3], seed=ord(name), **params)


def overlapping(target, truth, gamma=3, script=sometimes, **config) -> tuple[Engine, LaunchingRunner]:
    drafts = script(truth, target.config.vocab_size) if script is sometimes else script(truth)
    engine = make_engine(ScriptedDrafter(drafts, gamma), target=target, **config)
    return engine, launching(engine)


def settled(target, truth, requests, gamma=3, **config):
    """The answers without overlap."""
    engine, runner = overlapping(target, truth, gamma, overlap=False, **config)
    found = run(engine, requests)
    assert runner.num_launched == 0
    return found


def everything(found: Gathered):
    stats = found.stats
    counts = (stats.rounds, stats.num_drafted, stats.num_verified, stats.num_accepted, stats.num_committed)
    return found.answer, found.sources, counts


def step_to(engine, gathered, steps):
    for _ in range(steps):
        for output in engine.step():
            gathered.setdefault(output.request_id, Gathered()).take(output)
        engine.check_integrity()


def finish(engine, gathered):
    while engine.has_work():
        step_to(engine, gathered, 1)
    return gathered


@pytest.mark.parametrize("gamma", [0, 3])
def test_overlap_changes_no_answer_and_no_count(target, truth, gamma):
    requests = [
        asked("a", max_new_tokens=17, logprobs=2),
        asked("b", max_new_tokens=9, temperature=0.9, logprobs=0, logprobs_kind="scaled"),
        asked("c", max_new_tokens=23, temperature=1.2),
        asked("d", max_new_tokens=2, logprobs=1),
    ]
    engine, runner = overlapping(target, truth, gamma)
    got = run(engine, requests)
    want = settled(target, truth, requests, gamma)
    assert {name: everything(got[name]) for name in "abcd"} == {name: everything(want[name]) for name in "abcd"}
    assert engine.rounds.num_overlapped == runner.num_behind > 4
    assert engine.stats().output_tokens == 17 + 9 + 23 + 2


@pytest.mark.parametrize("position", range(1, 10))
def test_a_stop_token_inside_a_block_while_the_next_round_is_in_flight(target, truth, position):
    """The round in flight goes on from tokens that no longer count: nothing of it is seen, its pages come back."""
    stop = truth["a"][position]
    position = truth["a"].index(stop)
    requests = [
        asked("a", max_new_tokens=40, ignore_eos=False, stop_token_ids=[stop], logprobs=1),
        asked("b", max_new_tokens=30, logprobs=1),
    ]
    engine, runner = overlapping(target, truth, script=oracle)
    got = run(engine, requests)
    assert got["a"].token_ids == truth["a"][: position + 1]
    assert (got["a"].finish.kind, got["a"].finish.matched) == ("stop", stop)
    assert len(got["a"].logprobs) == position + 1
    assert got["b"].token_ids == truth["b"][:30]
    assert runner.num_dropped_rows >= (1 if position else 0)
    assert engine.cache.num_free + engine.cache.num_cached == engine.cache.num_pages


def test_what_an_unread_round_wrote_is_not_in_the_prefix_cache(target, truth):
    """After a stop, whoever continues the answer finds K/V of committed tokens alone, and the right ones."""
    engine, _ = overlapping(target, {**truth, "q": []}, script=oracle, page_size=1)
    run(engine, [asked("a", max_new_tokens=40, ignore_eos=False, stop_token_ids=[truth["a"][4]])])
    follow = request("q", [*PROMPT, *[ord("a")] * 3, *truth["a"][:12]], temperature=0.0, max_new_tokens=6)
    again = run(engine, [follow])["q"]
    assert again.stats.cached_tokens == len(PROMPT) + 3 + truth["a"].index(truth["a"][4])
    assert again.token_ids == truth["a"][12:18]


def test_a_stop_string_is_found_one_step_late_and_shows_nothing_more(target, truth):
    text = target.tokenizer.decode(truth["a"])
    stop = next(text[i : i + 2] for i in range(4, 30) if "�" not in text[i : i + 2])
    requests = [asked("a", max_new_tokens=40, ignore_eos=False, stop=[stop], logprobs=0), asked("b", max_new_tokens=40)]
    got = run(overlapping(target, truth)[0], requests)
    want = settled(target, truth, requests)
    assert got["a"].finish.matched == stop
    assert {name: everything(got[name]) for name in "ab"} == {name: everything(want[name]) for name in "ab"}


def test_no_round_is_launched_for_requests_that_end_for_certain(target, truth):
    engine, runner = overlapping(target, truth, gamma=0)
    got = run(engine, [asked("a", max_new_tokens=5)])
    assert got["a"].token_ids == truth["a"][:5]
    assert (runner.num_launched, runner.num_behind, runner.num_dropped_rows) == (4, 3, 0)


def test_an_abort_in_flight_takes_effect_at_once(target, truth):
    engine, runner = overlapping(target, truth)
    gathered = {}
    for name in "abc":
        engine.add(asked(name, max_new_tokens=30, logprobs=0))
    step_to(engine, gathered, 4)
    assert runner.unread == 1
    seen = list(gathered["b"].token_ids)
    assert engine.abort("b")
    engine.check_integrity()
    finish(engine, gathered)
    assert gathered["b"].token_ids == seen == truth["b"][: len(seen)]
    assert gathered["b"].finish.kind == "abort"
    assert gathered["a"].token_ids == truth["a"][:30]
    assert gathered["c"].token_ids == truth["c"][:30]


def aborted_with_a_round_unread(target, truth):
    engine, runner = overlapping(target, truth)
    gathered = {}
    engine.add(asked("a", max_new_tokens=30))
    step_to(engine, gathered, 3)
    assert runner.unread == 1
    engine.abort("a")
    return engine, gathered


def assert_nothing_is_left(engine, truth):
    assert not engine.has_work()
    assert engine.flush_cache()
    assert run(engine, [asked("b", max_new_tokens=20)])["b"].token_ids == truth["b"][:20]


def test_aborting_all_leaves_an_unread_round_that_harms_nobody(target, truth):
    engine, gathered = aborted_with_a_round_unread(target, truth)
    step_to(engine, gathered, 1)
    assert_nothing_is_left(engine, truth)


def test_an_abort_between_steps_is_told_without_a_step(target, truth):
    """A paused server does not step, yet the client that aborts wants its answer and the pages are wanted back."""
    engine, _ = aborted_with_a_round_unread(target, truth)
    (output,) = engine.take_ended()
    assert (output.request_id, output.token_ids, output.finish.kind) == ("a", [], "abort")
    assert engine.take_ended() == []
    assert_nothing_is_left(engine, truth)


def test_a_newcomer_drains_the_rounds_and_joins(target, truth):
    engine, runner = overlapping(target, truth)
    gathered = {}
    engine.add(asked("a", max_new_tokens=30))
    step_to(engine, gathered, 4)
    engine.add(asked("b", max_new_tokens=30))
    step_to(engine, gathered, 2)  # what was in flight is read; then the prompt of b is in
    assert runner.unread == 0
    assert engine.scheduler.num_running == 2
    finish(engine, gathered)
    assert {name: gathered[name].token_ids for name in "ab"} == {name: truth[name][:30] for name in "ab"}


def test_who_cannot_be_admitted_does_not_stop_the_overlap(target, truth):
    """With all places taken a queue is the normal state."""
    engine, runner = overlapping(target, truth, max_running_requests=2)
    got = run(engine, [asked(name, max_new_tokens=20) for name in "abcd"])
    assert {name: got[name].token_ids for name in "abcd"} == {name: truth[name][:20] for name in "abcd"}
    assert runner.num_behind > runner.num_launched / 2


@pytest.mark.parametrize("num_pages", range(14, 24))
def test_retraction_under_page_pressure(target, truth, num_pages):
    """Rounds ahead take pages ahead, but retract nobody: that is for settled steps."""
    requests = [asked(name, max_new_tokens=30, logprobs=0, temperature=0.5 * (name == "b")) for name in "abc"]
    engine, runner = overlapping(target, truth, num_pages=num_pages, prefix_cache=num_pages % 2 == 0)
    engine.scheduler.headroom_tokens = 0
    got = run(engine, requests)
    want = settled(target, truth, requests)
    assert {name: got[name].answer for name in "abc"} == {name: want[name].answer for name in "abc"}
    assert engine.stats().num_retractions > 0
    assert runner.num_behind > 0


def test_requests_thrown_back_while_a_round_is_in_flight(target, truth):
    engine, _ = overlapping(target, truth)
    gathered = {}
    for name in "abc":
        engine.add(asked(name, max_new_tokens=40))
    steps = 0
    while engine.has_work():
        step_to(engine, gathered, 1)
        steps += 1
        running = engine.scheduler.running()
        if steps % 4 == 0 and running:
            engine.scheduler.force_retract(running[steps % len(running)])
    assert {name: gathered[name].token_ids for name in "abc"} == {name: truth[name][:40] for name in "abc"}
    assert engine.stats().num_retractions >= 3


def test_an_ordinary_runner_reads_every_round(target, truth):
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    plan_runner = engine.runner
    assert isinstance(plan_runner, RoundRunner)
    assert run(engine, [asked("a", max_new_tokens=10)])["a"].token_ids == truth["a"][:10]
    assert engine.rounds.num_overlapped == 0
    with pytest.raises(NotImplementedError, match="reads every round"):
        plan_runner.launch([])


def test_a_step_that_fails_leaves_nothing_in_flight(target, truth):
    """The host has not followed that round: the next step starts again from what is committed."""
    engine, runner = overlapping(target, truth)
    gathered = {}
    for name in "ab":
        engine.add(asked(name, max_new_tokens=30, logprobs=0))
    step_to(engine, gathered, 3)
    runner.fail_in = 1
    with pytest.raises(RuntimeError, match="read-back"):
        engine.step()
    finish(engine, gathered)
    assert {name: gathered[name].token_ids for name in "ab"} == {name: truth[name][:30] for name in "ab"}


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(target, truth, seed):
    """Arrivals, ends of every kind, aborts and retractions in any order, in a small pool: every answer is a beginning
    of the true one, whole unless it was aborted, and no page is lost."""
    numbers = random.Random(seed)
    names = [f"{letter}{i}" for i in range(6) for letter in "abcd"]
    engine, runner = overlapping(
        target, {name: truth[name[0]] for name in names}, num_pages=40, max_running_requests=5, prefill_chunk=11
    )
    gathered, wanted, waiting = {}, {}, list(names)
    while waiting or engine.has_work():
        if waiting and numbers.random() < 0.3:
            name = waiting.pop()
            answer = truth[name[0]][: numbers.randrange(1, 34)]
            stops = [answer[-1]] if numbers.random() < 0.5 else []
            wanted[name] = answer[: answer.index(answer[-1]) + 1] if stops else answer
            engine.add(request(
                name, [*PROMPT, *[ord(name[0])] * 3], temperature=0.0, logprobs=numbers.choice([None, 0, 2]),
                ignore_eos=not stops, stop_token_ids=stops, max_new_tokens=len(answer),
            ))  # fmt: skip
        running = engine.scheduler.running()
        if running and numbers.random() < 0.05:
            engine.scheduler.force_retract(numbers.choice(running))
        if wanted and numbers.random() < 0.03:
            engine.abort(numbers.choice(list(wanted)))
        step_to(engine, gathered, 1)
    for name, found in gathered.items():
        if found.finish.kind == "abort":
            assert found.token_ids == wanted[name][: len(found.token_ids)]
        else:
            assert found.token_ids == wanted[name]
    assert len(gathered) == len(names)
    assert runner.num_behind > 20
    assert engine.flush_cache()
