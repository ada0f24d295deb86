"""What is refused, by name, and that a refusal disturbs nobody."""

from __future__ import annotations

import math

import pytest
from fakes import tiny_model
from scripted import ScriptedDrafter, make_engine, request, run, silent

from exactspec.engine.config import EngineConfig
from exactspec.errors import ConfigError, QueueFullError, RequestError
from exactspec.types import SamplingParams


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", [], {}),
        ("prompt", [1, 262], {}),
        ("prompt", [-1], {}),
        ("prompt", [1] * 512, {}),
        ("max_new_tokens", [1] * 500, {"max_new_tokens": 13}),
        ("max_new_tokens", [1], {"max_new_tokens": 400}),  # over the pool of 64 pages
        ("logprobs", [1], {"logprobs": 263}),
        ("prompt_logprobs", [1], {"prompt_logprobs": 263}),
        ("logprob_token_ids", [1], {"logprobs": 0, "logprob_token_ids": [262]}),
        ("logit_bias", [1], {"logit_bias": {262: 1.0}}),
        ("prompt_logprob_start", [1, 2], {"prompt_logprobs": 0, "prompt_logprob_start": 3}),
        ("return_hidden_states", [1], {"return_hidden_states": True}),
        ("stop_regex", [1], {"stop_regex": ["("]}),
        ("min_new_tokens", [1], {"min_new_tokens": 1, "stop_token_ids": list(range(262))}),
        ("json_schema", [1], {"json_schema": "INVALID"}),
    ],
)
def test_refused_by_name(target, field, prompt, params):
    engine = make_engine(ScriptedDrafter(silent, 4), target=target, num_pages=64)
    with pytest.raises(RequestError) as error:
        engine.add(request("bad", prompt, **params))
    assert error.value.field == field
    good = run(engine, [request("good", [1, 2], max_new_tokens=2, ignore_eos=True)])["good"]
    assert len(good.token_ids) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", 1e300),  # infinite in float32: -inf / inf would be NaN
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", 0),
        ("top_k", 2.0),
        ("top_k", 10**30),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("min_new_tokens", 129),
        ("n", 0),
        ("seed", 2**63),
        ("logprobs", -1),
        ("logprobs_kind", "cooked"),
        ("logprob_token_ids", [-1]),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: 1e39}),
        ("logit_bias", {3: -(10**400)}),
        ("stop", [""]),
        ("stop_token_ids", ["x"]),
        ("prompt_logprob_start", -1),
        ("logit_bias", [3]),
        ("ignore_eos", "no"),
        ("regex", ""),
        ("json_schema", {"type": "object"}),
        ("ebnf", 5),
    ],
)
def test_sampling_params_check_themselves(field, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert error.value.field == field


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["scaled", "processed"])
def test_the_most_extreme_numbers_still_give_finite_logprobs(target, temperature, kind):
    """A NaN in one row would end the engine, and with it everybody's requests."""
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    extreme = {"logit_bias": {3: 1e30, 4: -1e30, 5: 1e30}, "repetition_penalty": 1e-20, "min_new_tokens": 2}
    wanted = {"max_new_tokens": 6, "temperature": temperature, "logprobs": 4, "logprobs_kind": kind, "ignore_eos": True}
    found = run(engine, [request("r", [1, 2], **wanted, **extreme), request("s", [1], **wanted, regex="[a-z]+")])
    for answer in found.values():
        values = [value for entry in answer.logprobs for value in (entry.logprob, *(v for _, v in entry.top))]
        assert all(math.isfinite(value) for value in values)


def test_two_grammars_are_one_too_many():
    with pytest.raises(RequestError, match="cannot be combined"):
        SamplingParams(json_schema="{}", regex="a")


def test_an_id_in_use_and_a_full_queue(target):
    engine = make_engine(ScriptedDrafter(silent, 0), target=target, max_waiting_requests=2)
    engine.add(request("a", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("a", [2]))
    engine.add(request("b", [1]))
    with pytest.raises(QueueFullError):
        engine.add(request("c", [1]))


@pytest.mark.parametrize(
    "change",
    [{"page_size": 0}, {"dtype": "int4"}, {"acceptance": "maybe"}, {"gamma": 0}, {"simulate_accept_length": 0.5}],
)
def test_settings_check_themselves(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        EngineConfig("tiny", **change)


def test_max_new_tokens_none_means_what_the_context_leaves(target):
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    found = run(engine, [request("a", [1] * 500, max_new_tokens=None, temperature=0.0, ignore_eos=True)])["a"]
    assert len(found.token_ids) == 12
    assert found.finish.kind == "length"
