"""`exactspec check`: the contract measured. Every way of running a request must give the same tokens and the same
floats.

The truth is plain decoding: no draft, alone, cold cache, one prefill chunk. Each cell of the matrix answers the
same requests another way and is compared with `==`; the answers are then rescored as prompts and compared again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from exactspec.engine.build import assemble
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.verify_policy import VerifyAll
from exactspec.errors import ConfigError
from exactspec.model.target import TargetModel
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Proposal, Request, SamplingParams, StepOutput, TokenLogprob

TEMPERATURES = (0.0, 0.7, 1.0)
RETRACT_EVERY = 5  # steps between forced retractions


class VerifyInTurn(VerifyAll):
    """Another number of drafts in every round, none and all among them: whatever a policy decides, answers stay."""

    reads_confidence = wants_confidence = True  # on a device it says whose drafts they are
    skips_drafts = True

    def __init__(self) -> None:
        super().__init__()
        self._round = 0

    def wants_drafts(self, plan: StepPlan) -> bool:
        self._round += 1
        return self._round % 4 != 0

    def verify_lens(self, plan: StepPlan, proposal: Proposal | None) -> list[int]:
        lengths = super().verify_lens(plan, proposal)
        return [(number + self._round) % (length + 1) for number, length in enumerate(lengths)]

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        self._round += 1
        return choices[-1 - self._round % len(choices)]


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of running the requests. A draft may have an option behind it: "+confidence" verifies as the confidence
    says, "+turns" another number of drafts in every round."""

    draft: str
    batch: int
    cached: bool
    chunk: int
    retract: bool
    overlap: bool = True

    def __str__(self) -> str:
        cache = "cached" if self.cached else "cold"
        retract = "retracted" if self.retract else "undisturbed"
        overlap = "" if self.overlap else " | no overlap"
        return f"{self.draft} | batch {self.batch} | {cache} | chunk {self.chunk} | {retract}{overlap}"


@dataclass(slots=True)
class CellResult:
    """Differences to the truth, by temperature: decode (tokens differ, largest logprob difference in nats) and
    rescore.
    """

    cell: Cell
    tokens_differ: dict[float, int] = field(default_factory=dict)
    decode_difference: dict[float, float] = field(default_factory=dict)
    rescore_difference: dict[float, float] = field(default_factory=dict)
    num_retracted: int = 0
    cached_tokens: int = 0
    accept_length: float | None = None
    num_overlapped: int = 0  # rounds launched before the one in front of them was read

    @property
    def largest_difference(self) -> float:
        """In nats, of decoding and of rescoring."""
        return max([*self.decode_difference.values(), *self.rescore_difference.values()], default=0.0)

    @property
    def exact(self) -> bool:
        return not any(self.tokens_differ.values()) and self.largest_difference == 0.0


@dataclass(slots=True)
class Answer:
    """Tokens and logprob entries of one request, gathered from its step outputs."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or [])
        self.prompt_logprobs.extend(output.prompt_logprobs or [])


def make_requests(prompts: Sequence[Sequence[int]], count: int, new_tokens: int, shift: int = 0) -> list[Request]:
    """`count` requests over the prompts, temperatures taken in turn beginning at `shift`, each with its own seed."""
    requests = []
    for number in range(count):
        params = SamplingParams(
            max_new_tokens=new_tokens,
            temperature=TEMPERATURES[(number + shift) % len(TEMPERATURES)],
            ignore_eos=True,
            logprobs=5,
        )
        prompt = tuple(prompts[number % len(prompts)])
        requests.append(Request(f"check-{number}-{shift}", prompt, params, seed=1000 + 7 * number + shift))
    return requests


def run_requests(engine: Engine, requests: Sequence[Request], *, retract: bool = False) -> dict[str, Answer]:
    """Runs all to their end; with `retract`, throws a running request back into the queue every few steps."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].take(output)
        steps += 1
        running = engine.scheduler.running()
        if retract and steps % RETRACT_EVERY == 0 and running:
            engine.scheduler.force_retract(running[steps % len(running)])
    engine.check_integrity()
    return answers


def largest_difference(found: Sequence[TokenLogprob], truth: Sequence[TokenLogprob]) -> float:
    """Largest difference in nats over tokens and their alternatives; infinite when the entries name other tokens."""
    if len(found) != len(truth):
        return float("inf")
    worst = 0.0
    for ours, theirs in zip(found, truth, strict=True):
        if ours.token_id != theirs.token_id or [t for t, _ in ours.top] != [t for t, _ in theirs.top]:
            return float("inf")
        tops = zip(ours.top, theirs.top, strict=True)
        worst = max(worst, _difference(ours.logprob, theirs.logprob), *(_difference(a, b) for (_, a), (_, b) in tops))
    return worst


def _difference(ours: float | None, theirs: float | None) -> float:
    """In nats; 0 for equal values alone, infinite where there is no number to compare (None, NaN)."""
    if ours == theirs:
        return 0.0
    if ours is None or theirs is None or math.isnan(ours - theirs):
        return math.inf
    return abs(ours - theirs)


class ExactnessCheck:
    """The matrix over one target. Engines share the target's weights; each has a pool of its own."""

    def __init__(self, target: TargetModel, prompts: Sequence[Sequence[int]], *, new_tokens: int = 24) -> None:
        self.target = target
        self.prompts = prompts
        self.new_tokens = new_tokens
        self._truth: dict[str, Answer] = {}

    def run(
        self,
        drafts: Sequence[str] = ("none", "ngram", "dflash", "dspark"),
        batches: Sequence[int] = (1, 5, 32),
        chunks: Sequence[int] = (4, 512),
        on_truth: Callable[[int], None] | None = None,
        overlaps: Sequence[bool] | None = None,
    ) -> Iterator[CellResult]:
        """Yields a result per cell. Batch 1 runs one request after another, at least one per temperature.

        overlaps: None checks overlap on and off where the device has it (CUDA).
        """
        overlaps = overlaps or ((True, False) if self.target.backend.name == "cuda" else (True,))
        self._find_truth(max(*batches, len(TEMPERATURES)), on_truth)
        for draft, chunk, batch in itertools.product(drafts, chunks, batches):
            engine = self._engine(draft, chunk, batch)
            for overlap, cached, retract in itertools.product(overlaps, (False, True), (False, True)):
                engine.rounds.overlap = overlap
                yield self._run_cell(engine, Cell(draft, batch, cached, chunk, retract, overlap))

    def _engine(self, name: str, chunk: int, batch: int) -> Engine:
        draft, _, option = name.partition("+")
        if option not in ("", "confidence", "turns"):
            raise ConfigError(f"drafts: {name}: unknown option {option}")
        config = EngineConfig(
            model="",
            draft=draft,
            prefill_chunk=chunk,
            max_running_requests=batch,
            page_size=16,
            overlap=False,
            verify="confidence" if option == "confidence" else "all",
        )
        longest = max(len(prompt) for prompt in self.prompts) + self.new_tokens + 32
        num_pages = (batch + 2) * -(-longest // config.page_size) + 64
        engine = assemble(config, self.target, num_pages)
        if option == "turns":
            engine.runner.policy = VerifyInTurn()
        return engine

    def _find_truth(self, count: int, on_truth: Callable[[int], None] | None) -> None:
        engine = self._engine("none", 512, 1)
        for number, request in enumerate(make_requests(self.prompts, count, self.new_tokens)):
            engine.flush_cache()
            self._truth.update(run_requests(engine, [request]))
            if on_truth is not None:
                on_truth(number + 1)

    def _run_cell(self, engine: Engine, cell: Cell) -> CellResult:
        requests = make_requests(self.prompts, max(cell.batch, len(TEMPERATURES)), self.new_tokens)
        groups = [requests[:]] if cell.batch > 1 else [[request] for request in requests]
        engine.flush_cache()
        if cell.cached:  # the first pass fills the cache, the second is the one that counts
            for group in groups:
                run_requests(engine, group)
        before, overlapped = engine.stats(), engine.rounds.num_overlapped
        answers: dict[str, Answer] = {}
        for group in groups:
            answers.update(run_requests(engine, group, retract=cell.retract))
        result = self._compare(cell, requests, answers)
        after = engine.stats()
        result.num_retracted = after.num_retractions - before.num_retractions
        result.cached_tokens = after.cached_tokens - before.cached_tokens
        result.accept_length = after.accept_length
        result.num_overlapped = engine.rounds.num_overlapped - overlapped
        self._rescore(engine, requests, answers, result)
        return result

    def _compare(self, cell: Cell, requests: Sequence[Request], answers: dict[str, Answer]) -> CellResult:
        result = CellResult(cell)
        for request in requests:
            at, ours, truth = request.params.temperature, answers[request.request_id], self._truth[request.request_id]
            differ = sum(a != b for a, b in itertools.zip_longest(ours.token_ids, truth.token_ids))
            result.tokens_differ[at] = result.tokens_differ.get(at, 0) + differ
            difference = largest_difference(ours.logprobs, truth.logprobs)
            result.decode_difference[at] = max(result.decode_difference.get(at, 0.0), difference)
        return result

    def _rescore(
        self, engine: Engine, requests: Sequence[Request], answers: dict[str, Answer], result: CellResult
    ) -> None:
        """Prompt + answer as a prompt: its logprobs are those that decoding gave."""
        scoring = []
        for request in requests:
            params = SamplingParams(
                max_new_tokens=0, prompt_logprobs=5, prompt_logprob_start=len(request.prompt_ids), temperature=0.0
            )
            ids = request.prompt_ids + tuple(answers[request.request_id].token_ids)
            scoring.append(replace(request, prompt_ids=ids, params=params))
        scored = run_requests(engine, scoring)
        for request in requests:
            at = request.params.temperature
            ours = scored[request.request_id].prompt_logprobs
            difference = largest_difference(ours, answers[request.request_id].logprobs)
            result.rescore_difference[at] = max(result.rescore_difference.get(at, 0.0), difference)
