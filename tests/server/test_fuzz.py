"""Whatever a client sends, the answer is below 500, strict JSON, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

from conftest import Running
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exactspec.server.protocol import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

odd = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**31, 2**63, -(2**63), 10**30, 0.5, -1.5, 1e308]),
    st.text(max_size=6), st.lists(st.integers(-2, 300), max_size=4), st.lists(st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-2, 9), max_size=2), st.just([[1, 2], [3]]), st.just("SAY:x"),
)  # fmt: skip
SAMPLING = [
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "n", "stop",
    "stop_regex", "stop_token_ids", "ignore_eos", "regex", "ebnf", "json_schema", "logit_bias", "sampling_seed",
    "stream_interval", "no_stop_trim", "wrong",
]  # fmt: skip
GOOD = {
    "/generate": {"text": "SAY:ab"},
    "/v1/completions": {"prompt": "SAY:ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "SAY:ab"}]},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [97]},
}
FIELDS = {
    "/generate": GenerateBody, "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
}  # fmt: skip


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    """A good body with one to three fields replaced by something odd."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body: dict[str, Any] = dict(GOOD[path])
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS[path].model_fields)), min_size=1, max_size=3)):
        body[name] = draw(odd)
    if path == "/generate":
        body["sampling_params"] = draw(st.dictionaries(st.sampled_from(SAMPLING), odd, max_size=3))
        body["sampling_params"].setdefault("max_new_tokens", 5)
    return path, body


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
@example(("/v1/completions", {"prompt": "\x85"}))  # a line end to `splitlines`, inside a string of JSON
@example(("/v1/completions", {"prompt": "\x85", "stream": True}))
def test_odd_values_never_break_the_server(server: Running, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    response = server.post(path, body)
    assert response.status_code < 500, (path, body, response.text)
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    for line in response.text.splitlines() if is_stream else [response.text]:
        line = line.removeprefix("data: ") if is_stream else line
        if line and line != "[DONE]":
            json.loads(line, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40), st.sampled_from(sorted(GOOD)))
def test_any_bytes_are_refused_politely(server: Running, content: bytes, path: str) -> None:
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400)
