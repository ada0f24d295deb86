"""`exactspec eval-draft`: how good a draft is, by real speculative rollouts through the engine.

tau (mean commit length of a round, bonus included) by prompt file, temperature and acceptance rule; conditional
acceptance by position; how well the confidence tells accepted from rejected drafts (AUC, ECE); where the time goes.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from exactspec.engine.llm import LLM
from exactspec.errors import ConfigError
from exactspec.text.prompt_file import read_prompt_file
from exactspec.train.calibrate import expected_calibration_error, measure_confidence
from exactspec.train.rollouts import Rounds, run_rollouts
from exactspec.types import SamplingParams

log = logging.getLogger(__name__)
Acceptance = Literal["coupled", "rejection"]
_BINS = 10


@dataclass(frozen=True)
class EvalOptions:
    """What to run. Each prompt file gives up to `num_prompts` first turns of at most `max_prompt` tokens (chat template
    applied), drawn with `seed`. A cell is (file, temperature, acceptance); greedy cells are run once, coupled."""

    target: str
    draft: str
    prompts: tuple[Path, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    acceptances: tuple[Acceptance, ...] = ("coupled", "rejection")
    num_prompts: int = 40
    max_prompt: int = 700
    max_new_tokens: int = 256
    seed: int = 0
    device: str = "auto"
    engine: dict[str, Any] = field(default_factory=dict)  # further fields of EngineConfig


@dataclass
class Cell:
    """One line of the table and its rounds."""

    prompts: str
    temperature: float
    acceptance: str
    rounds: Rounds
    seconds: dict[str, float]
    num_tokens: int
    calibrated: bool  # the draft's confidence

    def summary(self) -> dict[str, Any]:
        count = max(1, len(self.rounds.commit_lens))
        return {
            "prompts": self.prompts,
            "temperature": self.temperature,
            "acceptance": self.acceptance,
            "tau": round(self.rounds.tau, 4),
            "tau_standard_error": round(_standard_error(self.rounds.commit_lens), 4),
            "rounds": len(self.rounds.commit_lens),
            "tokens": self.num_tokens,
            "conditional_acceptance": [None if np.isnan(x) else round(float(x), 4) for x in self.rounds.conditional()],
            "milliseconds_per_request_round": {k: round(1000 * v / count, 3) for k, v in self.seconds.items()},
            "tokens_per_second": round(self.num_tokens / self.seconds["total"], 1),
        }


def _standard_error(values: Sequence[int]) -> float:
    """Of the mean over rounds. Rounds of one text are alike, so the true one is somewhat larger."""
    return float(np.std(values) / max(1, len(values)) ** 0.5) if values else 0.0


def eval_draft(options: EvalOptions, out: Path | None = None) -> dict[str, Any]:
    """Runs all cells; returns the report and writes eval.json and two plots to `out`. Raises ConfigError."""
    if not options.prompts:
        raise ConfigError("prompts: name at least one JSON-lines file")
    if options.num_prompts < 1:
        raise ConfigError(f"num_prompts: must be at least 1, got {options.num_prompts}")
    if options.max_new_tokens < 2:  # the first token comes with the prompt, in no round
        raise ConfigError(f"max_new_tokens: must be at least 2, got {options.max_new_tokens}")
    turns = {path: read_prompt_file(path) for path in options.prompts}  # refused here, before a model is loaded
    cells: list[Cell] = []
    for acceptance in options.acceptances:
        temperatures = [t for t in options.temperatures if t > 0 or acceptance == options.acceptances[0]]
        if temperatures:
            cells += _run_cells(options, turns, acceptance, temperatures)
    report = make_report(options, cells)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "eval.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        plot_report(report, cells, out)
    return report


def _run_cells(
    options: EvalOptions, turns: Mapping[Path, list[str]], acceptance: Acceptance, temperatures: Sequence[float]
) -> list[Cell]:
    llm = LLM(options.target, draft=options.draft, acceptance=acceptance, device=options.device, **options.engine)
    cells = []
    for path in options.prompts:
        ids = choose_prompts(llm, path, turns[path], options)
        for temperature in temperatures:
            params = [
                SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=options.seed + i)
                for i in range(len(ids))
            ]
            answers, rounds, seconds = run_rollouts(llm, ids, params)
            llm.engine.flush_cache()  # every cell starts without a prefix cache
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            calibrated = llm.engine.drafter.calibrated
            cell = Cell(path.stem, temperature, acceptance, rounds, seconds, num_tokens, calibrated)
            log.info("%s T=%g %s: tau %.3f", cell.prompts, temperature, acceptance, rounds.tau)
            cells.append(cell)
    return cells


def choose_prompts(llm: LLM, path: Path, turns: Sequence[str], options: EvalOptions) -> list[list[int]]:
    """Token ids of the seeded choice among the turns of `path`. Raises ConfigError where none is short enough."""
    shuffled = list(turns)
    random.Random(options.seed).shuffle(shuffled)
    chosen: list[list[int]] = []
    for turn in shuffled:
        if len(chosen) == options.num_prompts:
            break
        has_template = llm.tokenizer.has_chat_template
        ids = (
            llm.tokenizer.apply_chat_template([{"role": "user", "content": turn}])
            if has_template
            else llm.tokenizer.encode(turn)
        )
        if len(ids) <= options.max_prompt:
            chosen.append(ids)
    if not chosen:
        raise ConfigError(f"max_prompt: no prompt of {path} has at most {options.max_prompt} tokens")
    return chosen


def make_report(options: EvalOptions, cells: Sequence[Cell]) -> dict[str, Any]:
    """Cells, macro means over prompt files, and the confidence where there is one."""
    macro: dict[str, float] = {}
    for temperature, acceptance in dict.fromkeys((c.temperature, c.acceptance) for c in cells):
        taus = [c.rounds.tau for c in cells if (c.temperature, c.acceptance) == (temperature, acceptance)]
        macro[f"T={temperature:g} {acceptance}"] = round(float(np.mean(taus)), 4)
    report: dict[str, Any] = {
        "target": options.target,
        "draft": options.draft,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "num_prompts": options.num_prompts,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "macro_tau": macro,
        "cells": [cell.summary() for cell in cells],
    }
    for temperature in dict.fromkeys(c.temperature for c in cells):
        rounds = merge([c.rounds for c in cells if c.temperature == temperature and c.acceptance == "coupled"])
        if rounds is not None and not np.isnan(rounds.confidence).all():
            report.setdefault("confidence", {})[f"T={temperature:g}"] = measure_confidence(rounds)
    report["calibrated"] = any(cell.calibrated for cell in cells)
    return report


def merge(parts: Sequence[Rounds]) -> Rounds | None:
    """All rounds of several cells; None for no cell."""
    if not parts:
        return None
    return Rounds(
        np.concatenate([part.confidence for part in parts]),
        np.concatenate([part.known for part in parts]),
        np.concatenate([part.accepted for part in parts]),
        np.concatenate([part.temperature for part in parts]),
        [length for part in parts for length in part.commit_lens],
    )


def format_report(report: dict[str, Any]) -> str:
    """The table for a terminal."""
    lines = [f"{'prompts':<18}{'T':>5} {'acceptance':<11}{'tau':>7}{'+-':>7}  conditional acceptance by position"]
    for cell in report["cells"]:
        chances = " ".join("-" if x is None else f"{x:.3f}" for x in cell["conditional_acceptance"])
        lines.append(
            f"{cell['prompts']:<18}{cell['temperature']:>5g} {cell['acceptance']:<11}{cell['tau']:>7.3f}"
            f"{cell['tau_standard_error']:>7.3f}  {chances}"
        )
    lines += [f"macro tau, {name}: {tau:.3f}" for name, tau in report["macro_tau"].items()]
    for name, measure in report.get("confidence", {}).items():
        scalars = {key: value for key, value in measure.items() if not isinstance(value, list)}
        shown = {key: "unknown" if value is None else f"{value:.4f}" for key, value in scalars.items()}
        lines.append(
            f"confidence {name}: AUC {shown['auc_conditional']}, ECE {shown['mean_ece_conditional']} "
            f"(prefix survival {shown['mean_ece_survival']})"
        )
    return "\n".join(lines) + "\ntau: mean tokens committed per round, bonus included"


def plot_report(report: dict[str, Any], cells: Sequence[Cell], out: Path) -> None:
    """acceptance.png (by position) and, with a confidence head, reliability.png."""
    try:
        import matplotlib
    except ImportError:
        log.warning("no plots: matplotlib is not installed (pip install 'exactspec[plot]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for cell in cells:
        label = f"{cell.prompts} T={cell.temperature:g} {cell.acceptance}"
        axes.plot(np.arange(1, cell.rounds.known.shape[1] + 1), cell.rounds.conditional(), marker=".", label=label)
    axes.set(xlabel="draft position", ylabel="acceptance given the prefix", ylim=(0, 1))
    axes.legend(fontsize=6)
    figure.savefig(out / "acceptance.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    rounds = merge([cell.rounds for cell in cells if cell.acceptance == "coupled"])
    if rounds is None or np.isnan(rounds.confidence).all():
        return
    figure, axes = plt.subplots(figsize=(4.5, 4.5))
    chance, observed, count = reliability(rounds)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.scatter(chance, observed, s=4 + 200 * count / count.max())
    axes.set(xlabel="confidence", ylabel="observed acceptance", xlim=(0, 1), ylim=(0, 1))
    error = expected_calibration_error(*_tested(rounds), bins=_BINS)
    axes.set_title(f"reliability, ECE {error:.4f}")
    figure.savefig(out / "reliability.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def _tested(rounds: Rounds) -> tuple[np.ndarray, np.ndarray]:
    """Confidences and outcomes of the drafts whose prefix was accepted."""
    before = np.concatenate([np.ones_like(rounds.accepted[:, :1]), rounds.accepted[:, :-1]], axis=1)
    tested = rounds.known & before & ~np.isnan(rounds.confidence)
    return rounds.confidence[tested], rounds.accepted[tested]


def reliability(rounds: Rounds, bins: int = _BINS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per non-empty bin of confidence: its mean, the observed rate, the count."""
    chance, outcome = _tested(rounds)
    index = np.minimum((chance * bins).astype(int), bins - 1)
    count = np.bincount(index, minlength=bins)
    used = count > 0
    mean = np.bincount(index, weights=chance, minlength=bins)[used] / count[used]
    rate = np.bincount(index, weights=outcome.astype(float), minlength=bins)[used] / count[used]
    return mean, rate, count[used]
