"""What the two OpenAI routes share: body to prompts, usage, finish reasons, streaming frames."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from exactspec.server.errors import ApiError, bad_request, openai_body
from exactspec.server.generation import Delta, Generation, Prompt, Sample
from exactspec.server.native import hidden_states, rounds
from exactspec.server.protocol import OpenAIBody, SchemaError
from exactspec.server.state import DONE, EventStream, Server, server_of, sse, unless_gone
from exactspec.types import SamplingParams, StepOutput


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise SchemaError(400, f"Content-Type: must be application/json, got {kind!r}")


def refuse_unsupported(body: OpenAIBody, names: Sequence[str] = ()) -> None:
    for name in ("lora_path", "custom_logit_processor", "session_params", *names):
        if getattr(body, name):
            raise bad_request(name, "is not supported")


def make_prompt(
    body: OpenAIBody, token_ids: Sequence[int], params: SamplingParams, rid: str | None, space: str
) -> Prompt:
    hidden = bool(body.return_hidden_states)
    return Prompt(token_ids, params, rid, space, body.priority or 0, hidden, max_drafts=body.max_drafts)


def new_id(prefix: str) -> str:
    return f"{prefix}-{os.urandom(16).hex()}"


def usage(server: Server, samples: Sequence[Sample]) -> dict[str, Any]:
    """Prompt tokens count once per prompt."""
    firsts = [sample for sample in samples if sample.sample_index == 0]
    prompt = sum(len(sample.prompt_ids) for sample in firsts)
    completion = sum(len(sample.token_ids) for sample in samples)
    details = None
    if server.options.enable_cache_report:
        details = {"cached_tokens": sum(sample.stats.cached_tokens for sample in firsts)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def ending(sample: Sample) -> dict[str, Any]:
    """finish_reason and matched_stop of a choice; both null while it runs."""
    finish = sample.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.kind, "matched_stop": finish.matched if finish.kind == "stop" else None}


def extras(body: OpenAIBody, sample: Sample) -> dict[str, Any]:
    """Extension fields of a finished choice, where asked for."""
    result: dict[str, Any] = {}
    if body.return_hidden_states:
        # the last row, or nothing when there was only the prompt's block
        result["hidden_states"] = hidden_states(sample, last=True) if len(sample.token_ids) > 1 else []
    if body.return_token_ids:
        result["token_ids"] = sample.token_ids
        result["prompt_token_ids"] = list(sample.prompt_ids)
    if body.return_token_sources:
        result["token_sources"] = [str(source) for source in sample.sources]
    return result


def sglext(server: Server, body: OpenAIBody, samples: Sequence[Sample]) -> dict[str, Any]:
    """{"sglext": the counts of rounds}, where asked for and there were rounds; a list for several samples."""
    details = [rounds(server, sample) or None for sample in samples]
    if not body.return_spec_tokens_details or not any(details):
        return {}
    return {"sglext": {"spec_tokens_details": details if len(details) > 1 else details[0]}}


def metadata(samples: Sequence[Sample], *, logprobs: bool) -> dict[str, Any]:
    """What the answer can be had again with: the first sample's seed of each prompt, and the kind of its logprobs."""
    seeds = [sample.request.seed for sample in samples if sample.sample_index == 0]
    result: dict[str, Any] = {"weight_version": "default", "sampling_seeds": seeds}
    if logprobs:
        result["logprobs_kind"] = samples[0].params.logprobs_kind
    return result


def head(kind: str, answer_id: str, body: OpenAIBody, server: Server) -> dict[str, Any]:
    model = body.model if body.model is not None else server.options.model_name
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


Render = Callable[[Sample, Delta], Iterable[dict[str, Any]]]  # what a step has added, as chunks


async def stream_response(
    request: Request, body: OpenAIBody, shell: dict[str, Any], generation: Generation, render: Render
) -> Response:
    """Streams chunks. What goes wrong before the first one is an ordinary HTTP error."""
    arrivals = generation.arrivals(server_of(request).options.stream_interval)
    first = await unless_gone(request.receive, anext(arrivals))
    return EventStream(_frames(server_of(request), body, shell, generation, render, first, arrivals))


async def _frames(
    server: Server,
    body: OpenAIBody,
    shell: dict[str, Any],
    generation: Generation,
    render: Render,
    first: list[tuple[Sample, StepOutput]],
    arrivals: AsyncGenerator[list[tuple[Sample, StepOutput]], None],
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    each = bool(options and options.continuous_usage_stats)
    wants_logprobs = any(sample.params.logprobs is not None for sample in generation.samples)

    def frames(arrived: list[tuple[Sample, StepOutput]]) -> bytes:
        made: list[dict[str, Any]] = []
        for sample, output in arrived:
            for choice in render(sample, generation.take(sample, output)):
                counts = usage(server, generation.samples) if each else None
                made.append({**shell, "choices": [choice], "usage": counts})
        if generation.pending:
            return b"".join(map(sse, made))
        if made:  # the end of the last choice
            made[-1]["metadata"] = metadata(generation.samples, logprobs=wants_logprobs)
        if extra := sglext(server, body, generation.samples):
            made.append({**shell, "choices": [], "usage": None, **extra})
        if options and options.include_usage:
            made.append({**shell, "choices": [], "usage": usage(server, generation.samples)})
        return b"".join(map(sse, made)) + DONE

    try:
        yield frames(first)
        async for arrived in arrivals:
            yield frames(arrived)
    except ApiError as error:
        yield sse({"error": openai_body(error)}) + DONE
    finally:
        await arrivals.aclose()
