"""Grammars, drafts and logprobs together: the truth to the last bit, and no word from a matcher that was overrun."""

from __future__ import annotations

import json
import math

import pytest
from fakes import EOS_ID, tiny_target
from random_traffic import make_script
from scripted import ScriptedDrafter, make_engine, request, run
from truth import truth_of

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.grammar import GrammarCompiler
from exactspec.model.target import TargetModel

PROMPT = [1, 2, 3, 4, 5]
GAMMA = 8
SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
)


@pytest.fixture(scope="module")
def target():
    return TargetModel(CpuBackend(), tiny_target())


@pytest.fixture(scope="module")
def grammars(target):
    return GrammarCompiler(target.tokenizer, target.config.vocab_size, target.eos_ids)


def check(target, grammars, requests, kinds, rng):
    """Runs all in one batch with every kind of draft; each answer is the truth. Returns the truths."""
    truths = {one.request_id: truth_of(target, one, grammars.compile(one.params)) for one in requests}
    known = {name: truth.token_ids for name, truth in truths.items()}
    for kind in kinds:
        drafter = ScriptedDrafter(make_script(kind, known, target.config.vocab_size, rng), GAMMA)
        found = run(make_engine(drafter, target=target), requests)
        for name, truth in truths.items():
            got = found[name]
            assert got.token_ids == truth.token_ids, (kind, name)
            assert (got.finish.kind, got.finish.matched) == (truth.finish.kind, truth.finish.matched)
            assert got.logprobs == (truth.logprobs or [])
    return truths


@pytest.fixture
def rng():
    import random

    return random.Random(5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_at_every_place_of_a_block(target, grammars, rng, capfd, temperature, ignore_eos):
    """Outputs of 1 to 9 tokens and an end; drafts go on behind it, propose ends too early, or nothing of use."""
    requests = [
        request(f"r{n}", PROMPT, seed=n, regex=f"[a-d]{{{n}}}", max_new_tokens=30, temperature=temperature, logprobs=2,
                ignore_eos=ignore_eos)
        for n in range(1, 10)
    ]  # fmt: skip
    truths = check(target, grammars, requests, ("right", "ends", "wrong", "repeat", "any"), rng)
    for n, truth in enumerate(truths.values(), start=1):
        assert truth.token_ids[-1] == EOS_ID
        assert (len(truth.token_ids), truth.finish.kind, truth.finish.matched) == (n + 1, "stop", EOS_ID)
    assert capfd.readouterr().err == ""


def test_a_rejected_end_leaves_the_grammar_going(target, grammars, rng, capfd):
    """The grammar may end after each token from the second on, and the drafts say it does."""
    requests = [
        request(
            f"r{n}", PROMPT, seed=n, regex="[a-d]{2,20}", max_new_tokens=24, temperature=t, logit_bias={EOS_ID: -9.0}
        )
        for n, t in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    truths = check(target, grammars, requests, ("ends", "ends", "any"), rng)
    assert max(len(truth.token_ids) for truth in truths.values()) > 10
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("least", [1, 4, 12])
def test_a_least_length_beyond_the_grammar(target, grammars, rng, least):
    """The grammar wins: the output ends where it must, and not before the least length where it can go on."""
    requests = [
        request("short", PROMPT, regex="[a-d]{3}", max_new_tokens=20, min_new_tokens=least, temperature=0.0),
        request("long", PROMPT, regex="[a-d]{1,30}", max_new_tokens=20, min_new_tokens=least, temperature=1.0),
        request("stops", PROMPT, regex="[a-d]{1,30}", max_new_tokens=20, min_new_tokens=least, temperature=1.0,
                stop_token_ids=[target.tokenizer.encode("a")[0]]),
    ]  # fmt: skip
    truths = check(target, grammars, requests, ("right", "ends", "any"), rng)
    assert len(truths["short"].token_ids) == 4
    assert min(len(truths["long"].token_ids), len(truths["stops"].token_ids)) >= min(least, 20)


@pytest.mark.parametrize("kind", ["raw", "scaled", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_under_a_grammar_have_one_meaning(target, grammars, rng, kind, temperature):
    """Raw ones are the model's own, illegal alternatives and all. In the others what is illegal has no probability, so
    that a forced token is certain, and the token's value is the one that the alternatives show for it."""
    shared = {"max_new_tokens": 24, "temperature": temperature, "logprobs": 262, "logprobs_kind": kind}
    requests = [
        request("one", PROMPT, regex="(xyz)+", **shared),
        request("json", PROMPT, json_schema=SCHEMA, frequency_penalty=0.7, logit_bias={3: 4.0}, **shared),
        request("some", PROMPT, regex="[a-e]{6}", top_k=3, **shared),
        request("plain", [7, 7], regex="(.|\n)*", **shared),
    ]
    truths = check(target, grammars, requests, ("right", "any"), rng)
    for truth in truths.values():
        for entry in truth.logprobs:
            values = dict(entry.top)
            assert values[entry.token_id] == entry.logprob > -1e30
            assert abs(sum(math.exp(value) for value in values.values()) - 1) < 1e-4
            illegal = [value for value in values.values() if value < -1e30]
            assert bool(illegal) == (kind != "raw")
    forced = [entry.logprob for entry in truths["one"].logprobs[:3]]
    assert (forced == [0.0, 0.0, 0.0]) == (kind != "raw")
