"""A drafter that learns late drafts the same: steps without drafts are made up for when drafts are wanted again.

Engines over the tiny target with a random block draft. Acceptance is by decree, so that drafts become text: a single
draft that differs changes everything after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fakes import tiny_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scripted import ScriptedDrafter, make_engine, oracle, request, run

from exactspec.draft.block import BlockDrafter
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll

sys.path.insert(0, str(Path(__file__).parent.parent / "draft"))
from draft_fakes import draft_config, write_draft

PAGE = 4
SYSTEM = [11, 5, 90, 33, 2, 71, 64, 9, 120]  # two pages and a token


class Sometimes(VerifyAll):
    """Drafts in the steps that `pattern` says, over and over."""

    skips_drafts = wants_confidence = True

    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern
        self.steps = 0

    def wants_drafts(self, plan):
        self.steps += 1
        return self.pattern[(self.steps - 1) % len(self.pattern)]


class Noted(BlockDrafter):
    """Keeps every proposal; counts what was postponed and what was learnt."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.proposals = []
        self.postponed_rows = 0
        self.learnt_rows = 0

    def _learn(self, features, positions, slots):
        self.learnt_rows += slots.shape[0]
        super()._learn(features, positions, slots)

    def propose(self, batch):
        proposal = super().propose(batch)
        if any(proposal.lengths):
            names = [(r.request.request_id, len(r.token_ids)) for r in batch.requests]
            self.proposals.append((names, proposal.token_ids.clone(), proposal.confidence))
        return proposal

    def postpone(self, batch, captured):
        self.postponed_rows += batch.num_rows
        super().postpone(batch, captured)


@pytest.fixture(scope="module")
def target():
    return tiny_model(num_layers=3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return load_block_model(write_draft(tmp_path_factory.mktemp("draft"), draft_config()))


def play(target, draft, prompts, pattern, postpones, num_pages, retract_at=(), policy=None):
    """All answers and proposals of some requests that arrive one every third step."""
    drafter = Noted(draft, target, num_pages * PAGE)
    engine = make_engine(drafter, target=target, num_pages=num_pages, prefill_chunk=6, max_running_requests=4)
    decree = SimulatedAcceptance(2.5, drafter.gamma, 0)
    engine.runner.policy = AcceptByDecree(policy or Sometimes(pattern), decree)
    engine.runner.postpones = postpones
    waiting = [
        request(f"r{i}", prompt, seed=i, max_new_tokens=12, temperature=0.8 * (i % 2), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    texts, step = {}, 0
    while waiting or engine.has_work():
        if waiting and step % 3 == 0:
            engine.add(waiting.pop(0))
        if step in retract_at:
            engine.retract_running()
        for output in engine.step():
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                texts[f"{output.request_id} accepted"] = list(output.stats.accepted_per_round)
        engine.check_integrity()
        step += 1
    return texts, drafter


def assert_same(late, at_once):
    """The same texts and drafts, to the bit, from no more work."""
    assert late[0] == at_once[0]
    assert late[1].learnt_rows <= at_once[1].learnt_rows
    ours, theirs = late[1].proposals, at_once[1].proposals
    assert [names for names, _, _ in ours] == [names for names, _, _ in theirs]
    for (_, tokens, confidence), (_, other_tokens, other_confidence) in zip(ours, theirs, strict=True):
        assert torch.equal(tokens, other_tokens)
        assert torch.equal(confidence, other_confidence)


OWN = st.lists(st.integers(0, 250), min_size=1, max_size=7)
PROMPTS = st.lists(
    st.builds(lambda n, own: SYSTEM[:n] + own, st.sampled_from([0, 4, 8, 9]), OWN), min_size=1, max_size=6
)


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking takes minutes
@given(
    prompts=PROMPTS,
    pattern=st.lists(st.booleans(), min_size=1, max_size=9).filter(any),
    num_pages=st.sampled_from([9, 14, 64]),
    retract_at=st.sets(st.integers(2, 40), max_size=3),
)
def test_whenever_drafts_are_wanted_they_are_those_of_a_drafter_that_learnt_at_once(
    target, draft, prompts, pattern, num_pages, retract_at
):
    """Shared prefixes, chunked prefill, pools so small that requests retract each other and pages are used again."""
    late = play(target, draft, prompts, pattern, True, num_pages, retract_at)
    assert_same(late, play(target, draft, prompts, pattern, False, num_pages, retract_at))


def test_a_cached_prefix_that_nobody_drafted_for_is_as_good_as_any(target, draft):
    """The first request is never drafted for; the second starts from its pages and drafts from its first step on."""
    first, second = [*SYSTEM, 40, 41, 42], [*SYSTEM, 40, 41, 42, 77]
    pattern = [False] * 14 + [True] * 60
    late = play(target, draft, [first, second], pattern, True, 64)
    assert late[1].postponed_rows > len(first)
    assert_same(late, play(target, draft, [first, second], pattern, False, 64))


def test_a_policy_that_always_drafts_postpones_nothing(target, draft):
    _, drafter = play(target, draft, [SYSTEM, [*SYSTEM, 3]], None, True, 64, policy=VerifyAll())
    assert drafter.proposals
    assert drafter.postponed_rows == 0


def test_a_step_without_drafts_makes_no_draft_context(target, draft):
    """That is the point of it: nothing but the copy is done until drafts are wanted."""
    drafter = Noted(draft, target, 64 * PAGE)
    engine = make_engine(drafter, target=target, num_pages=64)
    engine.runner.policy = Sometimes([False])
    run(engine, [request("r", SYSTEM, max_new_tokens=8, ignore_eos=True)])
    assert drafter.postponed_rows == len(SYSTEM) + 7
    assert not drafter.pool.k.any()


def test_the_time_of_catching_up_is_no_part_of_what_a_draft_costs(target):
    """1,000 seconds of it, by the drafter's own word: what the policy hears is that much less than the clock says."""
    truth = run(make_engine(ScriptedDrafter(lambda *_: [], 0), target=target), [request("r", SYSTEM, max_new_tokens=8)])

    class Late(ScriptedDrafter):
        def propose(self, batch):
            self.catch_up_seconds += 1000.0
            return super().propose(batch)

    class Hears(Sometimes):
        def note_times(self, rows, step_seconds, drafted, draft_seconds):
            heard.append((drafted, draft_seconds))

    heard = []
    engine = make_engine(Late(oracle({"r": truth["r"].token_ids}), 3), target=target)
    engine.runner.policy = Hears([False, True])
    run(engine, [request("r", SYSTEM, max_new_tokens=8)])
    assert {drafted for drafted, _ in heard} == {0, 1}
    assert all((seconds < -900.0) == (drafted == 1) for drafted, seconds in heard)


def test_a_last_step_without_room_for_drafts_is_no_cheap_draft(target, draft):
    """A batch that ends at its limit: the policy hears of no draft that took no time."""

    class Hears(VerifyAll):
        def note_times(self, rows, step_seconds, drafted, draft_seconds):
            heard.append((rows, drafted))

    heard = []
    engine = make_engine(BlockDrafter(draft, target, 64 * PAGE), target=target, num_pages=64)
    engine.runner.policy = Hears()
    run(engine, [request(f"r{i}", SYSTEM, max_new_tokens=2, ignore_eos=True) for i in range(3)])
    assert heard == [(3, 0)]
