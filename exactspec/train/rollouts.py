"""Real speculative rollouts through the engine, with every proposal written down: for calibration and evaluation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from exactspec.draft.base import DraftBatch, Drafter
from exactspec.engine.llm import LLM
from exactspec.engine.runner import make_runner
from exactspec.types import ForwardBatch, Proposal, RequestOutput, RunningRequest, SamplingParams

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Proposed:
    """One round's proposal for one request: draft k would stand at position anchor + k."""

    anchor: int
    token_ids: list[int]
    confidence: list[float] | None
    temperature: float = 0.0  # of the request


class RecordingDrafter(Drafter):
    """Passes everything on to another drafter and notes what it proposed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.gamma = inner.gamma
        self.capture_layers = inner.capture_layers
        self.proposed: dict[tuple[int, ...], list[Proposed]] = defaultdict(list)
        self.seconds = {"propose": 0.0, "observe": 0.0}

    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        start = time.perf_counter()
        self.inner.observe(batch, captured)
        self.seconds["observe"] += time.perf_counter() - start

    def propose(self, batch: DraftBatch) -> Proposal:
        start = time.perf_counter()
        proposal = self.inner.propose(replace(batch, want_confidence=True))
        ids = proposal.token_ids.tolist()
        self.seconds["propose"] += time.perf_counter() - start
        confidence = None if proposal.confidence is None else proposal.confidence.tolist()
        for number, request in enumerate(batch.requests):
            length = proposal.lengths[number]
            if length:
                chances = None if confidence is None else confidence[number][:length]
                params = request.params
                heat = 0.0 if params.greedy else params.temperature
                note = Proposed(len(request.token_ids) - 1, ids[number][:length], chances, heat)
                self.proposed[_key(request)].append(note)
        return proposal

    def forget(self, request: RunningRequest) -> None:
        self.inner.forget(request)


def _key(request: RunningRequest) -> tuple[int, ...]:
    return (request.request.seed, *request.request.prompt_ids)


@dataclass
class Rounds:
    """All rounds of some rollouts as arrays over draft positions [R, G].

    confidence: as proposed (nan: none); known: the draft's fate was seen; accepted: the draft and all before it were
    what the target emitted. A draft after a rejected one is known (it did not survive); one beyond the end of the
    output is not. temperature [R]: of the request, 0 for greedy.
    """

    confidence: Floats
    known: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    temperature: Floats
    commit_lens: list[int] = field(default_factory=list)  # per round of the engine, bonus included

    @property
    def tau(self) -> float:
        """Mean commit length, bonus included."""
        return float(np.mean(self.commit_lens)) if self.commit_lens else 0.0

    def conditional(self) -> Floats:
        """[G]: acceptance of draft k where all before it were accepted (nan: never tested)."""
        before = np.concatenate([np.ones_like(self.accepted[:, :1]), self.accepted[:, :-1]], axis=1)
        tested = self.known & before
        with np.errstate(invalid="ignore"):
            return (self.accepted & tested).sum(0) / tested.sum(0)


def run_rollouts(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[list[RequestOutput], Rounds, dict[str, float]]:
    """Generates and returns (answers, their rounds, seconds by part). Prompts must differ, or their seeds."""
    engine = llm.engine
    recorder = RecordingDrafter(engine.drafter)
    timers: dict[str, float] = defaultdict(float)
    originals = engine.target.forward, engine.target.logits
    runner, most = engine.runner, engine.config.max_running_requests
    engine.drafter = recorder
    # one of its own: what a device captures and overlaps would pass the recorder by
    engine.runner = make_runner(
        engine.target, recorder, runner.sampler, runner.policy, engine.pool, engine.config.page_size, most
    )
    engine.target.forward = _timed(originals[0], timers, "target_forward")  # type: ignore[method-assign]
    engine.target.logits = _timed(originals[1], timers, "target_logits")  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        answers = llm.generate(list(prompts), list(params))
    finally:
        engine.drafter, engine.runner = recorder.inner, runner
        engine.target.forward, engine.target.logits = originals  # type: ignore[method-assign]
    total = time.perf_counter() - start
    seconds = {**timers, **{f"draft_{part}": value for part, value in recorder.seconds.items()}}
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    return answers, gather_rounds(answers, recorder.proposed, recorder.gamma), {"total": total, **seconds}


def _timed(function: Callable[..., Any], timers: dict[str, float], name: str) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        timers[name] += time.perf_counter() - start
        return result

    return wrapper


def gather_rounds(
    answers: Sequence[RequestOutput], proposed: dict[tuple[int, ...], list[Proposed]], gamma: int
) -> Rounds:
    """Compares proposals with what was emitted in their place."""
    confidence, known, accepted, temperature, commits = [], [], [], [], []
    for answer in answers:
        tokens = [*answer.prompt_token_ids, *answer.token_ids]
        commits += [count + 1 for count in answer.stats.accepted_per_round]
        for note in proposed.get((answer.seed, *answer.prompt_token_ids), []):
            truth = tokens[note.anchor + 1 : note.anchor + 1 + len(note.token_ids)]
            count = _matching(note.token_ids, truth)
            refuted = count < len(truth)
            row = np.arange(1, gamma + 1)
            temperature.append(note.temperature)
            accepted.append(row <= count)
            known.append((row <= len(note.token_ids)) & (refuted | (row <= len(truth))))
            chances = note.confidence or []
            confidence.append([*chances, *[np.nan] * (gamma - len(chances))])
    shape = (len(known), gamma)
    return Rounds(
        np.array(confidence, dtype=np.float64).reshape(shape),
        np.array(known, dtype=bool).reshape(shape),
        np.array(accepted, dtype=bool).reshape(shape),
        np.array(temperature, dtype=np.float64),
        commits,
    )


def _matching(drafts: Sequence[int], truth: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        count += 1
    return count
