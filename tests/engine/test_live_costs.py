"""Costs that follow real steps: a curve measured on a busy machine does not mislead for long."""

from __future__ import annotations

import numpy as np
import pytest

from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import StepCosts
from exactspec.engine.verify_policy import VerifyByConfidence
from exactspec.scheduler.plan import StepPlan
from exactspec.verify.plan import plan_confidence
from exactspec.verify.sps import SpsKey, SpsTable

KEY = SpsKey("test", "float32", "tiny", "0")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def true_step(rows):
    """Free up to 8 rows, then a millisecond and a half each."""
    return 0.013 + 0.0015 * max(0, rows - 8)


def true_draft(count):
    return 0.004 + 0.003 * count


def curve(function, scale=1.0):
    return SpsTable.from_measurements(KEY, ROWS, [function(rows) * scale for rows in ROWS])


def test_a_wrong_curve_is_right_after_some_steps():
    costs = LiveCosts(StepCosts(curve(true_step, 3.0), curve(true_draft, 0.5)))
    for _ in range(40):
        for rows, count in ((8, 1), (16, 2), (64, 8)):
            costs.note(rows, true_step(rows), count, true_draft(count))
    for rows in (8, 16, 64):
        assert 1.0 / costs.step.sps(rows) == pytest.approx(true_step(rows), rel=0.05)
    assert 1.0 / costs.step.sps(32) == pytest.approx(true_step(32), rel=0.3)  # nobody was there: the mean ratio
    assert costs.draft_seconds(8) == pytest.approx(true_draft(8), rel=0.05)
    assert costs.draft_seconds(0) == 0.0


def test_a_hiccup_is_no_new_curve_and_fixed_costs_stay():
    for fixed in (False, True):
        costs = LiveCosts(StepCosts(curve(true_step), None), fixed)
        for step in range(64):
            costs.note(16, true_step(16) * (200.0 if step == 30 else 1.0), 0, 0.0)
        assert 1.0 / costs.step.sps(16) == pytest.approx(true_step(16), rel=0.1)
    costs.note(16, 50.0, 0, 0.0)
    assert costs.ratios() == [1.0] * len(ROWS)
    assert costs.draft_seconds(5) == 0.0


@pytest.mark.parametrize(
    ("step_scale", "draft_scale", "ahead"),
    [(1.0, 1.0, False), (3.0, 1.0, False), (1.0, 0.05, False), (0.3, 2.0, False), (1.0, 1.0, True), (0.3, 2.0, True)],
)
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_whatever_the_profile_said_the_policy_ends_near_the_better_of_drafting_and_not(
    step_scale, draft_scale, count, ahead
):
    """A machine with known times and a draft whose tokens survive by 0.7 each: 2,000 steps against both fixed ways.
    Knowing the drafts, or deciding before there are any."""
    gamma, rng = 7, np.random.default_rng(count)
    costs = LiveCosts(StepCosts(curve(true_step, step_scale), curve(true_draft, draft_scale)))
    policy = VerifyByConfidence("coupled", gamma, costs)
    plan = StepPlan(decodes=[None] * count, prefills=[])

    def play(choose, steps):
        seconds = tokens = 0.0
        for _ in range(steps):
            lens = choose()
            accepted = [int(np.cumprod(rng.random(n) < 0.7).sum()) for n in lens or [0] * count]
            rows, draft = count + sum(lens or []), true_draft(count) if lens is not None else 0.0
            seconds += true_step(rows) + draft
            tokens += count + sum(accepted)
            if choose is scheduled:
                policy.note_times(rows, true_step(rows), count if lens is not None else 0, draft)
                policy.estimate.update(*((lens, accepted) if lens else ([], [])))
        return tokens / seconds

    def scheduled():
        if ahead:
            places = policy.drafts_ahead(plan, count, [count * each for each in (0, 2, 4, 5, gamma)])
            return [places // count] * count if places else None
        if not policy.wants_drafts(plan):
            return None
        survival = policy.estimate.survival(count)
        return plan_confidence(
            survival, [gamma] * count, count, costs.step, stop_early=False, draft_seconds=costs.draft_seconds(count)
        )

    play(scheduled, 300)  # learns
    found = play(scheduled, 2000)
    plain, full = play(lambda: None, 2000), play(lambda: [gamma] * count, 2000)
    assert found > 0.97 * max(plain, full)


def test_prefill_in_the_step_makes_no_draft_worth_its_time():
    """Decodes beside a long prefill chunk: what does not pay without the chunk does not pay with it."""

    class Chunk:
        num_rows = 500

    costs = LiveCosts(StepCosts(curve(true_step), curve(true_draft)), fixed=True)
    policy = VerifyByConfidence("coupled", 7, costs)
    for count, wanted in ((1, True), (32, False)):
        assert policy.wants_drafts(StepPlan(decodes=[None] * count)) is wanted
        assert policy.wants_drafts(StepPlan(decodes=[None] * count, prefills=[Chunk()])) is wanted
