"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from exactspec.server import openai
from exactspec.server.errors import OPENAI_NAMES, bad_request
from exactspec.server.formatting import completion_logprobs
from exactspec.server.generation import Delta, Generation, Prompt, Sample
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
    job = await _parse(body, server)
    generation = server.generation(job.prompts, OPENAI_NAMES)
    if body.stream:
        return await openai.stream_response(server, body, generation, _chunks(server, job, generation))
    samples = await unless_gone(request, generation.run())
    choices = [_choice(server, job, index, sample) for index, sample in enumerate(samples)]
    result = openai.head("text_completion", job.answer_id, body, server)
    result |= {
        "choices": choices,
        "usage": openai.usage(server, samples),
        "metadata": openai.metadata(samples, logprobs=body.logprobs is not None),
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
    params = openai_params(body.model_dump(), max_tokens, {}, plan, server.options)
    answer_id = openai.new_id("cmpl", body)
    jobs, echoes = [], []
    for index, prompt in enumerate(prompts):
        token_ids = await server.encode(prompt) if isinstance(prompt, str) else prompt
        if not token_ids:
            raise bad_request("prompt", "is empty; at least one token is needed")
        rid = answer_id if len(prompts) == 1 else f"{answer_id}_{index}"
        jobs.append(openai.make_prompt(body, token_ids, params, rid))
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


def _logprobs(
    server: Server, job: Job, prompt: Sequence[TokenLogprob], output: Sequence[TokenLogprob]
) -> dict[str, Any] | None:
    if job.body.logprobs is None:
        return None
    return completion_logprobs(prompt, output, server.texts, top=job.body.logprobs > 0)


def _choice(server: Server, job: Job, index: int, sample: Sample) -> dict[str, Any]:
    echo = job.echoes[sample.prompt_index] if job.body.echo else ""
    return {
        "index": index,
        "text": echo + sample.text,
        "logprobs": _logprobs(server, job, sample.prompt_logprobs, sample.logprobs),
        **openai.ending(sample),
        **openai.extras(job.body, sample),
    }


async def _chunks(server: Server, job: Job, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    shell = openai.head("text_completion", job.answer_id, job.body, server)
    index = {sample: number for number, sample in enumerate(generation.samples)}
    waiting_echo = set(generation.samples) if job.body.echo else set()
    async for sample, delta in generation.deltas():
        text = delta.text
        if sample in waiting_echo:
            text = job.echoes[sample.prompt_index] + text
        if text or sample.finish is not None or (job.body.logprobs is not None and delta.output.token_ids):
            waiting_echo.discard(sample)
            yield shell | {"choices": [_piece(server, job, index[sample], sample, delta, text)]}


def _piece(server: Server, job: Job, index: int, sample: Sample, delta: Delta, text: str) -> dict[str, Any]:
    prompt = delta.output.prompt_logprobs or []
    piece: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": _logprobs(server, job, prompt, delta.output.logprobs or []),
        **openai.ending(sample),
    }
    if job.body.return_token_sources:
        piece["token_sources"] = [str(source) for source in delta.output.sources]
    if sample.finish is not None:
        piece |= {k: v for k, v in openai.extras(job.body, sample).items() if k != "token_sources"}
    return piece
