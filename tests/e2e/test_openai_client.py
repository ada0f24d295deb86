"""The openai package against a real server: sync and async, whole and streamed, every logprobs option."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Running, running_server

pytestmark = [pytest.mark.model, pytest.mark.long]

MESSAGES: list[Any] = [{"role": "user", "content": "Write one sentence about rain, with a 😀."}]
PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server("--draft", "dspark") as running:
        yield running


class Clients:
    """The same call by the sync and the async client."""

    def __init__(self, server: Running) -> None:
        self.address = {"base_url": server.url + "/v1", "api_key": "EMPTY"}

    def create(self, route: str, *, use_async: bool, **options: Any) -> list[Any]:
        """The answer, or the chunks of a streamed one."""
        if use_async:
            return asyncio.run(self._create_async(route, **options))
        with openai.OpenAI(**self.address) as client:
            answer = _method(client, route)(model="default", **options)
            return list(answer) if options.get("stream") else [answer]

    async def _create_async(self, route: str, **options: Any) -> list[Any]:
        async with openai.AsyncOpenAI(**self.address) as client:
            answer = await _method(client, route)(model="default", **options)
            return [chunk async for chunk in answer] if options.get("stream") else [answer]


def _method(client: Any, route: str) -> Any:
    return client.chat.completions.create if route == "chat" else client.completions.create


def chat_parts(answers: list[Any]) -> dict[int, tuple[str, list[Any] | None, str]]:
    """Per choice: text, logprob entries (None: the field never came), finish reason."""
    parts: dict[int, tuple[str, list[Any] | None, str]] = {}
    for choice in (choice for answer in answers for choice in answer.choices):
        text, entries, finish = parts.get(choice.index, ("", None, ""))
        message = choice.delta if hasattr(choice, "delta") else choice.message
        if choice.logprobs is not None:
            entries = (entries or []) + choice.logprobs.content
        parts[choice.index] = (text + (message.content or ""), entries, choice.finish_reason or finish)
    return parts


def completion_parts(answers: list[Any]) -> dict[int, tuple[str, dict[str, list[Any]] | None, str]]:
    """Likewise, the four lists joined."""
    parts: dict[int, tuple[str, dict[str, list[Any]] | None, str]] = {}
    for choice in (choice for answer in answers for choice in answer.choices):
        text, lists, finish = parts.get(choice.index, ("", None, ""))
        if choice.logprobs is not None:
            new = choice.logprobs.model_dump()
            lists = {name: (lists or {}).get(name, []) + (new[name] or []) for name in new}
        parts[choice.index] = (text + choice.text, lists, choice.finish_reason or finish)
    return parts


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 0},
        {"logprobs": True, "top_logprobs": 1}, {"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "n": 3},
        {"logprobs": True, "top_logprobs": 2, "stop": [" the", "."]},
        {"logprobs": True, "extra_body": {"logprobs_kind": "processed", "top_k": 5}},
        {"logprobs": True, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)  # fmt: skip
def test_chat_logprobs(server: Running, asked: dict[str, Any]) -> None:
    clients = Clients(server)
    options = {"messages": MESSAGES, "max_tokens": 24, "temperature": 1.0, "seed": 11} | asked
    whole = chat_parts(clients.create("chat", use_async=False, **options))
    for use_async in (False, True):
        streamed = chat_parts(clients.create("chat", use_async=use_async, stream=True, **options))
        assert streamed == whole
    assert chat_parts(clients.create("chat", use_async=True, **options)) == whole
    assert sorted(whole) == list(range(asked.get("n", 1)))
    for text, entries, finish in whole.values():
        assert finish in ("stop", "length")
        if not asked.get("logprobs"):
            assert entries is None
            continue
        assert entries
        _check_chat_entries(entries, asked.get("top_logprobs", 0))
        data = b"".join(bytes(entry.bytes) for entry in entries)
        assert data.startswith(text.encode().removesuffix("\ufffd".encode()))  # a stop and what ends it are cut off


def _check_chat_entries(entries: list[Any], top: int) -> None:
    for entry in entries:
        assert len(entry.top_logprobs) == top
        assert math.isfinite(entry.logprob)
        assert entry.logprob <= 0
        values = [other.logprob for other in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        if values:
            assert values[0] >= entry.logprob
        for other in entry.top_logprobs:
            if other.bytes == entry.bytes and other.token == entry.token:
                assert other.logprob == entry.logprob


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
def test_completion_logprobs(server: Running, logprobs: int | None, echo: bool) -> None:
    clients = Clients(server)
    options = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.0, "seed": 5, "logprobs": logprobs, "echo": echo}
    whole = completion_parts(clients.create("completions", use_async=False, **options))
    for use_async in (False, True):
        assert completion_parts(clients.create("completions", use_async=use_async, stream=True, **options)) == whole
    [(text, lists, _)] = whole.values()
    assert text.startswith(PROMPT) == echo
    if logprobs is None:
        assert lists is None
        return
    assert lists is not None
    scored = echo and logprobs > 0
    assert "".join(lists["tokens"]) == (text if scored else text.removeprefix(PROMPT) if echo else text)
    assert len(lists["token_logprobs"]) == len(lists["tokens"]) == len(lists["text_offset"])
    assert [value is None for value in lists["token_logprobs"]] == [scored] + [False] * (len(lists["tokens"]) - 1)
    if logprobs == 0:
        assert not lists["top_logprobs"]
    for token, value, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"] or [], strict=False):
        if value is not None:
            assert top[token] == value
            assert logprobs <= len(top) <= logprobs + 1  # the token itself is always in it


def test_scoring_without_generating(server: Running) -> None:
    """max_tokens=0 with echo scores the prompt; what was generated scores as it was generated."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY") as client:
        made = client.completions.create(
            model="default", prompt=PROMPT, max_tokens=16, temperature=0, logprobs=1,
            extra_body={"return_token_ids": True},
        ).choices[0]  # fmt: skip
        ids = made.prompt_token_ids + made.token_ids
        scored = client.completions.create(model="default", prompt=ids, max_tokens=0, logprobs=1, echo=True).choices[0]
    count = len(made.token_ids)
    assert scored.logprobs.token_logprobs[-count:] == made.logprobs.token_logprobs
    assert scored.logprobs.top_logprobs[-count:] == made.logprobs.top_logprobs


def test_many_async_requests_at_once(server: Running) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="EMPTY") as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model="default", prompt=f"Count: {i},", max_tokens=8, seed=i, logprobs=2)
                    for i in range(8)
                )
            )
        return [(answer.choices[0].text, answer.choices[0].logprobs) for answer in answers]

    assert asyncio.run(ask()) == asyncio.run(ask())


def test_usage_and_errors(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY") as client:
        *_, last = client.chat.completions.create(
            model="default", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        assert (last.choices, last.usage.completion_tokens) == ([], 5)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="default", messages=MESSAGES, temperature=-1)
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            client.chat.completions.create(model="default", messages=MESSAGES, logprobs=True, top_logprobs=21)
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
