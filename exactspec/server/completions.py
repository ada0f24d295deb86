"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from exactspec.server import native, openai
from exactspec.server.errors import OPENAI_NAMES, bad_request
from exactspec.server.formatting import TextOffsets, completion_logprobs
from exactspec.server.generation import Delta, Prompt, Sample
from exactspec.server.params import LogprobPlan, openai_params
from exactspec.server.protocol import CompletionBody, parse_body
from exactspec.server.state import Server, json_response, server_of, unless_gone
from exactspec.types import TokenLogprob


@dataclass(slots=True)
class Job:
    body: CompletionBody
    answer_id: str
    prompts: list[Prompt]
    echoes: list[str]  # the prompts' texts, when they are echoed


async def completions(request: Request) -> Response:
    openai.check_content_type(request)
    server = server_of(request)
    body = parse_body(CompletionBody, await request.body())
    arrival = server.arrival()
    job = await _parse(body, server)
    generation = server.generation(job.prompts, OPENAI_NAMES, arrival)
    if body.stream:
        shell = openai.head("text_completion", job.answer_id, body, server)
        render = Pieces(server, job, generation.samples).render
        return await openai.stream_response(request, body, shell, generation, render)
    samples = await unless_gone(request.receive, generation.run())
    choices = [_choice(server, job, index, sample) for index, sample in enumerate(samples)]
    result = openai.head("text_completion", job.answer_id, body, server)
    result |= {
        "choices": choices,
        "usage": openai.usage(server, samples),
        "metadata": openai.metadata(samples, logprobs=body.logprobs is not None),
        **openai.sglext(server, body, samples),
    }
    return json_response(result)


async def _parse(body: CompletionBody, server: Server) -> Job:
    server.check_available()
    openai.refuse_unsupported(body, ["suffix"])
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of", "is only supported equal to n")
    if body.logprobs is not None and body.logprobs < 0:
        raise bad_request("logprobs", f"must be at least 0, got {body.logprobs}")
    prompts = _prompts(body.prompt)
    plan = _plan(body)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    params = openai_params(vars(body), max_tokens, {}, plan, server.options)
    given = body.rid or openai.new_id("cmpl")
    rids, spaces = native.rids_of(given, len(prompts)), native.namespaces(body, len(prompts))
    answer_id = given if isinstance(given, str) else rids[0] or openai.new_id("cmpl")
    jobs, echoes = [], []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            server.check_size("prompt", len(prompt))
        token_ids = await server.encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise bad_request("prompt", "is empty; at least one token is needed")
        jobs.append(openai.make_prompt(body, token_ids, params, rids[index], spaces[index]))
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else server.tokenizer.decode(_known(server, token_ids)))
    return Job(body, answer_id, jobs, echoes)


def _known(server: Server, token_ids: Sequence[int]) -> list[int]:
    """Ids that can be decoded; the others are refused by name when the request is checked."""
    return [i for i in token_ids if 0 <= i < server.tokenizer.vocab_size]


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        value = [value]
    if not value or not all(value):
        raise bad_request("prompt", "is empty; at least one token is needed")
    return value


def _plan(body: CompletionBody) -> LogprobPlan:
    kind = body.logprobs_kind or "raw"
    if body.logprobs is None:
        return LogprobPlan(kind=kind)
    scored = bool(body.echo) and body.logprobs > 0
    return LogprobPlan(body.logprobs, body.logprobs if scored else None, 0, (), kind)


def _offsets(server: Server, job: Job, sample: Sample) -> TextOffsets:
    return TextOffsets(server.tokenizer, _echo(job, sample), sample.params.skip_special_tokens)


def _echo(job: Job, sample: Sample) -> str:
    return job.echoes[sample.prompt_index] if job.body.echo else ""


def _logprobs(
    server: Server, job: Job, prompt: Sequence[TokenLogprob], output: Sequence[TokenLogprob], offsets: TextOffsets
) -> dict[str, Any] | None:
    if job.body.logprobs is None:
        return None
    return completion_logprobs(prompt, output, server.texts, offsets, top=job.body.logprobs > 0)


def _choice(server: Server, job: Job, index: int, sample: Sample) -> dict[str, Any]:
    return {
        "index": index,
        "text": _echo(job, sample) + sample.text,
        "logprobs": _logprobs(server, job, sample.prompt_logprobs, sample.logprobs, _offsets(server, job, sample)),
        **openai.ending(sample),
        **openai.extras(job.body, sample),
    }


class Pieces:
    """What a step has added to a choice, as a streamed choice."""

    def __init__(self, server: Server, job: Job, samples: Sequence[Sample]) -> None:
        self.server = server
        self.job = job
        self.index = {sample: number for number, sample in enumerate(samples)}
        self.waiting_echo = set(samples) if job.body.echo else set()
        self.offsets = {sample: _offsets(server, job, sample) for sample in samples}

    def render(self, sample: Sample, delta: Delta) -> Iterator[dict[str, Any]]:
        text, body = delta.text, self.job.body
        if sample in self.waiting_echo:
            text = _echo(self.job, sample) + text
        told = body.logprobs is not None or body.return_token_sources  # of tokens whose text is held back, too
        if text or sample.finish is not None or (told and delta.output.token_ids):
            self.waiting_echo.discard(sample)
            yield self._piece(sample, delta, text)

    def _piece(self, sample: Sample, delta: Delta, text: str) -> dict[str, Any]:
        body, output = self.job.body, delta.output
        prompt, entries, offsets = output.prompt_logprobs or [], output.logprobs or [], self.offsets[sample]
        piece: dict[str, Any] = {
            "index": self.index[sample],
            "text": text,
            "logprobs": _logprobs(self.server, self.job, prompt, entries, offsets),
            **openai.ending(sample),
        }
        if body.return_token_sources:
            piece["token_sources"] = [str(source) for source in output.sources]
        if sample.finish is not None:
            piece |= {k: v for k, v in openai.extras(body, sample).items() if k != "token_sources"}
        return piece
