"""Random traffic for the soak: one number is one request, the same in every run; and what its answer must fulfil."""

from __future__ import annotations

import http.client
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TEXTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "List three colours:", "Q: 2 + 2?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 12, "naïve café 😀",
]  # fmt: skip
WORDS = ["river", "stone", "quiet", "seven", "because", "lamp", "orange", "under", "never", "paper", "green", "slow"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PATTERN = "[a-z]{2,6}( [a-z]+)?"
EBNF = 'root ::= "yes" | "no" | "may" "be"+'
STOPS = [".", "\n", "the"]
LOOKS = [
    ("GET", "/health"), ("GET", "/server_info"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/model_info"),
    ("GET", "/v1/loads"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/flush_cache"), ("POST", "/pause"),
]  # fmt: skip
BAD = [
    ("/generate", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 100_000}}),
    ("/generate", {"input_ids": [49_152_000]}),
    ("/generate", {"text": "x", "sampling_params": {"regex": "(["}}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "x", "logprobs": -1}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}),
]  # fmt: skip


@dataclass
class Job:
    """One request of the soak."""

    number: int
    path: str
    body: dict[str, Any] | None
    method: str = "POST"
    status: int = 200
    extra: str = ""  # what is special about its sampling
    patience: float | None = None  # seconds until the client hangs up
    events: int | None = None  # streamed events until the client hangs up

    @property
    def generates(self) -> bool:
        return self.status == 200 and self.path in ("/generate", "/v1/completions", "/v1/chat/completions")

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))

    @property
    def params(self) -> dict[str, Any]:
        """Sampling parameters, wherever the API has them."""
        assert self.body is not None
        return self.body.get("sampling_params", self.body)

    @property
    def limit(self) -> int:
        return self.params.get("max_new_tokens", self.params.get("max_tokens"))

    @property
    def rid(self) -> str:
        return f"soak-{self.number:06d}"


@dataclass
class Choice:
    """One sample of an answer, in one shape for all routes. `logprobs` and `prompt` hold the reply's own entries."""

    text: str = ""
    ids: list[int] | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)  # mask rows
    hidden: list[Any] = field(default_factory=list)
    finish: str | None = None


# ---- making requests ---------------------------------------------------------------------------------


def make_job(number: int) -> Job:
    rng = random.Random(number)
    draw = rng.random()
    if draw < 0.08:
        return _look(number, rng)
    if draw < 0.11:
        path, body = rng.choice(BAD)
        return Job(number, path, body, status=400)
    path = rng.choice(["/generate"] * 5 + ["/v1/completions"] * 3 + ["/v1/chat/completions"] * 2)
    params, extra = _sampling(rng, in_wave=number % 400 < 40)
    make = {"/generate": _native, "/v1/completions": _completion, "/v1/chat/completions": _chat}[path]
    job = Job(number, path, make(rng, _text(rng), params, number), extra=extra)
    assert job.body is not None
    job.body |= {"rid": job.rid, "stream": rng.random() < 0.4, "priority": rng.choice([0, 0, 0, 1, -1])}
    if job.streams and path == "/v1/chat/completions":
        del job.body["return_token_ids"]  # not offered there
    if rng.random() < 0.08:
        if job.streams and rng.random() < 0.5:
            job.events = rng.randint(1, 4)
        else:
            job.patience = rng.choice([0.002, 0.02, 0.2, 1.0])
    return job


def _look(number: int, rng: random.Random) -> Job:
    method, path = rng.choice(LOOKS)
    body = {
        "/tokenize": {"prompt": rng.choice(TEXTS)}, "/detokenize": {"tokens": [rng.randint(0, 49_000)] * 3},
        "/pause": {"mode": "in_place"}, "/flush_cache": {},
    }.get(path)  # fmt: skip
    return Job(number, path, body, method)


def _text(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return " ".join(rng.choices(WORDS, k=rng.randint(40, 160)))
    return rng.choice(TEXTS) + rng.choice(["", " ", str(rng.randint(0, 9))])


def _sampling(rng: random.Random, *, in_wave: bool) -> tuple[dict[str, Any], str]:
    """Parameters that all APIs know, by their native names; and what is special about them.

    Long answers come in waves: many at once outgrow the pool, and some are retracted.
    """
    limit = rng.choice([0, 1, 2, 5, 8, 12])
    params: dict[str, Any] = {"max_new_tokens": limit, "temperature": rng.choice([0, 0.7, 1.0])}
    if rng.random() < (0.6 if in_wave else 0.01):
        return params | {"max_new_tokens": 100, "ignore_eos": True}, "long"
    extra = rng.choice(["plain", "plain", "stop", "regex", "schema", "ebnf", "penalty", "filters", "n", "bias", "min"])
    params |= {
        "plain": {}, "stop": {"stop": STOPS, "stop_regex": "[,;]", "max_new_tokens": 16}, "regex": {"regex": PATTERN},
        "schema": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 16}, "ebnf": {"ebnf": EBNF},
        "penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, "n": {"n": 3}, "bias": {"logit_bias": {"260": -5}},
        "min": {"min_new_tokens": min(4, limit)},
    }[extra]  # fmt: skip
    return params, extra


def _native(rng: random.Random, text: str, params: dict[str, Any], number: int) -> dict[str, Any]:
    many = rng.random() < 0.1
    body = {
        "text": [text, rng.choice(TEXTS)] if many else text, "sampling_params": params | {"sampling_seed": number},
        "return_logprob": True, "logprob_start_len": rng.choice([-1, -1, 0, 2]),
        "top_logprobs_num": rng.choice([0, 3]), "logprobs_kind": rng.choice(["raw", "raw", "scaled", "processed"]),
        "token_ids_logprob": rng.choice([None, [5, 260]]), "incremental_stream": rng.random() < 0.5,
    }  # fmt: skip
    if rng.random() < 0.1:
        body["return_sampling_mask"] = True
    if rng.random() < 0.03 and not many:
        body["return_hidden_states"] = True
    return body


def _openai(params: dict[str, Any], number: int) -> dict[str, Any]:
    names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    body = {names.get(key, key): value for key, value in params.items()} | {"model": "default", "seed": number}
    if "json_schema" in body:
        del body["json_schema"]
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    return body


def _completion(rng: random.Random, text: str, params: dict[str, Any], number: int) -> dict[str, Any]:
    body = {
        "prompt": [text, rng.choice(TEXTS)] if rng.random() < 0.1 else text, "return_token_ids": True,
        "logprobs": rng.choice([None, 0, 2, 2]), "echo": rng.random() < 0.2,
        "logprobs_kind": rng.choice([None, None, "scaled", "processed"]),
    }  # fmt: skip
    return _openai(params, number) | body


def _chat(rng: random.Random, text: str, params: dict[str, Any], number: int) -> dict[str, Any]:
    body = _openai(params, number) | {
        "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": rng.choice([0, 2]),
        "return_token_ids": True, "logprobs_kind": rng.choice([None, None, "scaled", "processed"]),
    }  # fmt: skip
    body["max_tokens"] = max(1, body["max_tokens"])
    return body


# ---- sending them ------------------------------------------------------------------------------------


class HungUpError(Exception):
    """The client left before the end, as it meant to."""


def send(url: str, job: Job) -> tuple[int, list[Any]]:
    """(status, events): one event for an answer in one piece. Raises OSError when the server fails the connection."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=job.patience or 600)
    try:
        data = None if job.body is None else json.dumps(job.body)
        connection.request(job.method, job.path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if not job.streams or response.status != 200:
            return response.status, [_json(response.read())]
        return response.status, list(_events(response, job))
    except TimeoutError:
        if job.patience is None:
            raise
        raise HungUpError from None
    finally:
        connection.close()


def _json(data: bytes) -> Any:
    return json.loads(data) if data[:1] in (b"{", b"[") else data.decode()


def _events(response: http.client.HTTPResponse, job: Job) -> Iterator[Any]:
    count, ended = 0, False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        assert not ended, "an event after the end"
        if line == b"data: [DONE]\n":
            ended = True
            continue
        yield json.loads(line[6:])
        count += 1
        if count == job.events:
            return
    assert ended, "the stream broke off"


# ---- reading answers ---------------------------------------------------------------------------------


def read(job: Job, events: list[Any]) -> list[Choice]:
    """The choices of an answer or of the streamed part of one. AssertionError when an event is an error."""
    for event in events:
        assert not isinstance(event, dict) or "error" not in event, event
    assert job.body is not None
    if job.path == "/generate":
        return _read_native(job, events)
    choices: dict[int, Choice] = {}
    for event in events:
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], Choice())
            _read_openai(job, choice, piece)
    return [choices[index] for index in sorted(choices)]


def _read_native(job: Job, events: list[Any]) -> list[Choice]:
    assert job.body is not None
    pieces = job.streams and job.body["incremental_stream"]
    choices: dict[int, Choice] = {}
    for event in events:
        for number, part in enumerate(event if isinstance(event, list) else [event]):
            index = part.get("index", number)
            choice = choices.setdefault(index, Choice(ids=[])) if pieces else Choice(ids=[])
            choices[index] = choice
            meta = part["meta_info"]
            choice.text += part["text"]
            choice.ids += part["output_ids"]  # type: ignore[operator]
            lists = [
                meta["output_token_logprobs"],
                meta.get("output_top_logprobs"),
                meta.get("output_token_ids_logprobs"),
            ]
            choice.logprobs += list(zip(*(entry for entry in lists if entry is not None), strict=True))
            names = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
            choice.prompt = [meta.get(name) for name in names]
            mask = ("output_token_sampling_mask", "output_token_sampling_logprobs")
            choice.others += list(zip(*(meta.get(name, []) for name in mask), strict=True))
            choice.hidden = meta.get("hidden_states", [])
            choice.finish = (meta["finish_reason"] or {}).get("type")
    return [choices[index] for index in sorted(choices)]


def _read_openai(job: Job, choice: Choice, piece: dict[str, Any]) -> None:
    """Adds a choice, or a streamed piece of one, to what has come."""
    lists = piece["logprobs"] or {}
    if job.path == "/v1/completions":
        choice.text += piece["text"]
        rows = [lists.get("tokens", []), lists.get("token_logprobs", [])]
        if lists.get("top_logprobs"):
            rows.append(lists["top_logprobs"])
        choice.logprobs += list(zip(*rows, strict=True))
    else:
        message = piece.get("message") or piece["delta"]
        choice.text += message.get("content") or ""
        choice.logprobs += lists.get("content") or []
    choice.ids = piece.get("token_ids", choice.ids)
    assert choice.finish is None, "a piece after the last"
    choice.finish = piece["finish_reason"]


def check(job: Job, choices: list[Choice], *, aborted: bool, whole: bool) -> None:
    """What every answer must fulfil, read alone. `whole`: the client stayed to the end."""
    assert job.body is not None
    prompts = job.body.get("text") or job.body.get("prompt") or ""
    expected = job.params.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
    assert len(choices) == expected if whole else len(choices) <= expected, f"{len(choices)} choices of {expected}"
    for choice in choices:
        if whole:
            assert choice.finish in ("stop", "length", "abort"), choice.finish
        assert choice.finish != "abort" or aborted, "an abort that nobody asked for"
        if choice.ids is not None:
            assert len(choice.ids) <= job.limit
            if job.path == "/generate":
                scoring = int(job.limit == 0 and choice.finish == "length")  # the token that would have come
                assert len(choice.logprobs) == len(choice.ids) + scoring
            elif choice.logprobs and not job.body.get("echo"):
                assert len(choice.logprobs) == len(choice.ids)
        if choice.finish == "length" and choice.ids is not None:
            assert len(choice.ids) == job.limit
        _check_text(job, choice)


def _check_text(job: Job, choice: Choice) -> None:
    text = choice.text
    if job.extra == "stop" and choice.finish is not None:
        assert job.body is not None
        output = text if not job.body.get("echo") else ""
        assert not any(stop in output for stop in STOPS), text
    if choice.finish != "stop" or (job.body or {}).get("echo"):
        return
    if job.extra == "schema":
        assert isinstance(json.loads(text)["a"], int), text
    elif job.extra == "regex":
        assert re.fullmatch(PATTERN, text), text
    elif job.extra == "ebnf":
        assert re.fullmatch("yes|no|may(be)+", text), text
