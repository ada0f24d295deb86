"""`LLM`: the engine in this process, for scripts and notebooks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from exactspec.engine.build import build_engine
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.interrupts import held_interrupts
from exactspec.errors import RequestError
from exactspec.grammar import needs_grammar
from exactspec.sampling.seeds import fresh_seed, sample_seed
from exactspec.text.stream import TextStream
from exactspec.types import (
    FinishReason,
    Request,
    RequestOutput,
    RequestStats,
    SamplingParams,
    StepOutput,
    TokenLogprob,
    TokenSource,
)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class StreamChunk:
    """What one step added to one sample. `text` is a delta; text that may be the start of a stop string is held
    back.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    sources: list[TokenSource]
    finish_reason: FinishReason | None
    stats: RequestStats
    index: int = 0


@dataclass(slots=True)
class _Pending:
    """A request on its way, gathering its answer."""

    request: Request
    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None

    def take(self, output: StepOutput) -> str:
        """Adds a step's output; returns the text that became certain."""
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or [])
        self.sources.extend(output.sources)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = self.stream.append(output.token_ids, output.finish)
        self.text.append(delta)
        return delta

    def answer(self, output: StepOutput) -> RequestOutput:
        assert output.finish is not None
        params = self.request.params
        return RequestOutput(
            text="".join(self.text),
            prompt_token_ids=list(self.request.prompt_ids),
            token_ids=self.token_ids,
            logprobs=self.logprobs if params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=output.finish,
            stats=output.stats,
            seed=self.request.seed,
            logprobs_kind=params.logprobs_kind,
            sources=self.sources,
            request_id=self.request.request_id,
        )


class LLM:
    """A model with an optional draft. Same answers with and without the draft; see docs/exactness.md.

    Keyword arguments are the fields of EngineConfig. Raises ConfigError, CheckpointError, UnsupportedModelError or
    DeviceError. One thread uses it; in that thread several streams may be open at once, and `generate` be called
    beside them: they share the engine's steps.
    """

    def __init__(self, model: str, *, draft: str | None = None, **options: Any) -> None:
        self._attach(build_engine(EngineConfig(model, draft=draft, **options)))

    @classmethod
    def around(cls, engine: Engine) -> Self:
        """An LLM around an engine that exists already."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.target.tokenizer
        self._count = 0
        self._mailboxes: dict[str, list[StepOutput]] = {}  # of every unfinished request; those of a call share one

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continues each prompt (text, or token ids). `params`: one for all or one per prompt. With n > 1 the answers
        of a prompt stand side by side: p0s0, p0s1, p1s0, ... Raises RequestError before anything runs if any is
        refused."""
        pending = self._queue(_as_prompts(prompts), params)
        answers: dict[str, RequestOutput] = {}
        for output in self._run(pending):
            state = pending[output.request_id]
            state.take(output)
            if output.finish is not None:
                answers[output.request_id] = state.answer(output)
        return [answers[request_id] for request_id in pending]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` on conversations rendered with the model's chat template; one conversation or a list of them."""
        if not messages:
            raise RequestError("messages", "is empty; at least one message is needed")
        first = messages[0]
        conversations: Sequence[Any] = [messages] if isinstance(first, Mapping) else messages
        return self.generate([self.tokenizer.apply_chat_template(list(talk)) for talk in conversations], params)

    def score(
        self, prompts: Prompt | Sequence[Prompt], *, top_logprobs: int = 0, start: int = 0
    ) -> list[RequestOutput]:
        """Prompt logprobs only; nothing is generated. Entry 0 of a prompt has logprob None (start=0)."""
        params = SamplingParams(
            max_new_tokens=0, temperature=0.0, prompt_logprobs=top_logprobs, prompt_logprob_start=start
        )
        return self.generate(prompts, params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """`generate` for one prompt, step by step. Closing the iterator early aborts the request."""
        pending = self._queue([prompt], params)
        numbers = {request_id: number for number, request_id in enumerate(pending)}
        for output in self._run(pending):
            text = pending[output.request_id].take(output)
            yield StreamChunk(
                text,
                output.token_ids,
                output.logprobs,
                output.sources,
                output.finish,
                output.stats,
                numbers[output.request_id],
            )

    def close(self) -> None:
        """Ends the other processes of tensor_parallel; without it they end with this process."""
        self.engine.close()

    def _queue(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> dict[str, _Pending]:
        pending: dict[str, _Pending] = {}
        for prompt, chosen in zip(prompts, _params_of_each(params, len(prompts)), strict=True):
            ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt))
            seed = chosen.seed if chosen.seed is not None else fresh_seed()
            for index in range(chosen.n):
                self._count += 1
                request = Request(f"local-{self._count}", ids, chosen, sample_seed(seed, index))
                self.engine.check(request)
                if needs_grammar(chosen):
                    self.engine.grammars.compile(chosen)  # kept for when it is queued
                pending[request.request_id] = _Pending(request, TextStream(self.tokenizer, chosen))
        return pending

    def _run(self, pending: dict[str, _Pending]) -> Iterator[StepOutput]:
        """Feeds the engine as its queue has room and yields outputs until every request has ended."""
        waiting = list(pending)
        unfinished = set(pending)
        room = self.engine.config.max_waiting_requests
        mailbox: list[StepOutput] = []
        self._mailboxes.update(dict.fromkeys(pending, mailbox))
        try:
            while unfinished:
                with held_interrupts():
                    while waiting and self.engine.scheduler.num_waiting < room:
                        self.engine.add(pending[waiting.pop(0)].request)
                    if not mailbox:
                        self._deliver(self.engine.step())
                outputs = mailbox.copy()
                mailbox.clear()
                for output in outputs:
                    if output.finish is not None:
                        unfinished.discard(output.request_id)
                    yield output
        finally:
            with held_interrupts():
                for request_id in pending:
                    del self._mailboxes[request_id]
                for request_id in unfinished:
                    self.engine.abort(request_id)
                self._deliver(self.engine.take_ended())

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """A step serves every open stream: each finds its outputs when it is read next."""
        for output in outputs:
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].append(output)


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params)
    for chosen in each:
        if not isinstance(chosen, SamplingParams):
            raise RequestError("params", f"must be SamplingParams, one for all or one per prompt, got {chosen!r}")
    if len(each) != count:
        raise RequestError("params", f"{len(each)} given for {count} prompts")
    return each


def _as_prompts(prompts: Any) -> list[Any]:
    """One prompt (text or a flat list of ids) or several. Arrays and tensors of ids are taken as lists."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        items = [_plain(item) for item in _plain(prompts)]
    except TypeError:
        raise RequestError("prompts", f"must be text, token ids or a list of these, got {prompts!r}") from None
    return [items] if items and isinstance(items[0], int) else items


def _plain(value: Any) -> Any:
    """Lists and integers for numpy arrays and tensors; other things as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _token_ids(prompt: Any) -> list[int]:
    try:
        return [operator.index(token_id) for token_id in _plain(prompt)]
    except TypeError:
        raise RequestError("prompt", f"must be text or token ids (integers), got {prompt!r:.80}") from None
