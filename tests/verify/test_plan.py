"""The verify planner: the best choice there is, and for rejection one that cannot bend the output distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.errors import ConfigError
from exactspec.verify.plan import make_plan, plan_confidence, rates_ahead
from exactspec.verify.sps import SpsKey, SpsTable
from exactspec.verify.survival import prefix_survival

KEY = SpsKey("cpu", "bfloat16", "toy", "0")


def table_of(seconds: Sequence[float]) -> SpsTable:
    """seconds[i] is the time of a step of i + 1 rows."""
    return SpsTable.from_measurements(KEY, range(1, len(seconds) + 1), seconds)


# ---- the choice ------------------------------------------------------------------------------------------------


def best_by_brute_force(survival: np.ndarray, lengths: Sequence[int], base_rows: int, table: SpsTable) -> float:
    rates = []
    for lens in itertools.product(*(range(length + 1) for length in lengths)):
        tokens = len(lengths) + sum(survival[r, :n].sum() for r, n in enumerate(lens))
        rates.append(tokens * table.sps(base_rows + sum(lens)))
    return max(rates)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_choice_of_verify_lens_is_expected_to_be_faster(data: st.DataObject) -> None:
    num_requests, gamma = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    confidence = st.lists(st.floats(0, 1), min_size=gamma, max_size=gamma)
    survival = prefix_survival(data.draw(st.lists(confidence, min_size=num_requests, max_size=num_requests)))
    lengths = data.draw(st.lists(st.integers(0, gamma), min_size=num_requests, max_size=num_requests))
    base_rows = num_requests + data.draw(st.integers(0, 5))
    table = table_of(np.cumsum(data.draw(st.lists(st.floats(0.01, 1), min_size=20, max_size=20))).tolist())
    plan = make_plan(survival, lengths, base_rows, table, stop_early=False)
    assert all(0 <= n <= length for n, length in zip(plan.verify_lens, lengths, strict=True))
    tokens = num_requests + sum(survival[r, :n].sum() for r, n in enumerate(plan.verify_lens))
    rows = base_rows + sum(plan.verify_lens)
    assert (plan.num_rows, plan.expected_tokens) == (rows, pytest.approx(tokens))
    assert plan.tokens_per_second == pytest.approx(tokens * table.sps(rows))
    assert plan.tokens_per_second >= best_by_brute_force(survival, lengths, base_rows, table) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_plan_ahead_knows_all_but_whose_the_drafts_are(data: st.DataObject) -> None:
    """If the blocks to come are like those remembered, planning ahead expects what planning afterwards finds."""
    num_requests, gamma, copies = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 4)),
        data.draw(st.integers(1, 3)),
    )
    confidence = st.lists(st.floats(0, 1), min_size=gamma, max_size=gamma)
    survival = prefix_survival(data.draw(st.lists(confidence, min_size=num_requests, max_size=num_requests)))
    base_rows, draft_seconds = num_requests + data.draw(st.integers(0, 5)), data.draw(st.floats(0, 0.5))
    table = table_of(np.cumsum(data.draw(st.lists(st.floats(0.01, 1), min_size=20, max_size=20))).tolist())
    lengths = [gamma] * num_requests
    after = make_plan(survival, lengths, base_rows, table, stop_early=False, draft_seconds=draft_seconds)
    places = range(num_requests * gamma + 1)
    remembered = np.tile(survival, (copies, 1))
    rates = rates_ahead(remembered, num_requests, base_rows, places, table, draft_seconds)
    assert rates.max() == pytest.approx(after.tokens_per_second)
    assert rates[after.num_rows - base_rows] == pytest.approx(after.tokens_per_second)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_where_time_is_convex_early_stopping_finds_the_best_too(data: st.DataObject) -> None:
    survival = prefix_survival(data.draw(st.lists(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=3), min_size=2)))
    steps = sorted(data.draw(st.lists(st.floats(0.01, 1), min_size=30, max_size=30)))
    table = table_of((1 + np.cumsum(steps)).tolist())
    lengths = [3] * len(survival)
    early = make_plan(survival, lengths, len(survival), table, stop_early=True)
    best = make_plan(survival, lengths, len(survival), table, stop_early=False)
    assert early.tokens_per_second == pytest.approx(best.tokens_per_second)


def test_free_rows_are_all_used_and_dear_ones_not_at_all() -> None:
    survival = prefix_survival([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]])
    flat, steep = table_of([1.0] * 20), table_of([2.0**n for n in range(20)])
    for stop_early in (True, False):
        assert plan_confidence(survival, [3, 2], 2, flat, stop_early=stop_early) == [3, 2]
        assert plan_confidence(survival, [3, 2], 2, steep, stop_early=stop_early) == [0, 0]


def test_sure_drafts_go_before_doubtful_ones() -> None:
    survival = prefix_survival([[0.95, 0.9, 0.9], [0.4, 0.4, 0.4], [0.8, 0.2, 0.2]])
    table = table_of([1.0 + 0.2 * n for n in range(30)])
    assert plan_confidence(survival, [3, 3, 3], 3, table, stop_early=False) == [3, 0, 1]


def test_both_modes_climb_the_stairs_of_a_measured_curve() -> None:
    """Sixteen rows cost what one costs: stopping inside the first stair would waste the others."""
    table = table_of([10.0 + (n // 16) for n in range(200)])
    survival = prefix_survival(np.full((8, 7), 0.95))
    for stop_early in (True, False):
        rows = make_plan(survival, [7] * 8, 8, table, stop_early=stop_early).num_rows
        assert rows == 64


def test_time_already_spent_on_drafting_makes_longer_blocks_worthwhile() -> None:
    survival = prefix_survival([[0.6, 0.6, 0.6, 0.6]])
    table = table_of([1.0 + 0.3 * n for n in range(10)])
    short = plan_confidence(survival, [4], 1, table, stop_early=False)[0]
    long = plan_confidence(survival, [4], 1, table, stop_early=False, draft_seconds=2.0)[0]
    assert short < long


def test_nothing_to_plan() -> None:
    table = table_of([1.0, 2.0])
    assert plan_confidence(np.empty((0, 5)), [], 3, table, stop_early=True) == []
    assert plan_confidence(np.ones((2, 5)), [0, 0], 2, table, stop_early=False) == [0, 0]


def test_a_confidence_that_is_no_number_is_never_verified() -> None:
    survival = prefix_survival([[0.9, float("nan"), 0.9], [2.0, -1.0, 0.5]])
    assert survival.tolist() == [[0.9, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    table = table_of([1.0])
    with pytest.raises(ConfigError, match="survival has shape"):
        plan_confidence(np.ones((2, 3)), [1], 1, table, stop_early=False)
    with pytest.raises(ConfigError, match="lengths must be within"):
        plan_confidence(np.ones((1, 3)), [4], 1, table, stop_early=False)


# ---- losslessness under rejection (DSpark paper, appendix A): exact, by enumeration ---------------------------------

Chance = Callable[[tuple[int, ...]], float]  # of token 1 (of tokens 0 and 1) behind a prefix


def chance_of(model: Chance, prefix: tuple[int, ...], token: int) -> float:
    return model(prefix) if token else 1.0 - model(prefix)


def emitted(target: Chance, draft: Chance, drafts: tuple[int, ...], verify_len: int, goal: tuple[int, ...]) -> float:
    """Probability that a request whose drafts these are emits `goal` under rejection with so many verified."""
    total, reached = 0.0, 1.0  # reached: probability that all drafts before k were accepted and equal to goal
    for k in range(verify_len):
        prefix, token = goal[:k], drafts[k]
        p, q = chance_of(target, prefix, token), chance_of(draft, prefix, token)
        accept = min(1.0, p / q)
        if goal[k] != token:  # the other token comes of the residual, whose whole mass it is
            rest = np.prod([chance_of(target, goal[:i], goal[i]) for i in range(k + 1, len(goal))])
            return total + reached * (1.0 - accept) * float(rest)
        reached *= accept
    rest = np.prod([chance_of(target, goal[:i], goal[i]) for i in range(verify_len, len(goal))])
    return total + reached * float(rest)


def output_distribution(
    target: Chance, draft: Chance, confidence: Chance, gamma: int, num_requests: int, table: SpsTable, stop_early: bool
) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first gamma tokens of request 0, over all drafts of all requests.

    The confidence of position k is a function of the drafts before k, as a Markov head's is.
    """
    outputs = list(itertools.product((0, 1), repeat=gamma))
    result = dict.fromkeys(outputs, 0.0)
    for blocks in itertools.product(outputs, repeat=num_requests):
        weight = float(np.prod([chance_of(draft, block[:k], block[k]) for block in blocks for k in range(gamma)]))
        survival = prefix_survival([[confidence(block[:k]) for k in range(gamma)] for block in blocks])
        lens = plan_confidence(survival, [gamma] * num_requests, num_requests, table, stop_early=stop_early)
        for goal in outputs:
            result[goal] += weight * emitted(target, draft, blocks[0], lens[0], goal)
    return result


def bias(distribution: dict[tuple[int, ...], float], target: Chance) -> float:
    """Total variation distance from the target."""
    return 0.5 * sum(
        abs(found - np.prod([chance_of(target, goal[:k], goal[k]) for k in range(len(goal))]))
        for goal, found in distribution.items()
    )


def test_looking_ahead_would_bend_the_distribution_and_early_stopping_does_not() -> None:
    """The counterexample: one more row costs a stair, two cost the same stair. The second draft's confidence, which
    depends on the first draft's token, decides about the stair - and so whether the first token is judged at all."""

    def target(prefix: tuple[int, ...]) -> float:
        return 0.5

    def draft(prefix: tuple[int, ...]) -> float:
        return 0.2

    def confidence(prefix: tuple[int, ...]) -> float:
        return 0.7 if not prefix else (0.95 if prefix[0] == 0 else 0.0)

    table = table_of([1.0, 1.8, 1.8])
    looking_ahead = output_distribution(target, draft, confidence, 2, 1, table, stop_early=False)
    first_token_is_0 = sum(p for goal, p in looking_ahead.items() if goal[0] == 0)
    assert first_token_is_0 == pytest.approx(0.6)  # the target says 0.5
    assert bias(looking_ahead, target) > 0.09
    assert bias(output_distribution(target, draft, confidence, 2, 1, table, stop_early=True), target) < 1e-12


def random_model(rng: np.random.Generator, low: float, high: float) -> Chance:
    values: dict[tuple[int, ...], float] = {}

    def chance(prefix: tuple[int, ...]) -> float:
        return values.setdefault(prefix, float(rng.uniform(low, high)))

    return chance


@pytest.mark.parametrize(("num_requests", "gamma", "cases"), [(1, 3, 60), (2, 2, 60), (2, 3, 40), (3, 2, 40)])
def test_early_stopping_is_lossless_for_any_model_confidence_and_curve(
    num_requests: int, gamma: int, cases: int
) -> None:
    rng = np.random.default_rng(num_requests * 10 + gamma)
    biased = 0
    for _ in range(cases):
        target, draft = random_model(rng, 0.05, 0.95), random_model(rng, 0.05, 0.95)
        confidence = random_model(rng, 0.0, 1.0)
        stairs = np.cumsum(rng.choice([0.0, 0.0, 0.3, 0.8], size=num_requests * (gamma + 1)))
        table = table_of((1.0 + stairs).tolist())
        arguments = (target, draft, confidence, gamma, num_requests, table)
        assert bias(output_distribution(*arguments, stop_early=True), target) < 1e-12
        biased += bias(output_distribution(*arguments, stop_early=False), target) > 1e-3
    assert biased > 0, "looking ahead never mattered: these cases show nothing"
