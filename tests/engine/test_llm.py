"""The Python API: several open streams share the engine's steps, and what is no prompt is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import TINY_VOCAB, tiny_model
from scripted import ScriptedDrafter, always_wrong, make_engine, oracle, silent

from exactspec.engine.llm import LLM
from exactspec.errors import RequestError
from exactspec.types import SamplingParams

LONG = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0)
SHORT = SamplingParams(max_new_tokens=4, temperature=1.0, seed=5, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture
def llm(target) -> LLM:
    return LLM.around(make_engine(ScriptedDrafter(silent, 3), target=target))


def collected(chunks) -> tuple[list[int], list[Any], str]:
    ids = [i for chunk in chunks for i in chunk.token_ids]
    return ids, [e.logprob for chunk in chunks for e in chunk.logprobs], chunks[-1].finish_reason.kind


def test_streams_that_are_read_in_turns_lose_nothing(llm):
    """Also with a whole `generate` between two chunks, and with a third stream that is closed early."""
    truth = [llm.generate(text, params)[0] for text, params in (("ab", LONG), ("cd", SHORT), ("ef", SHORT))]
    first, second = llm.stream("ab", LONG), llm.stream("cd", SHORT)
    left_alone = llm.stream("gh", LONG)
    next(left_alone)
    chunks: tuple[list[Any], list[Any]] = [next(first)], [next(second)]
    between = llm.generate("ef", SHORT)[0]
    left_alone.close()
    chunks[1].extend(second)
    chunks[0].extend(first)
    for mine, wanted in zip(chunks, truth, strict=False):
        assert collected(mine) == (wanted.token_ids, [e.logprob for e in wanted.logprobs], "length")
    assert between.token_ids == truth[2].token_ids
    assert not llm.engine.has_work()
    llm.engine.check_integrity()


def test_arrays_of_ids_are_prompts(llm):
    wanted = llm.generate([[1, 2, 3]], LONG)[0].token_ids
    ids = [1, 2, 3]
    for prompts in (ids, np.array(ids), torch.tensor(ids), list(np.array(ids)), [torch.tensor(ids)], np.array([ids])):
        assert [answer.token_ids for answer in llm.generate(prompts, LONG)] == [wanted]
    assert llm.generate([], LONG) == []


@pytest.mark.parametrize(
    ("field", "prompts", "params"),
    [
        ("prompts", None, None),
        ("prompt", [[1.5, 2]], None),
        ("prompt", [1.5, 2], None),
        ("prompt", [None], None),
        ("prompt", "a\ud800b", None),
        ("params", "ab", {"temperature": 0}),
        ("params", ["ab"], [{"temperature": 0}]),
        ("params", ["ab"], [LONG, LONG]),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm, field, prompts, params):
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params)
    assert caught.value.field == field
    assert not llm.engine.has_work()


SAMPLED = SamplingParams(max_new_tokens=16, temperature=1.0, seed=42, ignore_eos=True, logprobs=1)


def told(answers) -> list[tuple[list[int], list[Any]]]:
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def test_a_seed_is_an_answer_in_any_company(target):
    """Twice, first and last among seven others, after forty more, with drafts that are right, wrong and silent."""
    alone = told(LLM.around(make_engine(ScriptedDrafter(silent, 0), target=target)).generate("mine", SAMPLED))
    right = {f"local-{i}": alone[0][0] for i in range(200)}
    for script in (silent, oracle(right), always_wrong(right, TINY_VOCAB)):
        llm = LLM.around(make_engine(ScriptedDrafter(script, 3), target=target))
        assert told(llm.generate("mine", SAMPLED)) == told(llm.generate("mine", SAMPLED)) == alone
        others = [replace(SAMPLED, seed=(None, i)[i % 2], temperature=float(i % 3)) for i in range(7)]
        texts = [f"other {i}" for i in range(7)]
        assert told(llm.generate(["mine", *texts], [SAMPLED, *others]))[:1] == alone
        assert told(llm.generate([*texts, "mine"], [*others, SAMPLED]))[-1:] == alone
        llm.generate(["more"] * 40, replace(SAMPLED, seed=None, max_new_tokens=2))
        assert told(llm.generate("mine", SAMPLED)) == alone


def test_samples_of_a_seed_are_different_and_come_again_in_order(target):
    llm = LLM.around(make_engine(ScriptedDrafter(silent, 3), target=target))
    four = llm.generate("mine", replace(SAMPLED, n=4))
    assert len({tuple(answer.token_ids) for answer in four}) == 4
    assert told(llm.generate("mine", replace(SAMPLED, n=4))) == told(four)
    assert told(llm.generate("mine", replace(SAMPLED, n=2))) == told(four[:2])
    for answer in four:  # each by the seed that it reports
        assert told(llm.generate("mine", replace(SAMPLED, seed=answer.seed))) == told([answer])


def test_without_a_seed_samples_are_independent(target):
    llm = LLM.around(make_engine(ScriptedDrafter(silent, 3), target=target))
    free = replace(SAMPLED, seed=None)
    serial = [llm.generate("mine", free)[0] for _ in range(10)]
    together = llm.generate(["mine"] * 5, replace(free, n=2))
    assert len({tuple(answer.token_ids) for answer in [*serial, *together]}) == 20
