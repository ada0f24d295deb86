"""Costs that follow real steps: a curve measured on a busy machine does not mislead for long."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import StepCosts
from exactspec.engine.verify_policy import VerifyByConfidence
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Proposal
from exactspec.verify.plan import plan_confidence
from exactspec.verify.sps import SpsKey, SpsTable

KEY = SpsKey("test", "float32", "tiny", "0")
REQUEST = SimpleNamespace(draft_room=1000, max_tokens=2000, token_ids=[1], kv_len=0)
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
    assert 1.0 / costs.step.sps(32) == pytest.approx(true_step(32), rel=0.3)  # nobody was there: as its neighbours
    assert costs.draft_seconds(8) == pytest.approx(true_draft(8), rel=0.05)
    assert costs.draft_seconds(0) == 0.0


def test_where_nobody_was_costs_are_as_far_off_as_at_the_nearest_points():
    """Steps of 64 rows take twice what was measured: those of 128 must not look nearly free beside them."""
    costs = LiveCosts(StepCosts(curve(true_step), curve(true_draft)))
    for _ in range(60):
        costs.note(4, true_step(4), 0, 0.0)
        costs.note(64, 2 * true_step(64), 0, 0.0)
    for rows, ratio in ((2, 1.0), (4, 1.0), (64, 2.0), (128, 2.0)):
        assert 1.0 / costs.step.sps(rows) == pytest.approx(ratio * true_step(rows), rel=0.03)
    assert true_step(16) < 1.0 / costs.step.sps(16) < 2 * true_step(16)


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
    plan = StepPlan(decodes=[REQUEST] * count, prefills=[])

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
        assert policy.wants_drafts(StepPlan(decodes=[REQUEST] * count)) is wanted
        assert policy.wants_drafts(StepPlan(decodes=[REQUEST] * count, prefills=[Chunk()])) is wanted


def test_trials_wait_until_there_is_time_for_them():
    """64 requests, a draft of 40 ms beside steps of 97 ms: looking what it brings loses 40 ms. A step of one row takes
    13 ms, which is not enough at the start; after six seconds a half percent makes up for the rest."""
    costs = LiveCosts(StepCosts(curve(true_step), curve(lambda count: 0.04 * count / 64)))
    policy = VerifyByConfidence("coupled", 7, costs)
    plan = StepPlan(decodes=[REQUEST] * 64)
    trials = []
    for step in range(200):
        drafts = policy.wants_drafts(plan)
        policy.note_times(64, true_step(64), 64 * drafts, 0.04 * drafts)
        trials += [step] * drafts
    assert 40 < trials[0] < 80
    assert len(trials) <= 3


def test_one_trial_tells_what_the_next_would_cost():
    """The profile says that drafts nearly pay; they cost ten times as much. 64 requests, then 60, 56, ...: each size
    could be worth a look."""
    costs = LiveCosts(StepCosts(curve(true_step), curve(lambda count: 0.0001 * count)))
    policy = VerifyByConfidence("coupled", 7, costs)
    trials = 0
    for step in range(400):
        count = 64 - step % 16 * 4
        drafts = policy.wants_drafts(StepPlan(decodes=[REQUEST] * count))
        trials += drafts
        policy.note_times(count, true_step(count), count * drafts, 0.01 * count * drafts)
    assert 0 < trials < 5


def test_requests_with_no_use_for_drafts_are_not_drafted_for():
    costs = LiveCosts(StepCosts(curve(true_step), curve(true_draft)), fixed=True)
    policy = VerifyByConfidence("coupled", 7, costs)
    assert policy.wants_drafts(StepPlan(decodes=[REQUEST]))
    policy = VerifyByConfidence("coupled", 7, costs)
    assert not policy.wants_drafts(StepPlan(decodes=[SimpleNamespace(draft_room=0)]))


@pytest.mark.parametrize("row_ms", [0.01, 6.0])
def test_confidence_is_read_where_it_can_pay(row_ms):
    """One request whose drafts survive by 0.8 each. Rows for nothing: all drafts are verified, and the rounds that
    decide ask, more and more rarely. Dear rows: every round asks, and some drafts are left out."""
    step = curve(lambda rows: 0.013 + row_ms / 1000 * rows)
    policy = VerifyByConfidence("coupled", 7, LiveCosts(StepCosts(step, curve(lambda count: 0.004)), fixed=True))
    plan, rounds = StepPlan(decodes=[REQUEST]), []
    for _ in range(100):
        assert policy.wants_drafts(plan)
        confidence = torch.full((1, 7), 0.8) if policy.wants_confidence else None
        lens = policy.verify_lens(plan, Proposal(torch.zeros(1, 7, dtype=torch.int64), [7], None, confidence))
        rounds.append((policy.wants_confidence, lens[0]))
        policy.note_round(np.full((1, 7), 0.8).cumprod(axis=1), lens, [min(4, lens[0])])
    if row_ms < 1:
        assert [number for number, (reads, _) in enumerate(rounds) if reads] == [0, 1, 3, 7, 15, 31, 63, 95]
        assert all(length == 7 for reads, length in rounds if not reads)
    else:
        assert all(reads and length < 7 for reads, length in rounds[8:])


def answering(room, context=100, left=None):
    """A request with so many tokens of context; room for drafts, and tokens left, in which the next ones fit."""
    left = room + 1 if left is None else left
    return SimpleNamespace(
        draft_room=room, kv_len=context, token_ids=[1] * (context + 1), max_tokens=context + 1 + left
    )


def test_how_an_answer_ends_decides_nothing_for_the_next():
    """Drafts of 12 ms beside steps of 13: seven pay, the last one of an answer does not, and the next answer starts
    with drafts again."""
    costs = LiveCosts(StepCosts(curve(true_step), curve(lambda count: 0.012)), fixed=True)
    policy = VerifyByConfidence("coupled", 7, costs)
    wanted = [
        [
            policy.wants_drafts(StepPlan(decodes=[answering(room)]))
            for room in (40, 36, 31, 28, 26, 22, 20, 17, 15, 11, 4, 1)
        ]
        for _ in range(5)
    ]
    assert wanted == [[True] * 11 + [False]] * 5


def test_a_plain_stretch_is_not_thought_over_at_every_end():
    """64 requests for which no draft pays: costs are asked for more and more rarely, also where answers run out."""

    class Counted(VerifyByConfidence):
        def _decide(self, *arguments):
            nonlocal decisions
            decisions += 1
            return super()._decide(*arguments)

    decisions = 0
    policy = Counted("coupled", 7, LiveCosts(StepCosts(curve(true_step), curve(true_draft)), fixed=True))
    for step in range(320):
        assert not policy.wants_drafts(StepPlan(decodes=[answering(min(7, 40 - step % 40))] * 64))
    assert decisions <= 15


@pytest.mark.parametrize(("left", "wanted"), [(5, False), (200, True)])
def test_nobody_catches_up_with_a_long_context_for_a_few_last_tokens(left, wanted):
    """Drafts pay for one request, not for the 32 before: its context of 4,000 rows is still to be learnt, half a
    second of it."""
    costs = LiveCosts(StepCosts(curve(true_step), curve(true_draft)), fixed=True)
    policy = VerifyByConfidence("coupled", 7, costs)
    assert not policy.wants_drafts(StepPlan(decodes=[answering(7, left=200)] * 32))
    policy.CATCH_UP = 0.08
    assert policy.wants_drafts(StepPlan(decodes=[answering(min(7, left), context=4000, left=left)])) is wanted


def test_a_stair_beside_prefill_rows_is_no_bargain():
    """Between 256 and 512 rows the curve looks flat: noise. Sixteen requests beside a chunk of 300 rows draft nothing,
    and what is drafted there is not verified for nothing."""

    class Chunk:
        num_rows = 300

    rows = (*ROWS, 256, 512)
    seconds = [true_step(256) * 1.5 if count >= 256 else true_step(count) for count in rows]
    costs = LiveCosts(StepCosts(SpsTable.from_measurements(KEY, rows, seconds), curve(lambda count: 0.001)), fixed=True)
    policy = VerifyByConfidence("coupled", 7, costs)
    plan = StepPlan(decodes=[answering(7)] * 16, prefills=[Chunk()])
    assert not policy.wants_drafts(plan)
    proposal = Proposal(torch.zeros(16, 7, dtype=torch.int64), [7] * 16, None, torch.full((16, 7), 0.3))
    assert sum(policy.verify_lens(plan, proposal)) < 16


def test_rounds_decided_ahead_share_a_decision_for_a_size():
    """Any number of requests in a round of 16: thought over at the first round, the second, the fourth, ..."""
    policy = VerifyByConfidence("coupled", 7, LiveCosts(StepCosts(curve(lambda rows: 0.01), None), fixed=True))
    choices, thought = [0, 32, 64, 96, 112], []
    for number in range(64):
        count = 9 + number % 8
        policy.estimate._prior = 0.7 if number in (0, 1, 3, 7, 15, 31) else 0.0001  # what is asked for in between
        thought.append(policy.drafts_ahead(StepPlan(decodes=[answering(7)] * count), 16, choices))
    assert thought[:63] == [112] * 63
    assert not any(policy.drafts_ahead(StepPlan(decodes=[answering(0)] * count), 8, [0, 56]) for count in (5, 8))
