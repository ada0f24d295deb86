"""Logprobs against float64 arithmetic, in all kinds, and independent of chunks and neighbours."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.row_fakes import HashBackend, make_group

from exactspec.logprobs.processor import (
    LOGPROB_FLOOR,
    LogprobPlan,
    compute_logprobs,
    lost_row,
    output_plan,
    prompt_plan,
    row_logprobs,
)
from exactspec.sampling.order import top_ids
from exactspec.sampling.sampler import Sampler
from exactspec.types import SamplingParams


def naive(row, token, plan, valid):
    """The entry in Python floats."""
    top = max(row)
    total = top + math.log(math.fsum(math.exp(x - top) for x in row))
    order = sorted(range(valid), key=lambda i: (-row[i], i))[: plan.top_k]
    return row[token] - total, [(i, row[i] - total) for i in order], [(i, row[i] - total) for i in plan.token_ids]


def check_entry(entry, row, token, plan, valid):
    value, top, chosen = naive(row, token, plan, valid)
    assert entry.token_id == token
    for got, wanted in [
        (entry.logprob, value),
        *zip((v for _, v in (*entry.top, *entry.chosen)), (v for _, v in (*top, *chosen)), strict=True),
    ]:
        assert math.isfinite(got)
        assert got == LOGPROB_FLOOR if wanted == -math.inf else got == pytest.approx(wanted, abs=2e-5)
    assert [i for i, _ in entry.top] == [i for i, _ in top]
    assert [i for i, _ in entry.chosen] == list(plan.token_ids)
    values = [v for _, v in entry.top]
    assert values == sorted(values, reverse=True)
    same = {v for i, v in (*entry.top, *entry.chosen) if i == token}
    assert same <= {entry.logprob}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_entries_are_log_softmax_with_ties_by_lowest_id(data):
    width = data.draw(st.integers(2, 40))
    valid = data.draw(st.integers(1, width))
    value = st.one_of(st.sampled_from([0.0, 1.0, -2.0, -math.inf]), st.floats(-20, 20, width=32))
    rows, tokens, plans = [], [], []
    for _ in range(data.draw(st.integers(1, 6))):
        row = data.draw(st.lists(value, min_size=width, max_size=width))
        row[data.draw(st.integers(0, width - 1))] = 3.0
        rows.append(row)
        tokens.append(data.draw(st.integers(0, valid - 1)))
        chosen = tuple(data.draw(st.lists(st.integers(0, width - 1), max_size=4)))
        plans.append(LogprobPlan("raw", data.draw(st.integers(0, valid)), chosen))
    entries = compute_logprobs(torch.tensor(rows), tokens, plans, valid, chunk_rows=data.draw(st.integers(1, 7)))
    for entry, row, token, plan in zip(entries, rows, tokens, plans, strict=True):
        check_entry(entry, row, token, plan, valid)


@pytest.mark.parametrize("width", [300, 4096, 49152, 5001])
def test_a_row_alone_equals_the_row_among_others(width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(37, width, generator=generator) * 5
    rows[3, ::2] = -math.inf
    tokens = torch.randint(width, (37,), generator=generator)
    plans = [LogprobPlan("raw", k, tuple(range(k % 3))) for k in (0, 5, 20, 1, 40, 100) * 6] + [LogprobPlan("raw")]
    together = compute_logprobs(rows, tokens, plans, width)
    for chunk in (1, 2, 5, 16):
        assert compute_logprobs(rows, tokens, plans, width, chunk_rows=chunk) == together
    for i in (0, 3, 4, 36):
        assert compute_logprobs(rows[i : i + 1].clone(), tokens[i : i + 1], plans[i : i + 1], width) == [together[i]]


@pytest.mark.parametrize("width", [63, 64, 65, 1000, 4096, 4127])
@pytest.mark.parametrize("k", [1, 5, 16, 63, 1000])
def test_top_ids_with_ties(width, k):
    k = min(k, width)
    generator = torch.Generator().manual_seed(k)
    rows = torch.randint(-4, 5, (30, width), generator=generator).float()
    rows[0] = -math.inf
    rows[1] = 0.0
    rows[2, : width // 2] = -math.inf
    for row, ids in zip(rows.tolist(), top_ids(rows, k).tolist(), strict=True):
        assert ids == sorted(range(width), key=lambda i: (-row[i], i))[:k]


def test_the_whole_vocabulary_can_be_asked_for():
    rows = torch.randn(2, 500)
    entries = compute_logprobs(rows, [1, 2], [LogprobPlan("raw", 480), LogprobPlan("raw", 1)], 480)
    assert sorted(i for i, _ in entries[0].top) == list(range(480))
    assert len(entries[1].top) == 1


def test_padded_ids_are_never_listed():
    rows = torch.zeros(1, 100)
    rows[0, 90:] = 9.0
    (entry,) = compute_logprobs(rows, [0], [LogprobPlan("raw", 3)], 90)
    assert [i for i, _ in entry.top] == [0, 1, 2]


def test_the_kinds_differ_as_defined_and_are_all_finite():
    logits = torch.tensor([[1.0, 0.5, 2.0, -1.0, 0.0, 1.5]])
    group = make_group(temperature=0.5, top_k=2, logit_bias={0: 1.0}, min_new_tokens=1)
    result = Sampler(HashBackend(), 6, 6, (3,)).sample(logits, [group])
    token = int(result.token_ids)
    adjusted = (logits.double() + torch.tensor([1.0, 0, 0, -math.inf, 0, 0])) / 0.5
    kept = torch.where(torch.tensor([True, False, True, False, False, False]), adjusted, -math.inf)
    wanted = {"raw": logits.double(), "scaled": adjusted, "processed": kept}
    for kind, row in wanted.items():
        (entry,) = row_logprobs(result, [0], [token], [LogprobPlan(kind, 6, (3,))], 6)
        check_entry(entry, row[0].tolist(), token, LogprobPlan(kind, 6, (3,)), 6)
        assert entry.logprob > -20
        json.dumps([entry.logprob, entry.top, entry.chosen], allow_nan=False)
    assert entry.chosen == ((3, LOGPROB_FLOOR),)


def test_mixed_kinds_come_back_in_the_order_of_the_rows():
    logits = torch.randn(4, 50)
    groups = [
        make_group(temperature=0.0),
        make_group(seed=1, temperature=0.5),
        make_group(seed=2, top_p=0.6, drafts=[4]),
    ]
    result = Sampler(HashBackend(), 50, 50, (3,)).sample(logits, groups)
    tokens = result.token_ids.tolist()
    plans = [LogprobPlan("processed", 2), LogprobPlan("scaled", 1), LogprobPlan("raw"), LogprobPlan("processed", 50)]
    entries = row_logprobs(result, [0, 1, 2, 3], tokens, plans, 50)
    assert [e.token_id for e in entries] == tokens
    assert entries[0].logprob == 0.0
    assert entries[0].top[0] == (tokens[0], 0.0)
    for i, domain in ((1, result.scaled), (2, result.raw), (3, result.processed)):
        assert [entries[i]] == compute_logprobs(domain([i]), tokens[i : i + 1], plans[i : i + 1], 50)
    assert sum(math.exp(v) for _, v in entries[3].top) == pytest.approx(1.0, abs=1e-5)
    assert row_logprobs(result, [3, 1], [tokens[3], tokens[1]], [plans[3], plans[1]], 50) == [entries[3], entries[1]]


def test_at_temperature_one_all_kinds_agree_bit_for_bit():
    result = Sampler(HashBackend(), 500, 500, (3,)).sample(torch.randn(1, 500), [make_group(temperature=1.0)])
    entries = [row_logprobs(result, [0], [7], [LogprobPlan(k, 5)], 500) for k in ("raw", "scaled", "processed")]
    assert entries[0] == entries[1] == entries[2]


def test_a_row_with_nan_or_nothing_is_lost_and_its_neighbours_are_not():
    rows = torch.zeros(4, 10)
    rows[1, 4], rows[3] = math.nan, -math.inf
    entries = compute_logprobs(rows, [2] * 4, [LogprobPlan("raw", 2)] * 4, 10)
    alone = compute_logprobs(rows[:1], [2], [LogprobPlan("raw", 2)], 10)
    assert [entry.logprob == entry.logprob for entry in entries] == [True, False, True, False]
    assert entries[0] == entries[2] == alone[0]
    assert (lost_row(entries), lost_row(entries[2:]), lost_row(alone)) == (1, 1, None)


def test_counts_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="2 rows, 1 token_ids and 1 plans"):
        compute_logprobs(torch.zeros(2, 4), [1], [LogprobPlan("raw")], 4)
    assert compute_logprobs(torch.zeros(0, 4), [], [], 4) == []


def test_plans_of_requests():
    assert output_plan(SamplingParams()) is None
    assert prompt_plan(SamplingParams(logprobs=3)) is None
    params = SamplingParams(logprobs=3, logprobs_kind="scaled", prompt_logprobs=0, logprob_token_ids=[5, 5])
    assert output_plan(params) == LogprobPlan("scaled", 3, (5, 5))
    assert prompt_plan(params) == LogprobPlan("raw", 0, (5, 5))
