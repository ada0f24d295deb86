"""Prefix survival from a confidence head, and estimated online where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from exactspec.errors import ConfigError
from exactspec.verify.survival import AcceptanceEstimate, RecentBlocks, prefix_survival, survival_rows


def test_survival_is_the_running_product() -> None:
    survival = prefix_survival([[0.5, 0.5, 1.0, 0.0], [1.0, 0.9, 0.8, 0.7]])
    assert survival == pytest.approx(np.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.9, 0.72, 0.504]]))


def test_rows_without_numpy_are_the_same() -> None:
    rng = np.random.default_rng(0)
    confidence = [*rng.random((20, 7)).tolist(), [0.9, float("nan"), 0.9, 1.0, 1.0, 1.0, 1.0], [2.0, -1.0] + [0.5] * 5]
    assert survival_rows(confidence) == prefix_survival(confidence).tolist()


def play(estimate: AcceptanceEstimate, rates: list[float], steps: int, verify_len: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        accepted = []
        for _ in range(8):
            tries = rng.random(verify_len) < rates[:verify_len]
            accepted.append(int(np.cumprod(tries).sum()))
        estimate.update([verify_len] * 8, accepted)


def test_the_estimate_finds_the_acceptance_of_every_position() -> None:
    """About 2300 faded tests of position 1: a standard error of 0.01; 0.06 is wrong by chance once in 10^8 runs.

    The seed is fixed, so that it is not even once.
    """
    rates = [0.8, 0.7, 0.6, 0.5]
    estimate = AcceptanceEstimate(4)
    play(estimate, rates, 1000, 4)
    assert estimate.conditional()[:2] == pytest.approx(rates[:2], abs=0.06)
    assert estimate.conditional()[2:] == pytest.approx(rates[2:], abs=0.1)
    assert estimate.survival(3) == pytest.approx(np.tile(np.cumprod(estimate.conditional()), (3, 1)))


def test_each_test_counts_where_it_was_made() -> None:
    estimate = AcceptanceEstimate(3, prior=0.5, prior_count=1e-9, half_life=1e9)
    estimate.update([3, 3, 2, 0], [1, 3, 2, 0])
    assert estimate.conditional() == pytest.approx([3 / 3, 2 / 3, 1 / 1])


def test_positions_that_were_never_verified_take_after_those_before() -> None:
    estimate = AcceptanceEstimate(5)
    assert estimate.conditional() == pytest.approx([0.7] * 5)
    play(estimate, [0.2, 0.2], 300, 2)
    assert estimate.conditional() == pytest.approx([0.2] * 5, abs=0.06)


def test_after_a_long_spell_without_tests_hope_returns() -> None:
    estimate = AcceptanceEstimate(2, half_life=20)
    play(estimate, [0.0, 0.0], 200, 2)
    assert estimate.conditional()[0] < 0.05
    for _ in range(300):
        estimate.update([0, 0], [0, 0])
    assert estimate.conditional() == pytest.approx([0.7, 0.7], abs=0.02)


def test_the_estimate_follows_a_change() -> None:
    estimate = AcceptanceEstimate(2, half_life=20)
    play(estimate, [0.9, 0.9], 300, 2)
    play(estimate, [0.3, 0.3], 200, 2, seed=1)
    assert estimate.conditional()[0] == pytest.approx(0.3, abs=0.12)


@pytest.mark.parametrize("ask_every", [1, 7, 1000])
def test_when_rounds_are_counted_makes_no_difference(ask_every: int) -> None:
    """Compared with counts kept by hand."""
    rng, gamma = np.random.default_rng(0), 3
    estimate = AcceptanceEstimate(gamma, half_life=50)
    tested, accepted, keep = np.zeros(gamma), np.zeros(gamma), 0.5 ** (1 / 50)
    for number in range(300):
        verified = rng.integers(0, gamma + 1, size=rng.integers(0, 4)).tolist()
        taken = [int(rng.integers(0, most + 1)) for most in verified]
        estimate.update(verified, taken)
        tested, accepted = tested * keep, accepted * keep
        for most, count in zip(verified, taken, strict=True):
            tested[: min(count + 1, most)] += 1
            accepted[:count] += 1
        if number % ask_every == 0:
            estimate.conditional()
    expected, hope = [], 0.7
    for k in range(gamma):
        hope = (accepted[k] + 4 * hope) / (tested[k] + 4)
        expected.append(hope)
    assert estimate.conditional() == pytest.approx(expected)


def test_impossible_counts_and_settings_are_refused() -> None:
    estimate = AcceptanceEstimate(2)
    for verified, accepted in [([1], [2]), ([3], [1]), ([1, 1], [1])]:
        with pytest.raises(ConfigError, match="do not fit"):
            estimate.update(verified, accepted)
    with pytest.raises(ConfigError, match="gamma"):
        AcceptanceEstimate(0)


def test_what_was_verified_because_it_looked_likely_says_nothing_of_the_rest() -> None:
    """Half of the blocks survive, half do not, and the head knows which: only the good ones are verified, and all of
    that is accepted. Counting acceptance would call every draft sure."""
    blocks = RecentBlocks()
    good, bad = [0.9, 0.8], [0.1, 0.0]
    for _ in range(RecentBlocks.ENOUGH // 2):
        assert blocks.survival() is None
        blocks.note([good, bad], [2, 0], [2, 0])
    known = blocks.survival()
    assert known is not None
    np.testing.assert_allclose(known.mean(axis=0), [0.5, 0.4])


def test_a_head_that_promises_too_much_is_believed_less() -> None:
    blocks = RecentBlocks()
    for _ in range(2000):
        blocks.note([[0.9, 0.6]], [2], [1])
    known = blocks.survival()
    assert known is not None
    assert known.shape == (RecentBlocks.KEEP, 2)
    assert known[0].sum() == pytest.approx(1.0, rel=0.02)


def test_old_blocks_are_forgotten() -> None:
    blocks = RecentBlocks()
    for number in range(RecentBlocks.KEEP + 40):
        blocks.note([[1.0 if number < 40 else 0.5]], [0], [0])
    assert (blocks.survival() == 0.5).all()
    assert not blocks.is_half_known
    for _ in range(4):
        blocks.forget_half()
    assert blocks.survival() is None
    assert blocks.is_half_known
