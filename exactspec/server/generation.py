"""Requests in flight: one HTTP request is one or more samples, each a request to the engine and a text stream."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from exactspec.engine.admission import Limits, check_request
from exactspec.errors import RequestError
from exactspec.sampling.seeds import fresh_seed, sample_seed
from exactspec.server import messages as m
from exactspec.server.engine_client import EngineClient, Event
from exactspec.server.errors import ApiError, from_request_error
from exactspec.server.mailbox import Mailbox
from exactspec.server.metrics import Metrics
from exactspec.text.stream import TextStream
from exactspec.types import FinishReason, Request, RequestStats, SamplingParams, StepOutput, TokenLogprob, TokenSource

MAX_RID = 1024  # characters: every output of a request carries its id
_numbers = itertools.count(1)


@dataclass(eq=False)
class Arrival:
    """An HTTP request between its arrival and the engine: it is being tokenised or checked."""

    aborted: list[str] = field(default_factory=list)  # prefixes of the ids that must not be submitted any more
    over: bool = False


def rid_of(request_id: str) -> str | None:
    """The id that a client knows, of the engine's; None for a request of the server's own."""
    rid, mark, _ = request_id.rpartition("#")
    return rid if mark else None


@dataclass(slots=True)
class Delta:
    """What one step added to a sample."""

    text: str
    first_token: int  # index of the first new token
    output: StepOutput


@dataclass(eq=False, slots=True)
class Sample:
    """One answer on its way, gathering what the steps bring."""

    request: Request
    rid: str  # as the client knows it
    prompt_index: int
    sample_index: int
    stream: TextStream
    return_hidden: Any = False  # False, True or "last"
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    hidden: list[list[float]] = field(default_factory=list)
    prompt_hidden: list[list[float]] = field(default_factory=list)
    mask: list[tuple[list[int], list[float]]] = field(default_factory=list)
    next_token: TokenLogprob | None = None
    finish: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    started: float = field(default_factory=time.perf_counter)
    last_token_at: float | None = None
    ended: float | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def text(self) -> str:
        return self.stream.text

    def take(self, output: StepOutput) -> Delta:
        first = len(self.token_ids)
        self.token_ids += output.token_ids
        self.sources += output.sources
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.hidden_states:
            self.hidden += output.hidden_states  # type: ignore[arg-type]
        if output.sampling_mask:
            self.mask += output.sampling_mask
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.prompt_hidden is not None:
            self.prompt_hidden = output.prompt_hidden  # type: ignore[assignment]
        if output.next_token is not None:
            self.next_token = output.next_token
        self.stats = output.stats
        now = time.perf_counter()
        if output.token_ids:
            self.last_token_at = now
        if output.finish is not None:
            self.finish, self.ended = output.finish, now
        return Delta(self.stream.append(output.token_ids, output.finish), first, output)


def _due(pending: dict[str, Sample], waiting: dict[str, StepOutput], interval: int) -> list[tuple[Sample, StepOutput]]:
    """Takes out of `waiting` what has enough new tokens or an end, and out of `pending` what has ended."""
    due = []
    for request_id, output in list(waiting.items()):
        sample = pending[request_id]
        if output.finish is None and len(output.token_ids) < (interval if sample.token_ids else 1):
            continue
        del waiting[request_id]
        due.append((sample, output))
        if output.finish is not None:
            del pending[request_id]
    return due


def merged(first: StepOutput, then: StepOutput) -> StepOutput:
    """Two outputs of one request, one after the other, as one. Changes `first`."""
    for name in ("token_ids", "sources", "logprobs", "hidden_states", "sampling_mask"):
        if getattr(then, name) is not None:
            setattr(first, name, [*(getattr(first, name) or ()), *getattr(then, name)])
    for name in ("prompt_logprobs", "prompt_hidden", "next_token"):
        if getattr(then, name) is not None:
            setattr(first, name, getattr(then, name))
    first.finish, first.stats = then.finish, then.stats
    return first


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and how to continue it."""

    token_ids: Sequence[int]
    params: SamplingParams
    rid: str | None = None
    namespace: str = ""
    priority: int = 0
    return_hidden: Any = False
    sampling_mask: str | None = None
    max_drafts: int | None = None


class Generation:
    """All samples of one HTTP request, in the order prompt, sample."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        names: dict[str, str],
        metrics: Metrics | None = None,
        time_limit: float | None = None,
        arrival: Arrival | None = None,
    ) -> None:
        self.client = client
        self.names = names
        self.metrics = metrics
        self.time_limit = time_limit
        self.arrival = arrival or Arrival()
        self.samples: list[Sample] = []
        self.pending: dict[str, Sample] = {}  # by request id: those whose end has not arrived
        self._mailbox: Mailbox[tuple[str, Event]] = Mailbox()
        limits = Limits(**client.info["limits"]) if client.info else None
        for prompt_index, prompt in enumerate(prompts):
            seed = prompt.params.seed if prompt.params.seed is not None else fresh_seed()
            for sample_index in range(prompt.params.n):
                self.samples.append(self._sample(tokenizer, prompt, prompt_index, sample_index, seed, limits))

    def _sample(
        self, tokenizer: Any, prompt: Prompt, prompt_index: int, index: int, seed: int, limits: Limits | None
    ) -> Sample:
        if abs(prompt.priority) >= 2**31:
            raise ApiError(400, f"priority: must fit 32 bits, got {prompt.priority}")
        rid = prompt.rid or os.urandom(16).hex()
        if len(rid) > MAX_RID:
            raise ApiError(400, f"rid: has {len(rid)} characters; at most {MAX_RID} are allowed")
        if prompt.params.n > 1:
            rid = f"{rid}_{index}"
        request = Request(
            request_id=f"{rid}#{next(_numbers)}",  # clients may repeat their ids
            prompt_ids=tuple(prompt.token_ids),
            params=prompt.params,
            seed=sample_seed(seed, index),
            priority=prompt.priority,
            cache_namespace=prompt.namespace,
            return_hidden_states=bool(prompt.return_hidden),
            sampling_mask=prompt.sampling_mask,  # type: ignore[arg-type]
            max_drafts=prompt.max_drafts,
        )
        if limits is not None:
            try:
                check_request(request, limits)
            except RequestError as error:
                raise from_request_error(error, self.names) from None
        stream = TextStream(tokenizer, prompt.params)
        return Sample(request, rid, prompt_index, index, stream, prompt.return_hidden)

    async def arrivals(self, interval: int = 1) -> AsyncGenerator[list[tuple[Sample, StepOutput]], None]:
        """Runs the samples; yields what has arrived since the last time, one output a sample, until all have ended.

        A reader that falls behind gets several steps as one. After its first token a sample waits until it has
        `interval` new ones. What is yielded must be handed to `take` before the next turn. Raises ApiError when any
        sample is refused or lost. Leaving early (also by cancellation) aborts the rest.
        """
        pending = self.pending = {sample.request.request_id: sample for sample in self.samples}
        deadline = None if self.time_limit is None else time.perf_counter() + self.time_limit
        try:
            self._submit()
            waiting: dict[str, StepOutput] = {}
            while pending:
                failure: ApiError | None = None
                for request_id, event in await (self._mailbox.get_all() if deadline is None else self._next(deadline)):
                    if isinstance(event, StepOutput):
                        held = waiting.get(request_id)
                        waiting[request_id] = event if held is None else merged(held, event)
                    else:
                        failure = event if isinstance(event, ApiError) else self._refusal(event)
                        break
                arrived = _due(pending, waiting, interval if failure is None else 1)
                if arrived:
                    yield arrived
                if failure is not None:
                    raise failure
        finally:
            self.client.abort(pending, silent=True)

    def _submit(self) -> None:
        """Hands the samples to the engine, those not that were aborted on their way here."""
        self.arrival.over = True
        prefixes = tuple(self.arrival.aborted)
        for sample in self.samples:
            if sample.rid.startswith(prefixes):
                end = FinishReason("abort", message="Aborted")
                request_id = sample.request.request_id
                self._mailbox.put((request_id, StepOutput(request_id, [], None, [], end, RequestStats())))
            else:
                self.client.submit(sample.request, self._mailbox)

    def take(self, sample: Sample, output: StepOutput) -> Delta:
        """Adds an output that has arrived to its sample."""
        before = sample.last_token_at
        delta = sample.take(output)
        if self.metrics is not None:
            self.metrics.observe(sample, len(output.token_ids), before, time.perf_counter())
        return delta

    async def _next(self, deadline: float) -> list[tuple[str, Event]]:
        try:
            return await asyncio.wait_for(self._mailbox.get_all(), max(0.0, deadline - time.perf_counter()))
        except TimeoutError:
            raise ApiError(503, f"the request took more than {self.time_limit:g} s") from None

    def _refusal(self, event: m.Refused) -> ApiError:
        if event.status != 400:
            return ApiError(event.status, event.reason, retry_after=1)
        return from_request_error(RequestError(event.field, event.reason), self.names)

    async def run(self) -> list[Sample]:
        """All samples, finished."""
        async for arrived in self.arrivals():
            for sample, output in arrived:
                self.take(sample, output)
        return self.samples
