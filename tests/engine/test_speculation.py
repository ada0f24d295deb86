"""Drafts change the speed and nothing else: stories of drafts that are always, never and sometimes right."""

from __future__ import annotations

import pytest
from fakes import TINY_VOCAB, tiny_model
from scripted import ScriptedDrafter, always_wrong, make_engine, oracle, request, run, silent, sometimes

PROMPTS = {"a": [1, 2, 3], "b": [10, 20, 30, 40, 50, 60, 70], "c": [99]}
KINDS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cool": {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 1.3},
    "held": {"temperature": 1.0, "min_new_tokens": 9, "logit_bias": {258: 4.0, 7: -3.0}, "ignore_eos": False},
}


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def requests_of(kind: str, **more):
    params = {"max_new_tokens": 20, "ignore_eos": True, "logprobs": 3, "logprob_token_ids": [5, 5, 1], **KINDS[kind]}
    params.update(more)
    return [request(name, prompt, seed=11 + len(prompt), **params) for name, prompt in PROMPTS.items()]


def plain_answers(target, requests):
    """Each request alone, without a draft."""
    answers = {}
    for one in requests:
        answers.update(run(make_engine(ScriptedDrafter(silent, 0), target=target), [one]))
    return answers


@pytest.mark.parametrize("logprobs_kind", ["raw", "scaled", "processed"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_do_not_depend_on_drafts(target, kind, logprobs_kind):
    requests = requests_of(kind, logprobs_kind=logprobs_kind)
    plain = plain_answers(target, requests)
    truth = {name: gathered.token_ids for name, gathered in plain.items()}
    for script in (oracle(truth), always_wrong(truth, TINY_VOCAB), sometimes(truth, TINY_VOCAB)):
        for gamma in (1, 4, 7):
            found = run(make_engine(ScriptedDrafter(script, gamma), target=target), requests)
            for name in truth:
                assert found[name].answer == plain[name].answer, (kind, gamma, name)


def test_a_draft_that_is_always_right_is_accepted_whole(target):
    requests = requests_of("greedy", max_new_tokens=17)
    truth = {name: g.token_ids for name, g in plain_answers(target, requests).items()}
    found = run(make_engine(ScriptedDrafter(oracle(truth), 7), target=target), requests)
    for gathered in found.values():
        assert gathered.stats.accepted_per_round == [7, 7]  # 1 from prefill + 8 + 8
        assert gathered.stats.accept_length == 8.0
        assert gathered.sources == ["plain"] + (["accepted"] * 7 + ["bonus"]) * 2


def test_a_draft_that_is_never_right_costs_rounds_but_no_token(target):
    requests = requests_of("greedy", max_new_tokens=9)
    truth = {name: g.token_ids for name, g in plain_answers(target, requests).items()}
    found = run(make_engine(ScriptedDrafter(always_wrong(truth, TINY_VOCAB), 4), target=target), requests)
    for gathered in found.values():
        assert gathered.stats.num_accepted == 0
        assert gathered.stats.rounds == 8
        assert gathered.stats.accept_length == 1.0
        assert set(gathered.sources[1:-1]) == {"correction"}


def test_every_token_has_one_entry_and_counts_add_up(target):
    requests = requests_of("sampled", max_new_tokens=13)
    truth = {name: g.token_ids for name, g in plain_answers(target, requests).items()}
    for gathered in run(
        make_engine(ScriptedDrafter(sometimes(truth, TINY_VOCAB), 5), target=target), requests
    ).values():
        assert [entry.token_id for entry in gathered.logprobs] == gathered.token_ids
        assert len(gathered.sources) == len(gathered.token_ids) == 13
        assert all(len(entry.top) == 3 and len(entry.chosen) == 3 for entry in gathered.logprobs)
        assert all(entry.chosen[0] == entry.chosen[1] for entry in gathered.logprobs)
        stats = gathered.stats
        assert stats.num_accepted <= stats.num_verified <= stats.num_drafted
        assert stats.num_committed == stats.num_accepted + stats.rounds


def test_the_drafter_is_told_when_requests_leave(target):
    drafter = ScriptedDrafter(silent, 3)
    engine = make_engine(drafter, target=target)
    engine.add(request("gone", [1, 2, 3], max_new_tokens=50, ignore_eos=True))
    engine.step()
    assert engine.abort("gone")
    assert [output.finish.kind for output in engine.step()] == ["abort"]
    run(engine, [request("done", [4, 5], max_new_tokens=3, ignore_eos=True)])
    assert drafter.forgotten == ["gone", "done"]


def test_same_seed_same_answer_other_seed_other_answer(target):
    def answer(seed):
        one = request("a", [1, 2, 3], seed=seed, max_new_tokens=16, temperature=1.0, ignore_eos=True)
        return run(make_engine(ScriptedDrafter(silent, 0), target=target), [one])["a"].token_ids

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)
    assert len({tuple(answer(seed)) for seed in (0, 2**31, 2**63 - 1, -1)}) == 4


def test_a_request_may_ask_for_fewer_drafts_or_none(target):
    """A speed knob: the answer stays, the rounds grow. Others in the batch keep their drafts."""
    whole, few, none = (request(str(n), PROMPTS["a"], max_new_tokens=17, max_drafts=n) for n in (None, 2, 0))
    right = run(make_engine(ScriptedDrafter(silent, 0), target=target), [whole])["None"]
    oracle_of_all = oracle({str(n): right.token_ids for n in (None, 2, 0)})
    found = run(make_engine(ScriptedDrafter(oracle_of_all, 7), target=target), [whole, few, none])
    assert all(gathered.answer == right.answer for gathered in found.values())
    assert found["None"].stats.accepted_per_round == [7, 7]
    assert max(found["2"].stats.verified_per_round) == 2
    assert found["0"].stats.num_drafted == 0
    assert set(found["0"].sources) == {"plain"}
