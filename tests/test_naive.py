"""The slow truth itself, checked against still plainer statements: it is what the engine is compared with."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from fakes import full_logits, tiny_model

from exactspec.naive import adjust, kept_ids, logit_domains, naive_generate, sequence_logits
from exactspec.types import SamplingParams

PROMPT = list(b"once")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_the_greedy_output_is_the_argmax_of_every_row(model):
    found = naive_generate(model, PROMPT, SamplingParams(temperature=0, max_new_tokens=10, ignore_eos=True), 1)
    logits = full_logits(model, PROMPT + found.token_ids)[len(PROMPT) - 1 : -1]
    assert found.token_ids == logits.argmax(-1).tolist()
    assert found.finish.kind == "length"


def test_raw_logprobs_equal_the_rescored_ones(model):
    """Contract C2 in one line: decoding and rescoring give the same floats, at any temperature and with penalties."""
    params = SamplingParams(temperature=1.3, max_new_tokens=12, logprobs=0, frequency_penalty=0.5, ignore_eos=True)
    found = naive_generate(model, PROMPT, params, 5)
    again = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    scored = naive_generate(model, PROMPT + found.token_ids, again, 5).prompt_logprobs
    assert [e.logprob for e in found.logprobs] == [e.logprob for e in scored[len(PROMPT) :]]
    assert scored[0].logprob is None


def test_adjusting_step_by_step():
    row = torch.tensor([2.0, -1.0, 0.5, 3.0])
    params = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, logit_bias={2: 1.0}, min_new_tokens=4,
        stop_token_ids=[9],
    )  # fmt: skip
    found = adjust(row, params, [0, 0, 1], frozenset({3}))
    assert found.tolist() == [(2.0 - 1.25) / 2, (-1.0 - 0.75) * 2, 1.5, -math.inf]
    assert adjust(row, params, [0, 0, 1, 1], frozenset({3}))[3] == 3.0
    assert row.tolist() == [2.0, -1.0, 0.5, 3.0]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 3, 0}),  # 0 and 4 are equal: the lower id stays
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # 0.4 of the remaining 0.7 is more than a half
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"temperature": 0.0}, {1}),
    ],
)
def test_filters(filters, kept):
    row = torch.log(torch.tensor([0.12, 0.4, 0.06, 0.3, 0.12]))
    assert set(kept_ids(row, SamplingParams(**filters)).tolist()) == kept


def test_draws_follow_the_processed_distribution(model):
    """Chi-square over 4000 seeds; a bound of 12 standard deviations of the statistic: odds of a false alarm < 1e-6."""
    params = SamplingParams(temperature=0.8, top_k=6, max_new_tokens=1)
    row = sequence_logits(model, PROMPT)[-1]
    expected = torch.softmax(logit_domains(model, row, params, [])["processed"].double(), -1)
    noise = model.backend.gumbel(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), 0, len(row))
    drawn = Counter((logit_domains(model, row, params, [])["processed"] + noise).argmax(-1).tolist())
    assert naive_generate(model, PROMPT, params, 17).token_ids[0] in drawn
    statistic = sum((drawn[i] - 4000 * p) ** 2 / (4000 * p) for i, p in enumerate(expected.tolist()) if p > 0)
    assert sum(drawn[i] for i, p in enumerate(expected.tolist()) if p > 0) == 4000
    assert statistic < 5 + 12 * math.sqrt(10)


@pytest.mark.parametrize("kind", ["raw", "scaled", "processed"])
def test_a_kind_of_logprobs(model, kind):
    params = SamplingParams(
        temperature=0.5, top_k=4, max_new_tokens=3, logprobs=5, logprobs_kind=kind, logprob_token_ids=[7, 7, 3],
        ignore_eos=True,
    )  # fmt: skip
    found = naive_generate(model, PROMPT, params, 3)
    row = sequence_logits(model, PROMPT)[-1]
    domain = row if kind == "raw" else row / 0.5
    if kind == "processed":
        domain = torch.where(domain >= domain.sort().values[-4], domain, -math.inf)
    expected = torch.log_softmax(domain, -1)
    first = found.logprobs[0]
    assert first.logprob == pytest.approx(expected[first.token_id].item(), abs=1e-6)
    assert [i for i, _ in first.top] == domain.sort(descending=True, stable=True).indices[:5].tolist()
    assert [i for i, _ in first.chosen] == [7, 7, 3]
    assert all(math.isfinite(v) for e in found.logprobs for _, v in (*e.top, *e.chosen))
    if kind == "processed":
        assert sum(math.exp(v) for _, v in first.top[:4]) == pytest.approx(1.0)


def test_ends(model):
    greedy = naive_generate(
        model, PROMPT, SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True), 1
    ).token_ids

    def end(**params):
        found = naive_generate(model, PROMPT, SamplingParams(temperature=0, max_new_tokens=8, **params), 1)
        return len(found.token_ids), found.finish.kind, found.finish.matched

    new = next(k for k in range(2, 8) if greedy[k] not in greedy[:k])  # the first end is the one that counts
    assert end(stop_token_ids=[greedy[new]]) == (new + 1, "stop", greedy[new])
    assert end(stop_token_ids=[greedy[new]], min_new_tokens=8)[0] == 8
    text = model.tokenizer.decode(greedy)
    stop = next(text[i : i + 1] for i in range(2, len(text)) if text[i] != "�" and text[i] not in text[:i])
    count = next(k for k in range(9) if stop in model.tokenizer.decode(greedy[:k]))
    assert end(stop=[stop]) == (count, "stop", stop)
    assert end(stop_token_ids=[greedy[new]], ignore_eos=True)[:2] == (8, "length")
    two = [text[i : i + 2] for i in range(len(text) - 1)]
    assert end(stop=two[::-1])[2] == two[0]  # the one that ends first, not the first in the list
    assert naive_generate(model, PROMPT, SamplingParams(max_new_tokens=0), 1).token_ids == []


def test_padded_ids_are_never_drawn_nor_listed():
    padded = tiny_model(vocab_size=300)
    params = SamplingParams(temperature=50.0, max_new_tokens=20, logprobs=300, ignore_eos=True)
    found = naive_generate(padded, PROMPT, params, 2)
    assert max(found.token_ids) < 262
    assert all(len(e.top) == 262 and max(i for i, _ in e.top) < 262 for e in found.logprobs)
