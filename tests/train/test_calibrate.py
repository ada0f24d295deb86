"""Calibration on rollouts with a known truth, and its measures against slow definitions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toy import chain_target, toy_llm, toy_options

from exactspec.bench.eval_draft import merge
from exactspec.draft.calibration import calibrated_chances, read_calibration
from exactspec.errors import ConfigError
from exactspec.train import calibrate as module
from exactspec.train.calibrate import (
    area_under_curve,
    calibrate,
    expected_calibration_error,
    fit_calibration,
    measure_confidence,
)
from exactspec.train.rollouts import Rounds, gather_rounds
from exactspec.train.run import train
from exactspec.types import SamplingParams


def made_rounds(scale, count=20_000, gamma=4, seed=0, shift=0.0, temperature=1.0):
    """Rounds whose true chances are sigmoid(logit), while the head reports sigmoid(scale * (logit + shift))."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.2, (count, gamma))
    truth = 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(rng.random((count, gamma)) < truth, axis=1).astype(bool)
    confidence = 1 / (1 + np.exp(-(logits + shift) * np.asarray(scale)))
    return Rounds(confidence, np.ones_like(accepted), accepted, np.full(count, temperature))


def test_known_temperatures_are_found():
    """An overconfident head (logits times s) needs temperature s, by position."""
    scale = [2.0, 1.5, 1.0, 0.6]
    found = fit_calibration(made_rounds(scale))
    assert found.greedy == found.sampled  # nothing was greedy
    assert found.sampled.temperatures == pytest.approx(scale, rel=0.2)
    assert found.sampled.offsets == pytest.approx([0.0] * 4, abs=0.15)
    fresh = made_rounds(scale, seed=1)
    before, after = measure_confidence(fresh), measure_confidence(fresh, found)
    assert after["mean_ece_survival"] < 0.012 < before["mean_ece_survival"]
    assert after["auc_conditional"] == pytest.approx(before["auc_conditional"], abs=0.03)


def test_greedy_and_sampled_rounds_get_offsets_of_their_own():
    """A head that is too sure of sampled requests and not sure enough of greedy ones: no temperature can mend both."""
    sampled = made_rounds([1.0] * 4, seed=0, shift=0.8, temperature=1.0)
    mixed = merge([sampled, made_rounds([1.0] * 4, seed=1, shift=-0.6, temperature=0.0)])
    found = fit_calibration(mixed)
    assert found.sampled.offsets == pytest.approx([-0.8] * 4, abs=0.15)
    assert found.greedy.offsets == pytest.approx([0.6] * 4, abs=0.15)
    assert measure_confidence(mixed, found)["mean_ece_survival"] < 0.01 < measure_confidence(mixed)["mean_ece_survival"]


def test_measures_equal_their_slow_definitions():
    rng = np.random.default_rng(0)
    chance, outcome = np.round(rng.random(300), 2), rng.random(300) < 0.4
    pairs = [(p > n) + 0.5 * (p == n) for p in chance[outcome] for n in chance[~outcome]]
    assert area_under_curve(chance, outcome) == pytest.approx(np.mean(pairs))
    error = 0.0
    for b in range(10):
        inside = [i for i in range(300) if min(int(chance[i] * 10), 9) == b]
        if inside:
            error += len(inside) / 300 * abs(np.mean(chance[inside]) - np.mean(outcome[inside]))
    assert expected_calibration_error(chance, outcome, bins=10) == pytest.approx(error)
    assert np.isnan(area_under_curve(chance, np.ones(300, dtype=bool)))


def test_a_draft_without_confidence_and_too_few_rounds_are_refused():
    rounds = made_rounds([1.0] * 4, count=50)
    with pytest.raises(ConfigError, match="50 rounds are too few"):
        fit_calibration(rounds)
    with pytest.raises(ConfigError, match="had no round"):
        fit_calibration(made_rounds([1.0] * 4, count=0))
    rounds.confidence[:] = np.nan
    with pytest.raises(ConfigError, match="no confidence head"):
        fit_calibration(rounds)


def test_a_calibration_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "calibration.json").write_text('{"temperatures": [1.0]}')
    monkeypatch.setattr(module, "read_draft_config", lambda folder: SimpleNamespace(gamma=1))
    seen = []

    def no_memory(name, draft, **options):
        seen.append(sorted(path.name for path in Path(draft).glob("calibration.json")))
        raise MemoryError

    monkeypatch.setattr(module, "LLM", no_memory)
    with pytest.raises(MemoryError):
        calibrate("toy", tmp_path)
    assert seen == [[]]  # while the draft is loaded for measuring, no calibration is applied
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]
    with pytest.raises(ConfigError, match="temperatures: name 0, or one of at least 1"):
        calibrate("toy", tmp_path, temperatures=(0.7,))


def test_what_a_round_tells_about_each_draft(tmp_path):
    """Against the emitted text: drafts after a rejection did not survive; drafts beyond the end are unknown."""
    from exactspec.train.rollouts import Proposed
    from exactspec.types import FinishReason, RequestOutput, RequestStats

    stats = RequestStats(accepted_per_round=[1, 3])
    answer = RequestOutput("", [9, 8], [1, 2, 3, 4, 5], None, None, FinishReason("length"), stats, 7, "raw")
    proposed = {
        (7, 9, 8): [
            Proposed(2, [2, 7, 7, 7], [0.9, 0.8, 0.7, 0.6]),  # after token 1: 2 is right, then wrong
            Proposed(4, [4, 5, 6, 6], None),  # right to the end of the text: the rest is unknown
            Proposed(5, [6], [0.5]),  # a short proposal, wrong
        ]
    }
    rounds = gather_rounds([answer], proposed, 4)
    assert rounds.accepted.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert rounds.known.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert rounds.conditional()[:2].tolist() == [2 / 3, 1 / 2]
    assert rounds.tau == 3.0
    assert np.isnan(rounds.confidence[1]).all()


@pytest.mark.long
def test_a_trained_draft_is_calibrated_and_served_with_it(tmp_path, monkeypatch):
    target = chain_target(sharpness=0.3)
    options = toy_options(tmp_path, "dspark", steps=60)
    train(options, target, report=lambda metrics: None)
    monkeypatch.setattr(module, "LLM", lambda name, draft, **others: toy_llm(target, draft))
    monkeypatch.setattr(module, "LEAST_ROUNDS", 50)  # how many there are depends on how well the toy was learnt
    content = calibrate("toy", options.out, num_prompts=40, max_new_tokens=40)
    assert json.loads((options.out / "calibration.json").read_text()) == content
    calibration = read_calibration(options.out, 4)
    assert content["after"]["mean_ece_survival"] <= content["before"]["mean_ece_survival"] + 0.03
    from exactspec.train.rollouts import RecordingDrafter

    notes = []
    for folder in (options.out, tmp_path / "bare"):
        if folder.name == "bare":
            folder.mkdir()
            for name in ("config.json", "model.safetensors"):
                (folder / name).write_bytes((options.out / name).read_bytes())
        llm = toy_llm(target, str(folder))
        recorder = RecordingDrafter(llm.engine.drafter)
        llm.engine.drafter = llm.engine.runner.drafter = recorder
        llm.generate([[65, 66, 67]], SamplingParams(max_new_tokens=12, temperature=0.0, seed=1))
        notes.append([n.confidence for n in next(iter(recorder.proposed.values())) if len(n.token_ids) == 4])
    wanted = calibrated_chances(np.array(notes[1]), calibration, np.zeros(len(notes[1])))
    assert np.allclose(notes[0], wanted, atol=1e-4)
