"""The Python API: several open streams share the engine's steps, and what is no prompt is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import tiny_model
from scripted import ScriptedDrafter, make_engine, silent

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
