"""Ends inside a block: tokens, logprobs, counts and the prefix cache are all cut at the same place."""

from __future__ import annotations

import itertools
import re

import pytest
from fakes import tiny_model
from scripted import ScriptedDrafter, make_engine, oracle, request, run, silent

from exactspec.grammar import owner
from exactspec.text.stops import SlowPattern

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def greedy(target):
    """The greedy continuation of PROMPT: every token differs from the ones before it for long enough."""
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    tokens = run(engine, [request("r", PROMPT, max_new_tokens=24, temperature=0.0, ignore_eos=True)])["r"].token_ids
    assert len(set(tokens[:10])) == 10
    return tokens


def speculative(target, greedy, gamma=7, **params):
    engine = make_engine(ScriptedDrafter(oracle({"r": greedy}), gamma), target=target)
    params.setdefault("max_new_tokens", 20)
    return run(engine, [request("r", PROMPT, temperature=0.0, logprobs=1, **params)])["r"]


def plain(target, **params):
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    params.setdefault("max_new_tokens", 20)
    return run(engine, [request("r", PROMPT, temperature=0.0, logprobs=1, **params)])["r"]


@pytest.mark.parametrize("gamma", [1, 2, 7, 16])
@pytest.mark.parametrize("position", range(10))
def test_a_stop_token_at_every_position_of_a_block(target, greedy, position, gamma):
    found = speculative(target, greedy, gamma, stop_token_ids=[greedy[position]])
    assert found.token_ids == greedy[: position + 1]
    assert len(found.logprobs) == position + 1
    assert (found.finish.kind, found.finish.matched) == ("stop", greedy[position])
    assert found.answer == plain(target, stop_token_ids=[greedy[position]]).answer


@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_string_over_two_tokens(target, greedy, position):
    text = target.tokenizer.decode(greedy[:24])
    stop = next((text[i : i + 2] for i in range(position, len(text) - 1) if "�" not in text[i : i + 2]), None)
    if stop is None:
        pytest.skip("no printable pair of characters in this continuation")
    expected = plain(target, stop=[stop])
    assert expected.finish.matched == stop
    found = speculative(target, greedy, stop=[stop])
    assert found.answer == expected.answer


def test_the_earliest_end_wins(target, greedy):
    third = greedy[2]
    cases = {5: ("stop", third, 3), 3: ("stop", third, 3), 2: ("length", None, 2)}
    for cap, (kind, matched, count) in cases.items():
        found = speculative(target, greedy, stop_token_ids=[third], max_new_tokens=cap)
        assert (found.finish.kind, found.finish.matched, len(found.token_ids)) == (kind, matched, count)
        assert len(found.logprobs) == count
        assert found.answer == plain(target, stop_token_ids=[third], max_new_tokens=cap).answer


def test_the_earliest_of_all_kinds_of_ends_wins(target):
    """A string, a pattern, a token and the limit in every order within one block; and at one token the string goes
    before the pattern, the pattern before the token, the token before the limit."""
    prompt, places = [65, 66, 67], (1, 2, 4, 5)  # where the greedy text has a visible character for the first time
    greedy = run(
        make_engine(ScriptedDrafter(silent, 0), target=target),
        [request("r", prompt, temperature=0.0, max_new_tokens=12, ignore_eos=True)],
    )["r"].token_ids
    texts = [target.tokenizer.decode([token]) for token in greedy]
    assert all(texts[at].isprintable() and texts[at] not in texts[:at] for at in places)

    def value(kind, at):
        shown = {"stop": texts[at], "stop_regex": re.escape(texts[at]), "stop_token_ids": greedy[at]}
        return [shown[kind]] if kind in shown else at + 1

    def end(asked):
        engine = make_engine(ScriptedDrafter(oracle({"r": greedy}), 9), target=target)
        found = run(engine, [request("r", prompt, temperature=0.0, logprobs=0, **asked)])["r"]
        assert len(found.logprobs) == len(found.token_ids)
        matched = None if found.finish.matched is None else [found.finish.matched]
        return len(found.token_ids) - 1, found.finish.kind, matched

    kinds = ["stop", "stop_regex", "stop_token_ids", "max_new_tokens"]
    for order in itertools.permutations(kinds):
        asked = {kind: value(kind, at) for kind, at in zip(order, places, strict=True)}
        wanted = ("length", None) if order[0] == "max_new_tokens" else ("stop", asked[order[0]])
        assert end(asked) == (places[0], *wanted), order
    for number, kind in enumerate(kinds[:3]):
        asked = {other: value(other, 4) for other in kinds[number:]}
        assert end(asked) == (4, "stop", asked[kind])


def test_ignore_eos_ignores_stop_ids_too(target, greedy):
    found = speculative(target, greedy, stop_token_ids=[greedy[1]], ignore_eos=True, max_new_tokens=8)
    assert (found.finish.kind, found.token_ids) == ("length", greedy[:8])


def test_min_new_tokens_holds_stop_ids_back(target, greedy):
    stop = [greedy[0], greedy[3]]
    expected = plain(target, stop_token_ids=stop, min_new_tokens=6)
    found = speculative(target, greedy, stop_token_ids=stop, min_new_tokens=6)
    assert found.answer == expected.answer
    assert len(found.token_ids) >= 6
    assert not set(stop) & set(found.token_ids[:6])


def test_stop_ids_outside_the_vocabulary_are_tolerated(target, greedy):
    assert speculative(target, greedy, stop_token_ids=[119690], max_new_tokens=4).token_ids == greedy[:4]


def test_what_was_cut_away_is_not_in_the_prefix_cache(target, greedy):
    """After a stop inside a block the cache knows prompt + answer, and not one token more."""
    engine = make_engine(ScriptedDrafter(oracle({"r": greedy}), 7), target=target, page_size=1)
    run(engine, [request("r", PROMPT, temperature=0.0, max_new_tokens=20, stop_token_ids=[greedy[3]])])
    follow = [*PROMPT, *greedy[:10]]
    again = run(engine, [request("q", follow, temperature=0.0, max_new_tokens=1)])["q"]
    assert again.stats.cached_tokens == len(PROMPT) + 4 - 1


def test_scoring_generates_nothing(target):
    drafter = ScriptedDrafter(silent, 4)
    engine = make_engine(drafter, target=target)
    found = run(engine, [request("s", PROMPT, max_new_tokens=0, prompt_logprobs=2)])["s"]
    assert found.token_ids == []
    assert found.finish.kind == "length"
    assert [entry.token_id for entry in found.prompt_logprobs] == PROMPT
    assert found.prompt_logprobs[0].logprob is None
    assert found.stats.rounds == found.stats.num_drafted == 0
    asked = run(engine, [request("t", PROMPT, max_new_tokens=0, logprobs=1, temperature=0.0)])["t"]
    assert asked.token_ids == []
    assert asked.logprobs == []
    assert asked.outputs[-1].next_token.logprob == asked.outputs[-1].next_token.top[0][1]


def test_a_stop_regex_that_explodes_ends_its_own_request_only(target, greedy):
    class Explodes:
        def append(self, token_id):
            return SlowPattern("zzz")

    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    engine.add(request("bad", PROMPT, temperature=0.0, max_new_tokens=5, stop_regex=["zzz"]))
    engine.add(request("good", PROMPT, temperature=0.0, max_new_tokens=5, ignore_eos=True))
    engine.scheduler.find("bad").stop_checker = Explodes()
    finishes = {}
    while engine.has_work():
        finishes.update({o.request_id: o.finish for o in engine.step() if o.finish is not None})
    assert finishes["bad"].kind == "abort"
    assert "stop_regex" in finishes["bad"].message
    assert finishes["good"].kind == "length"


def test_a_grammar_that_explodes_ends_its_own_request_only(target, greedy, monkeypatch):
    """Each step of this pattern takes longer than the one before, seconds at last, and everybody waits for it."""
    monkeypatch.setattr(owner, "TIMEOUT_S", 0.02)
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    asked = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "logprobs": 0}
    bias = {target.tokenizer.encode("a")[0]: 100.0}
    bad = request("bad", PROMPT, **asked, regex="((a{0,50}){0,50}){0,50}b", logit_bias=bias)
    good = request("good", PROMPT, **asked, regex="[ab]{40}")
    found = run(engine, [bad, good])
    assert found["bad"].finish.kind == "abort"
    assert "regex: following it took" in found["bad"].finish.message
    assert 0 < len(found["bad"].token_ids) == len(found["bad"].logprobs) < 40
    assert (found["good"].finish.kind, len(found["good"].token_ids)) == ("length", 40)
