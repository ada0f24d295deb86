"""Scheduled verification changes what is verified, never an answer; acceptance by decree is for benchmarks."""

from __future__ import annotations

import pytest
import torch
from fakes import TINY_VOCAB, tiny_model
from scripted import ScriptedDrafter, always_wrong, make_engine, oracle, request, run, silent, sometimes

from exactspec.bench.exactness import ExactnessCheck, VerifyInTurn
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import StepCosts
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll, VerifyByConfidence
from exactspec.errors import ConfigError
from exactspec.verify.sps import SpsKey, SpsTable

GAMMA = 5
KEY = SpsKey("test", "float32", "tiny", "0")
FLAT = SpsTable(KEY, (1, 512), (0.01, 0.0101))  # rows are nearly free
STEEP = SpsTable(KEY, (1, 512), (0.001, 0.512))  # every row costs as much as the first


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def requests(count=3, **params):
    params = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 1, **params}
    return [request(f"r{i}", [7 + i, 3, 2 * i], seed=i, **params) for i in range(count)]


@pytest.fixture(scope="module")
def truth(target):
    return run(make_engine(ScriptedDrafter(silent, 0), target=target), requests())


class Confident(ScriptedDrafter):
    """A scripted drafter that says how sure it is, the same for every position."""

    def __init__(self, script, gamma, confidence):
        super().__init__(script, gamma)
        self.confidence = confidence

    def propose(self, batch):
        proposal = super().propose(batch)
        proposal.confidence = torch.full(proposal.token_ids.shape, self.confidence)
        return proposal


def scheduled(target, drafter, table, draft=None):
    engine = make_engine(drafter, target=target)
    engine.runner.policy = VerifyByConfidence("coupled", drafter.gamma, LiveCosts(StepCosts(table, draft), fixed=True))
    return engine


def tokens_of(truth):
    return {name: gathered.token_ids for name, gathered in truth.items()}


@pytest.mark.parametrize("table", [FLAT, STEEP])
@pytest.mark.parametrize("confidence", [0.02, 0.5, 0.99])
def test_answers_stay_what_they_were(target, truth, table, confidence):
    script = sometimes(tokens_of(truth), TINY_VOCAB)
    found = run(scheduled(target, Confident(script, GAMMA, confidence), table), requests())
    for name, expected in truth.items():
        assert found[name].answer == expected.answer


def test_another_number_of_drafts_in_every_round_changes_no_answer(target, truth):
    """What `exactspec check --drafts ...+turns` runs."""
    engine = make_engine(ScriptedDrafter(oracle(tokens_of(truth)), GAMMA), target=target)
    engine.runner.policy = VerifyInTurn()
    found = run(engine, requests())
    for name, expected in truth.items():
        assert found[name].answer == expected.answer
    assert len(engine.stats().verified_histogram) > 3
    with pytest.raises(ConfigError, match="dspark\\+often: unknown option often"):
        ExactnessCheck(target, [[1]])._engine("dspark+often", 16, 1)


def test_free_rows_are_all_verified_and_dear_rows_only_when_promising(target, truth):
    script = oracle(tokens_of(truth))
    free = run(scheduled(target, Confident(script, GAMMA, 0.5), FLAT), requests())
    assert all(g.stats.num_verified == g.stats.num_drafted for g in free.values())
    dear = run(scheduled(target, Confident(script, GAMMA, 0.3), STEEP), requests())
    assert sum(g.stats.num_verified for g in dear.values()) < sum(g.stats.num_drafted for g in dear.values()) / 2


def test_drafting_stops_when_it_never_pays(target, truth):
    wrong = always_wrong(tokens_of(truth), TINY_VOCAB)
    drafter = ScriptedDrafter(wrong, GAMMA)
    slow_draft = SpsTable(KEY, (1, 64), (0.02, 0.02))
    engine = scheduled(target, drafter, STEEP, slow_draft)
    found = run(engine, requests(max_new_tokens=24))
    for name, expected in truth.items():
        assert found[name].answer == expected.answer
    assert engine.runner.policy.num_undrafted_steps > 10


def test_decreed_acceptance_commits_the_mean_that_was_asked(target):
    drafter = ScriptedDrafter(lambda request, done, room: [1] * room, GAMMA)
    engine = make_engine(drafter, target=target)
    engine.runner.policy = AcceptByDecree(VerifyAll(), SimulatedAcceptance(3.5, GAMMA, 0))
    found = run(engine, requests(count=4, max_new_tokens=71))
    mean = sum(g.stats.num_committed for g in found.values()) / sum(g.stats.rounds for g in found.values())
    assert abs(mean - 3.5) < 0.25
    assert all(len(g.token_ids) == 71 for g in found.values())
