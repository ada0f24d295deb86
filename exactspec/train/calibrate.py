"""Calibration of the confidence head on rollouts (draft/calibration.py says what is fitted), and its measures.

As in sequential temperature scaling (DSpark, arXiv 2607.05147, section 3.2), position k gets the scales for which the
product of the scaled confidences up to k predicts best whether the first k drafts survive, the positions before it
being fixed already: left to right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exactspec.draft.calibration import (
    CALIBRATION_FILE,
    Calibration,
    PositionScales,
    calibrated_chances,
    chance_logits,
    read_calibration,
)
from exactspec.draft.config import read_draft_config
from exactspec.engine.llm import LLM
from exactspec.errors import ConfigError
from exactspec.text.prompt_file import read_prompt_file
from exactspec.train.prompts import decode_all, frame_prompts, openings, user_turn
from exactspec.train.rollouts import Rounds, run_rollouts
from exactspec.train.saving import write_json
from exactspec.train.templates import template_prompts
from exactspec.types import SamplingParams
from exactspec.verify.survival import prefix_survival

Floats = NDArray[np.float64]
NUM_BINS = 15
_PROMPT_SEED = 987_654  # prompts of calibration: a seed of their own, so that training never saw them
LEAST_ROUNDS = 200


def expected_calibration_error(chance: Floats, outcome: NDArray[np.bool_], bins: int = NUM_BINS) -> float:
    """Mean gap between predicted chance and observed rate over `bins` equal-width bins, weighted by their sizes."""
    if len(chance) == 0:
        return float("nan")
    index = np.minimum((chance * bins).astype(int), bins - 1)
    counts = np.bincount(index, minlength=bins)
    predicted = np.bincount(index, weights=chance, minlength=bins)
    observed = np.bincount(index, weights=outcome.astype(np.float64), minlength=bins)
    return float(np.abs(predicted - observed).sum() / counts.sum())


def area_under_curve(chance: Floats, outcome: NDArray[np.bool_]) -> float:
    """Chance that an accepted draft was given more confidence than a rejected one (ties count half)."""
    positives, negatives = int(outcome.sum()), int((~outcome).sum())
    if not positives or not negatives:
        return float("nan")
    order = np.argsort(chance, kind="stable")
    _, first, inverse, sizes = np.unique(chance[order], return_index=True, return_inverse=True, return_counts=True)
    ranks = np.empty(len(chance))
    ranks[order] = (first + (sizes + 1) / 2.0)[inverse]
    return float((ranks[outcome].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def fit_calibration(rounds: Rounds) -> Calibration:
    """Scales for greedy rounds and for rounds at temperature 1 and above. Where there are none of a kind, those of
    the other stand in. Raises ConfigError without confidences or with too few rounds."""
    if not len(rounds.confidence):
        raise ConfigError("max_new_tokens: the rollouts had no round; the first token comes without one")
    if np.isnan(rounds.confidence).all():
        raise ConfigError("draft: it has no confidence head, so there is nothing to calibrate")
    fits = []
    for chosen in (rounds.temperature == 0.0, rounds.temperature >= 1.0):
        if 0 < chosen.sum() < LEAST_ROUNDS:
            raise ConfigError(f"prompts: {chosen.sum()} rounds are too few to calibrate, {LEAST_ROUNDS} are the least")
        fits.append(_fit_positions(_pick(rounds, chosen)) if chosen.any() else None)
    greedy, sampled = fits[0] or fits[1], fits[1] or fits[0]
    if greedy is None or sampled is None:
        raise ConfigError("temperatures: name 0, or one of at least 1")
    return Calibration(greedy, sampled)


def _pick(rounds: Rounds, chosen: NDArray[np.bool_]) -> Rounds:
    return Rounds(rounds.confidence[chosen], rounds.known[chosen], rounds.accepted[chosen], rounds.temperature[chosen])


def _fit_positions(rounds: Rounds) -> PositionScales:
    """Left to right: slope and offset of position k by the likelihood of what survived k drafts, given those before."""
    before = np.ones(len(rounds.known))
    slopes, offsets = [], []
    for k in range(rounds.known.shape[1]):
        logits = chance_logits(rounds.confidence[:, k])
        seen = rounds.known[:, k] & ~np.isnan(logits)
        slope, offset = (1.0, 0.0)
        if seen.any():
            slope, offset = _likeliest(logits[seen], before[seen], rounds.accepted[seen, k])
        slopes.append(slope)
        offsets.append(offset)
        before = before * np.nan_to_num(_sigmoid(logits * slope + offset), nan=0.0)
    return PositionScales(tuple(1.0 / slope for slope in slopes), tuple(offsets))


def _likeliest(logits: Floats, before: Floats, survived: NDArray[np.bool_]) -> tuple[float, float]:
    """Grid search that narrows twice."""
    slope, offset, width = 1.0, 0.0, 1.0
    for _ in range(3):
        grid = [
            (s, o)
            for s in slope * np.exp(width * np.linspace(-1.2, 1.2, 13))
            for o in offset + width * np.linspace(-1.5, 1.5, 13)
        ]
        slope, offset = min(grid, key=lambda pair: _surprise(before * _sigmoid(logits * pair[0] + pair[1]), survived))
        width /= 6.0
    return float(slope), float(offset)


def _surprise(chance: Floats, outcome: NDArray[np.bool_]) -> float:
    clipped = np.clip(chance, 1e-6, 1 - 1e-6)
    return float(-np.where(outcome, np.log(clipped), np.log1p(-clipped)).mean())


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-x))


def measure_confidence(rounds: Rounds, calibration: Calibration | None = None) -> dict[str, Any]:
    """ECE by position of the prefix survival and of the conditional confidence, their means, and the AUC."""
    chance = rounds.confidence
    if calibration is not None:
        chance = calibrated_chances(chance, calibration, rounds.temperature)
    survival = prefix_survival(chance)
    before = np.concatenate([np.ones_like(rounds.accepted[:, :1]), rounds.accepted[:, :-1]], axis=1)
    usable = rounds.known & ~np.isnan(chance)
    tested = usable & before
    gamma = chance.shape[1]
    prefix = [
        expected_calibration_error(survival[usable[:, k], k], rounds.accepted[usable[:, k], k]) for k in range(gamma)
    ]
    single = [
        expected_calibration_error(chance[tested[:, k], k], rounds.accepted[tested[:, k], k]) for k in range(gamma)
    ]
    return {
        "ece_survival": [_number(x) for x in prefix],
        "ece_conditional": [_number(x) for x in single],
        "mean_ece_survival": _number(_mean(prefix)),
        "mean_ece_conditional": _number(_mean(single)),
        "auc_conditional": _number(area_under_curve(chance[tested], rounds.accepted[tested])),
    }


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not np.isnan(value)]
    return float(np.mean(present)) if present else float("nan")


def _number(value: float) -> float | None:
    """JSON has no nan: what was not seen is null."""
    return None if np.isnan(value) else round(float(value), 5)


def calibrate(
    target: str,
    draft: str | Path,
    *,
    prompts: Path | None = None,
    num_prompts: int = 240,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    device: str = "auto",
    seed: int = 0,
    **engine_options: Any,
) -> dict[str, Any]:
    """Fits the calibration of a draft folder on rollouts and writes DRAFT/calibration.json; returns its content.

    `prompts`: JSON lines that training never saw; None: the target writes some with a seed of their own, and templates
    add others. A quarter of the prompts measures what the others fitted.
    """
    folder = Path(draft)
    gamma = read_draft_config(folder).gamma
    if num_prompts < 4:
        raise ConfigError(f"num_prompts: must be at least 4, got {num_prompts}")
    if not any(t == 0.0 or t >= 1.0 for t in temperatures):
        raise ConfigError("temperatures: name 0, or one of at least 1")
    with _set_aside(folder / CALIBRATION_FILE):  # an old calibration would be applied to what is to be measured
        llm = LLM(target, draft=str(folder), device=device, **engine_options)
    turns = read_prompt_file(prompts)[:num_prompts] if prompts else own_turns(llm, num_prompts, seed)
    if len(turns) < 4:
        raise ConfigError(f"prompts: {len(turns)} are too few, 4 are the least")
    ids = frame_prompts(llm.tokenizer, turns, _PROMPT_SEED)
    params = [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperatures[i % len(temperatures)], seed=seed + i)
        for i in range(len(ids))
    ]
    fitted = [i for i in range(len(ids)) if i % 4 != 3]
    checked = [i for i in range(len(ids)) if i % 4 == 3]
    _, rounds, _ = run_rollouts(llm, [ids[i] for i in fitted], [params[i] for i in fitted])
    scales = fit_calibration(rounds)
    _, others, _ = run_rollouts(llm, [ids[i] for i in checked], [params[i] for i in checked])
    content = {
        **scales.to_json(),
        "method": "temperature and offset by position, left to right, likelihood of the prefix survival",
        "target": target,
        "rounds": len(rounds.known),
        "sampling_temperatures": list(temperatures),
        "before": measure_confidence(others),
        "after": measure_confidence(others, scales),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(folder / CALIBRATION_FILE, content)
    read_calibration(folder, gamma)
    return content


@contextmanager
def _set_aside(file: Path) -> Iterator[None]:
    """The file is not there meanwhile, and back afterwards, whatever happens."""
    aside = file.with_name(file.name + ".aside")
    if file.exists():
        file.replace(aside)
    try:
        yield
    finally:
        if aside.exists():
            aside.replace(file)


def own_turns(llm: LLM, count: int, seed: int) -> list[str]:
    """User turns for calibration: half written by the target, half from templates, all from a seed of their own."""
    from_templates = template_prompts(count // 2, _PROMPT_SEED + seed)
    prompts, starts = openings(llm.tokenizer, count - len(from_templates), _PROMPT_SEED + seed)
    context = llm.engine.target.config.context_length
    fitting = [number for number, prompt in enumerate(prompts) if len(prompt) < context]
    prompts, starts = [prompts[number] for number in fitting], [starts[number] for number in fitting]
    params = [
        SamplingParams(
            max_new_tokens=min(120, context - len(prompt)), temperature=1.0, min_p=0.04, seed=_PROMPT_SEED + seed + i
        )
        for i, prompt in enumerate(prompts)
    ]
    written = llm.generate(prompts, params)
    texts = decode_all(llm.tokenizer, [answer.token_ids for answer in written])
    own = [user_turn(start, text) for start, text in zip(starts, texts, strict=True)]
    mixed = [turn for pair in zip(own, from_templates, strict=False) for turn in pair] + own[len(from_templates) :]
    return [turn for turn in mixed if len(turn.split()) >= 3]
