"""top-k, top-p and min-p against a statement in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.sampling.filters import Filters, filter_by_sorting, filter_dense, kept_ids


def kept(row: torch.Tensor, filters: Filters) -> list[int]:
    return kept_ids(row[None], [filters])[0].tolist()


def naive_kept(row: list[float], filters: Filters, slack: float = 0.0) -> set[int]:
    """The definition in float64. `slack` moves the thresholds, to find out whether a case is a close call."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    top = row[order[0]]
    if filters.top_k > 0:
        order = order[: filters.top_k]
    total = sum(math.exp(row[i] - top) for i in order)
    kept, reached = [], 0.0
    for i in order:
        if kept and filters.top_p < 1.0 and reached >= filters.top_p + slack:
            break
        kept.append(i)
        reached += math.exp(row[i] - top) / total
    return {i for i in kept if math.exp(row[i] - top) >= filters.min_p * (1 + slack) or i == order[0]}


filters_strategy = st.builds(
    Filters,
    top_k=st.one_of(st.just(-1), st.integers(1, 40)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)
# few distinct values: ties everywhere; many: ordinary rows
value_strategy = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0, -math.inf]), st.floats(-30, 30, width=32), st.just(12.0)
)


@settings(max_examples=300, deadline=None)
@given(row=st.lists(value_strategy, min_size=1, max_size=60), filters=filters_strategy, width=st.sampled_from([0, 130]))
def test_both_forms_keep_the_same_set_and_it_is_the_defined_one(row, filters, width):
    row += [-math.inf] * (width - len(row))
    if max(row) == -math.inf:
        row[0] = 0.0
    tensor = torch.tensor(row)
    ids = kept(tensor, filters)
    dense = filter_by_sorting(tensor[None], [filters])[0]
    assert ids == sorted(ids, key=lambda i: (-row[i], i))
    finite = {i for i in ids if row[i] > -math.inf}
    assert finite == set((dense > -math.inf).nonzero()[:, 0].tolist())
    assert all(dense[i] == tensor[i] for i in ids)
    close_call = naive_kept(row, filters, 1e-5) != naive_kept(row, filters, -1e-5)
    if not close_call:
        assert finite == {i for i in naive_kept(row, filters) if row[i] > -math.inf}


def test_the_token_that_crosses_top_p_stays():
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    assert kept(row, Filters(-1, 0.4, 0.0)) == [0]
    assert kept(row, Filters(-1, 0.6, 0.0)) == [0, 1]
    assert kept(row, Filters(-1, 0.9, 0.0)) == [0, 1, 2]


def test_top_p_counts_on_what_top_k_left():
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(row, Filters(2, 0.5, 0.0)) == [0]  # 0.4 / 0.7 = 0.57
    assert kept(row, Filters(-1, 0.5, 0.0)) == [0, 1]


def test_ties_keep_the_lowest_ids():
    row = torch.zeros(1000)
    assert kept(row, Filters(3, 1.0, 0.0)) == [0, 1, 2]
    assert kept(row, Filters(-1, 0.0101, 0.0)) == list(range(11))


@pytest.mark.parametrize("width", [63, 256, 300, 1000, 4096, 4100])
@pytest.mark.parametrize("ties", [True, False])
def test_long_rows_agree_between_forms_alone_and_together(width, ties):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(40, width, generator=generator) * torch.linspace(0.1, 6, 40)[:, None]
    rows = (rows * 4).round() / 4 if ties else rows
    every = [Filters(k, p, m) for k in (-1, 1, 7, 200) for p in (1.0, 0.9999999, 0.9, 0.3, 1e-4) for m in (0.0, 0.02)]
    filters = [every[int(i)] for i in torch.randperm(len(every), generator=generator)]
    dense = filter_by_sorting(rows, filters)
    assert torch.equal(filter_dense(rows, filters), dense)
    for row, kept_row, f, ids in zip(rows, dense, filters, kept_ids(rows, filters), strict=True):
        assert ids.sort().values.tolist() == (kept_row > -math.inf).nonzero()[:, 0].tolist()
        assert kept(row, f) == ids.tolist()


def test_a_flat_row_needs_every_candidate():
    row = torch.linspace(0, 20, 5000)
    assert 1700 < len(kept(row, Filters(-1, 0.999, 0.0))) < 1750
    assert kept(torch.full((5000,), 2.0), Filters(-1, 0.4999, 0.0)) == list(range(2500))
