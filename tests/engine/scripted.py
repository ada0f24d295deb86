"""Drafters that follow a script, and engines over the tiny random target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from fakes import tiny_model
from torch import Tensor

from exactspec.draft.base import DraftBatch, Drafter
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.verify_policy import VerifyAll
from exactspec.model.target import TargetModel
from exactspec.types import ForwardBatch, Proposal, Request, RunningRequest, SamplingParams, StepOutput, TokenLogprob

# (request, number of output tokens so far, gamma) -> draft tokens
Script = Callable[[RunningRequest, int, int], Sequence[int]]


class ScriptedDrafter(Drafter):
    """Proposes what the script says."""

    def __init__(self, script: Script, gamma: int) -> None:
        self.script = script
        self.gamma = gamma
        self.forgotten: list[str] = []
        self.capture_layers = (0,)
        self.observed_rows = 0

    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        assert captured is not None
        assert captured.shape[0] == batch.num_rows
        self.observed_rows += batch.num_rows

    def propose(self, batch: DraftBatch) -> Proposal:
        tokens = torch.zeros(len(batch.requests), self.gamma, dtype=torch.int64)
        lengths = []
        for row, request in enumerate(batch.requests):
            room = min(self.gamma, request.draft_room)
            drafts = list(self.script(request, request.num_output, room))[:room]
            tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            lengths.append(len(drafts))
        return Proposal(tokens, lengths)

    def forget(self, request: RunningRequest) -> None:
        self.forgotten.append(request.request.request_id)


def oracle(truth: Mapping[str, Sequence[int]]) -> Script:
    """Always right: proposes the tokens that plain decoding of the request gave."""
    return lambda request, done, room: truth[request.request.request_id][done : done + room]


def always_wrong(truth: Mapping[str, Sequence[int]], vocab_size: int) -> Script:
    return lambda request, done, room: [
        (token + 1) % vocab_size for token in truth[request.request.request_id][done : done + room]
    ]


def sometimes(truth: Mapping[str, Sequence[int]], vocab_size: int) -> Script:
    """Right but for every third output position."""

    def script(request: RunningRequest, done: int, room: int) -> list[int]:
        right = truth[request.request.request_id][done : done + room]
        return [(t + 1) % vocab_size if (done + i) % 3 == 2 else t for i, t in enumerate(right)]

    return script


def silent(request: RunningRequest, done: int, room: int) -> list[int]:
    return []


def make_engine(drafter: Drafter, *, num_pages: int = 256, target: TargetModel | None = None, **config: Any) -> Engine:
    target = target or tiny_model()
    config.setdefault("page_size", 4)
    settings = EngineConfig(model="tiny", **config)
    return Engine(settings, target, drafter, num_pages, VerifyAll(settings.acceptance))


def request(request_id: str, prompt: Sequence[int], seed: int = 7, **params: Any) -> Request:
    names = ("return_hidden_states", "sampling_mask", "priority", "max_drafts")
    extra = {name: params.pop(name) for name in names if name in params}
    return Request(request_id, tuple(prompt), SamplingParams(**params), seed, **extra)


class Gathered:
    """Everything a request's outputs said."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.sources: list[str] = []
        self.hidden: list[Tensor] = []
        self.outputs: list[StepOutput] = []

    def take(self, output: StepOutput) -> None:
        assert self.finish is None, "an output after the end"
        self.outputs.append(output)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or [])
        self.sources.extend(source.value for source in output.sources)
        self.hidden.extend(output.hidden_states or [])
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs twice"
            self.prompt_logprobs = output.prompt_logprobs

    @property
    def finish(self) -> Any:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def stats(self) -> Any:
        return self.outputs[-1].stats

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must not depend on how the request was run."""
        entries = [(e.token_id, e.logprob, e.top, e.chosen) for e in self.logprobs]
        finish = self.finish
        return self.token_ids, entries, finish.kind, finish.matched


def run(engine: Engine, requests: Sequence[Request], max_steps: int = 5000) -> dict[str, Gathered]:
    """Adds all requests, steps to the end, checks the pages."""
    gathered = {r.request_id: Gathered() for r in requests}
    for r in requests:
        engine.add(r)
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for output in engine.step():
            gathered[output.request_id].take(output)
        engine.check_integrity()
    assert not engine.has_work(), "did not end"
    return gathered
