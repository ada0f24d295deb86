"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from exactspec.errors import RequestError
from exactspec.server import native, openai
from exactspec.server.errors import OPENAI_NAMES, bad_request, from_request_error
from exactspec.server.formatting import chat_logprobs
from exactspec.server.generation import Delta, Prompt, Sample
from exactspec.server.params import LogprobPlan, openai_params
from exactspec.server.protocol import ChatBody, ChatMessage, parse_body
from exactspec.server.state import Server, json_response, server_of, unless_gone
from exactspec.types import TokenLogprob

ROLES = ("system", "user", "assistant", "tool", "developer")
MAX_TOP_LOGPROBS = 20
OURS = frozenset({
    "chat_template", "conversation", "max_length", "messages", "padding", "return_assistant_tokens_mask", "self",
    "tokenizer_kwargs", "truncation",
})  # fmt: skip


async def chat_completions(request: Request) -> Response:
    openai.check_content_type(request)
    server = server_of(request)
    body = parse_body(ChatBody, await request.body())
    answer_id = body.rid or openai.new_id("chatcmpl")
    names = OPENAI_NAMES | {"prompt": "messages" if body.input_ids is None else "input_ids"}
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    arrival = server.arrival()
    generation = server.generation([await _parse(body, server, answer_id)], names, arrival)
    if body.stream:
        shell = openai.head("chat.completion.chunk", answer_id, body, server)
        return await openai.stream_response(request, body, shell, generation, Pieces(server, body).render)
    samples = await unless_gone(request.receive, generation.run())
    result = openai.head("chat.completion", answer_id, body, server)
    result |= {
        "choices": [_choice(server, body, sample) for sample in samples],
        "usage": openai.usage(server, samples),
        "metadata": openai.metadata(samples, logprobs=bool(body.logprobs)),
        **openai.sglext(server, body, samples),
    }
    return json_response(result)


async def _parse(body: ChatBody, server: Server, answer_id: str) -> Prompt:
    server.check_available()
    openai.refuse_unsupported(body, ["tools"])
    if body.stream:
        for name in ("return_meta_info", "return_prompt_token_ids", "return_token_ids"):
            if getattr(body, name):
                raise bad_request(name, "is not available with streaming")
    if body.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice", "is not supported")
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, limit)
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(limit, f"must be at least 1, got {max_tokens}")
    plan = _plan(body)
    defaults = server.client.info.get("generation_defaults") or {}
    params = openai_params(vars(body), max_tokens, defaults, plan, server.options)
    token_ids = await _prompt_ids(body, server)
    return openai.make_prompt(body, token_ids, params, answer_id, native.namespace(body.extra_key, body.cache_salt))


def _plan(body: ChatBody) -> LogprobPlan:
    kind = body.logprobs_kind or "raw"
    if body.top_logprobs:  # clients that fill in every field send 0 with logprobs: false
        if not body.logprobs:
            raise bad_request("top_logprobs", "needs logprobs: true")
        if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise bad_request("top_logprobs", f"must be in 0..{MAX_TOP_LOGPROBS}, got {body.top_logprobs}")
    return LogprobPlan(body.top_logprobs or 0 if body.logprobs else None, kind=kind)


async def _prompt_ids(body: ChatBody, server: Server) -> list[int]:
    if body.input_ids is not None:
        return body.input_ids
    if not body.messages:
        raise bad_request("messages", "is empty; at least one message is needed")
    messages = [_message(number, message) for number, message in enumerate(body.messages)]
    server.check_size("messages", sum(len(message["content"]) for message in messages))
    arguments = dict(body.chat_template_kwargs or {})
    if body.continue_final_message:
        arguments["continue_final_message"] = True
    for name in ("tokenize", "return_tensors", "return_dict"):
        arguments.pop(name, None)
    if own := sorted(OURS & arguments.keys()):  # a template of the client's would be a program of the client's
        raise bad_request("chat_template_kwargs", f"{', '.join(own)}: not for requests to set")
    try:
        return await server.chat_ids(
            messages,
            arguments.pop("add_generation_prompt", not body.continue_final_message),
            **arguments,
        )
    except RequestError as error:
        raise from_request_error(error, OPENAI_NAMES) from None
    except TypeError as error:
        raise bad_request("chat_template_kwargs", f"not what the chat template takes: {error}") from None


def _message(number: int, message: ChatMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        raise bad_request("messages", f"message {number} has the role {message.role!r}; known: {', '.join(ROLES)}")
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise bad_request("messages", f"message {number}: only text parts are supported")
        content = "".join(part["text"] for part in content)
    return {**message.model_dump(exclude_none=True), "content": content or ""}


def _logprobs(server: Server, body: ChatBody, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
    return chat_logprobs(entries or [], server.texts) if body.logprobs else None


def _choice(server: Server, body: ChatBody, sample: Sample) -> dict[str, Any]:
    choice = {
        "index": sample.sample_index,
        "message": {"role": "assistant", "content": sample.text, "reasoning_content": None},
        "logprobs": _logprobs(server, body, sample.logprobs),
        **openai.ending(sample),
        **openai.extras(body, sample),
    }
    if body.return_meta_info:
        job = native.Job(native.GenerateBody.model_validate({}), [], [native.Wants()], True, 1)
        choice["meta_info"] = native.answer(server, job, sample)["meta_info"]
    if body.return_prompt_token_ids:
        choice["prompt_token_ids"] = list(sample.prompt_ids)
    return choice


class Pieces:
    """Per choice: the role, the content, and a last chunk of its own with the finish."""

    def __init__(self, server: Server, body: ChatBody) -> None:
        self.server = server
        self.body = body
        self.begun: set[Sample] = set()

    def render(self, sample: Sample, step: Delta) -> Iterator[dict[str, Any]]:
        if sample not in self.begun:
            self.begun.add(sample)
            yield _piece(sample, {"role": "assistant", "content": "", "reasoning_content": None})
        told = self.body.logprobs or self.body.return_token_sources  # of tokens whose text is held back, too
        if step.text or (told and step.output.token_ids):
            piece = _piece(sample, {"content": step.text, "reasoning_content": None})
            piece["logprobs"] = _logprobs(self.server, self.body, step.output.logprobs)
            if self.body.return_token_sources:
                piece["token_sources"] = [str(source) for source in step.output.sources]
            yield piece
        if sample.finish is not None:
            yield {**_piece(sample, {}), **openai.ending(sample), **_hidden_extra(self.body, sample)}


def _piece(sample: Sample, delta: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": sample.sample_index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None
    }  # fmt: skip


def _hidden_extra(body: ChatBody, sample: Sample) -> dict[str, Any]:
    return {k: v for k, v in openai.extras(body, sample).items() if k == "hidden_states"}
