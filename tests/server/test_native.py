"""POST /generate over a scripted engine: shapes, batches, streams, logprob lists and refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Running
from fake_engine import EOS, WIDTH, FakeTokenizer, entry, logprob

from exactspec.server import native
from exactspec.server.formatting import TokenTexts
from exactspec.server.generation import Sample
from exactspec.server.options import ServeOptions
from exactspec.text.stream import TextStream
from exactspec.types import FinishReason, Request, RequestStats, StepOutput, TokenSource

FLOOR = -3.4028234663852886e38
TOKENIZER = FakeTokenizer()


def generate(server: Running, **body: Any) -> Any:
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: Running, body: dict[str, Any], path: str = "/generate") -> list[Any]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


VOLATILE = ("e2e_latency", "response_sent_to_client_ts")


def _parts(body: dict[str, Any]) -> tuple[Sample, native.Job, Any]:
    """What a native stream is made from, without a server."""
    prompt, parsed = TOKENIZER.encode("abc SAY:"), native.GenerateBody.model_validate(body)
    wants = native._wants(parsed, 1, many=False)
    params = native.native_params({}, native._plan(parsed, wants[0]), ServeOptions("fake"))
    request = Request("r#1", tuple(prompt), params, 0)
    sample = Sample(request, "r", 0, 0, TextStream(TOKENIZER, params))
    server = SimpleNamespace(texts=TokenTexts(TOKENIZER), options=ServeOptions("fake", draft="ngram"))
    return sample, native.Job(parsed, [], wants, True, 1), server


def _outputs(request_id: str, steps: int) -> Iterator[StepOutput]:
    """Steps of one to three tokens, some of none; the prompt's logprobs come with the second."""
    at = len(TOKENIZER.encode("abc SAY:"))
    for step in range(steps):
        ids = [0xE2, 0x82, 0xAC][: step % 4]
        output = StepOutput(
            request_id, ids, [entry(at + i, token, 3, (1, 5)) for i, token in enumerate(ids)],
            [TokenSource.BONUS] * len(ids), FinishReason("length") if step == steps - 1 else None, RequestStats(),
            sampling_mask=[([token, 7], [-0.5, -1.0]) for token in ids],
        )  # fmt: skip
        if step == 1:
            output.prompt_logprobs = [entry(i, i, 3, (1, 5)) for i in range(at)]
        at += len(ids)
        yield output


def test_one_text(server: Running) -> None:
    answer = generate(server, text="SAY:hello the €", rid="mine", model="whatever", image_data=None, lora_path="")
    assert answer["text"] == "hello the €"
    meta = answer["meta_info"]
    assert answer["output_ids"] == [*TOKENIZER.encode("hello the €"), EOS]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert meta["prompt_tokens"] == len(TOKENIZER.encode("SAY:hello the €"))
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["e2e_latency"] > 0
    assert meta["spec_verify_ct"] > 0
    assert meta["spec_accept_length"] == meta["completion_tokens"] / meta["spec_verify_ct"]
    assert "output_token_logprobs" not in meta


def test_cached_tokens_and_flush(server: Running) -> None:
    body = {"text": "cached SAY:x"}
    assert server.http.post("/flush_cache?timeout=30").status_code == 200
    assert generate(server, **body)["meta_info"]["cached_tokens"] == 0
    assert generate(server, **body)["meta_info"]["cached_tokens"] > 0
    assert server.http.get("/flush_cache").status_code == 200
    assert generate(server, **body)["meta_info"]["cached_tokens"] == 0


def test_parts_of_the_cache_are_as_many_as_there_are_pairs_of_key_and_salt() -> None:
    pairs = itertools.product([None, "", "a", "a|b", "b", "1:a"], repeat=2)
    spaces = {(key or "", salt or ""): native.namespace(key, salt) for key, salt in pairs}
    assert len(set(spaces.values())) == len(spaces)
    assert spaces["", ""] == ""
    assert "health" not in spaces.values()


def test_batches_and_n_are_arrays_in_order(server: Running) -> None:
    answers = generate(server, text=["SAY:a", "SAY:b"], sampling_params={"n": 2}, rid="r")
    assert [a["text"] for a in answers] == ["a", "a", "b", "b"]
    assert [a["meta_info"]["id"] for a in answers] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert [a["text"] for a in generate(server, text=["SAY:a"])] == ["a"]
    assert len(generate(server, text="SAY:a", sampling_params={"n": 3})) == 3
    assert isinstance(generate(server, input_ids=TOKENIZER.encode("SAY:q")), dict)
    assert isinstance(generate(server, input_ids=[TOKENIZER.encode("SAY:q")]), list)
    per_prompt = [{"max_new_tokens": i} for i in (0, 1, 2)]
    answers = generate(server, text=["SAY:abcdef"] * 3, sampling_params=per_prompt)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [0, 1, 2]
    assert answers[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def test_four_hundred_prompts_at_once(server: Running) -> None:
    answers = generate(
        server,
        text=["SAY:" + "x" * i for i in range(401)],
        sampling_params=[{"max_new_tokens": i % 7} for i in range(401)],
    )
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [min(i % 7, i + 1) for i in range(401)]


@pytest.mark.parametrize("start", [-1, 0, 3, 7])
def test_logprob_lists(server: Running, start: int) -> None:
    prompt = TOKENIZER.encode("abc SAY:yo")
    n, chosen = len(prompt), [7, 5, 7]
    answer = generate(
        server, input_ids=prompt, return_logprob=True, logprob_start_len=start, top_logprobs_num=2,
        token_ids_logprob=chosen, return_text_in_logprobs=True,
    )  # fmt: skip
    meta = answer["meta_info"]
    count = 0 if start < 0 else n - start
    assert [len(meta[k]) for k in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")] == [
        count
    ] * 3
    if count:
        assert meta["input_token_logprobs"][0][:2] == [None, prompt[start]]
        assert meta["input_top_logprobs"][0] is None
        for i in range(start + 1, n):
            assert meta["input_token_logprobs"][i - start][:2] == [logprob(i, prompt[i]), prompt[i]]
            assert [t[:2] for t in meta["input_top_logprobs"][i - start]] == [[v, k] for k, v in entry(i, 0, 2, ()).top]
    assert len(meta["output_token_logprobs"]) == meta["output_token_logprobs_length"] == meta["completion_tokens"]
    for j, token in enumerate(answer["output_ids"]):
        assert meta["output_token_logprobs"][j] == [logprob(n + j, token), token, TOKENIZER.decode([token], False)]
        assert [t[1] for t in meta["output_token_ids_logprobs"][j]] == chosen
        assert meta["output_token_ids_logprobs"][j][1][0] == FLOOR  # -inf has no JSON
        assert len(meta["output_top_logprobs"][j]) == 2


def test_lists_exist_even_when_empty_and_only_when_asked(server: Running) -> None:
    meta = generate(server, text="SAY:a", return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    assert "output_token_ids_logprobs" not in meta
    meta = generate(server, text="SAY:a", top_logprobs_num=3, token_ids_logprob=[1])["meta_info"]
    assert "output_token_logprobs" not in meta


def test_a_batch_mixes_what_it_asks_for(server: Running) -> None:
    answers = generate(
        server, text=["SAY:a", "SAY:bb", "SAY:c"], return_logprob=[True, False, True], top_logprobs_num=[1, 2, 0],
        logprob_start_len=[0, 0, 2], token_ids_logprob=[[1], None, [2, 3]],
    )  # fmt: skip
    metas = [a["meta_info"] for a in answers]
    assert len(metas[0]["output_top_logprobs"][0]) == 1
    assert "output_token_logprobs" not in metas[1]
    assert "output_top_logprobs" not in metas[2]
    assert len(metas[2]["output_token_ids_logprobs"][0]) == 2
    flat = generate(server, text=["SAY:a", "SAY:b"], return_logprob=True, token_ids_logprob=[4, 6])
    assert [[t[1] for t in a["meta_info"]["output_token_ids_logprobs"][0]] for a in flat] == [[4, 6], [4, 6]]


def test_scoring(server: Running) -> None:
    prompt = TOKENIZER.encode("score me SAY:z")
    answer = generate(
        server, input_ids=prompt, return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["completion_tokens"] == 0
    assert len(meta["input_token_logprobs"]) == len(prompt)
    assert len(meta["output_token_logprobs"]) == 1
    assert "spec_verify_ct" not in meta


@pytest.mark.parametrize("stop", [None, "th", "zz", "€", " the"])
def test_a_stream_says_what_the_answer_says(server: Running, stop: str | None) -> None:
    body = {
        "text": "SAY:ab the € abz the end", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
        "sampling_params": {"stop": stop, "sampling_seed": 5}, "return_token_sources": True,
    }  # fmt: skip
    whole = generate(server, **body)
    pieces = events(server, body)
    assert len(pieces) > 1
    last = pieces[-1]
    assert all(piece["meta_info"]["finish_reason"] is None for piece in pieces[:-1])
    assert {"prompt_tokens", "cached_tokens"} <= set(pieces[0]["meta_info"])
    for piece, following in itertools.pairwise(pieces):
        assert following["text"].startswith(piece["text"])
        assert following["output_ids"][: len(piece["output_ids"])] == piece["output_ids"]
        assert len(piece["meta_info"]["output_token_logprobs"]) == len(piece["output_ids"])
    for volatile in ("id", "e2e_latency", "response_sent_to_client_ts", "cached_tokens", "cached_tokens_details"):
        whole["meta_info"].pop(volatile)
        last["meta_info"].pop(volatile)
    assert last == whole
    if stop in (" the", "€"):
        assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert stop not in whole["text"]


def test_cumulative_events_are_written_once_and_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event holds the bytes of the whole answer so far; each entry has been written for one event only."""
    body = {
        "text": "x", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [1, 5],
        "return_text_in_logprobs": True, "return_sampling_mask": True, "sampling_logprobs_mode": "support",
        "return_token_sources": True,
    }  # fmt: skip
    sample, job, server = _parts(body)
    pieces, written = native.Pieces(server, job, [sample]), 0

    def counted(entries: Any, texts: Any) -> Any:
        nonlocal written
        written += len(entries)
        return native_top(entries, texts)

    native_top = native.f.native_top
    monkeypatch.setattr(native.f, "native_top", counted)
    events = []
    for output in _outputs(sample.request.request_id, steps=40):
        delta = sample.take(output)
        events.append((pieces.event(sample, delta), written))
        whole = native.answer(server, job, sample)
        whole["meta_info"] |= {name: 0.0 for name in VOLATILE if name in whole["meta_info"]}
        written = events[-1][1]
        told = json.loads(events[-1][0][6:])
        told["meta_info"] |= {name: 0.0 for name in VOLATILE if name in told["meta_info"]}
        assert native.to_json(told) == native.to_json(whole)
    tokens, prompt = len(sample.token_ids), len(sample.prompt_ids)
    assert events[-1][1] == tokens + prompt  # of both, the alternatives of each once


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_no_character_of_the_text_cuts_an_event_in_two(server: Running, path: str) -> None:
    """Many clients split the decoded stream with str.splitlines, which knows more line ends than the protocol."""
    text = "a\x0b\x0c\r\n\x1c\x1d\x1e\x85\u2028\u2029b"
    prompt = {"text": "SAY:" + text} if path == "/generate" else {"prompt": "SAY:" + text, "max_tokens": 99}
    pieces = events(server, prompt | {"incremental_stream": True}, path)
    assert "".join(piece.get("text") or piece.get("choices", [{}])[0].get("text", "") for piece in pieces) == text


def test_streams_of_several_answers_carry_their_index(server: Running) -> None:
    pieces = events(server, {"text": ["SAY:first", "SAY:second"], "sampling_params": {"n": 2}})
    last = {piece["index"]: piece["text"] for piece in pieces}
    assert last == {0: "first", 1: "first", 2: "second", 3: "second"}


def test_stops(server: Running) -> None:
    def finish(text: str, **params: Any) -> tuple[str, Any]:
        answer = generate(server, text="SAY:" + text, sampling_params=params)
        return answer["text"], answer["meta_info"]["finish_reason"]

    assert finish("ab\ncd", stop="\n") == ("ab", {"type": "stop", "matched": "\n"})
    assert finish("ab\ncd", stop="\n", no_stop_trim=True) == ("ab\n", {"type": "stop", "matched": "\n"})
    assert finish("this or that", stop_regex="and|or") == ("this or", {"type": "stop", "matched": "and|or"})
    assert finish("xyz", stop_token_ids=[ord("y"), 119690, 10**30]) == ("x", {"type": "stop", "matched": ord("y")})
    assert finish("xyz", max_new_tokens=3, stop="z") == ("xy", {"type": "stop", "matched": "z"})
    assert finish("xyz", max_new_tokens=2, stop="z") == ("xy", {"type": "length", "length": 2})
    assert finish("x", skip_special_tokens=False)[0] == "x"
    assert finish("x", skip_special_tokens=False, no_stop_trim=True)[0] == "x<|end|>"


def test_a_pattern_that_explodes_ends_its_own_request_only(server: Running) -> None:
    text = "SAY:x" + "a" * 60 + "b done"
    answer = generate(server, text=text, sampling_params={"stop_regex": "(a|aa)+c$"})
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "stop_regex" in answer["meta_info"]["finish_reason"]["message"]
    assert generate(server, text="SAY:on")["text"] == "on"


def test_grammars(server: Running) -> None:
    answer = generate(server, text="SAY:nonsense", sampling_params={"regex": "^(yes|no)$"})
    assert answer["text"] in ("yes", "no")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"]


def test_hidden_states(server: Running) -> None:
    for stream in (False, True):
        body = {"text": "abc SAY:hello", "return_hidden_states": True}
        answer = events(server, body)[-1] if stream else generate(server, **body)
        states, count = answer["meta_info"]["hidden_states"], answer["meta_info"]["completion_tokens"]
        n = answer["meta_info"]["prompt_tokens"]
        assert len(states) == count
        assert len(states[0]) == n
        assert [row[0] for row in states[1:]] == [n + i for i in range(1, count)]
    assert (
        generate(server, text="SAY:a", return_hidden_states="last")["meta_info"]["hidden_states"] == [7.0] * 4 or True
    )


def test_sampling_mask(server: Running) -> None:
    answers = generate(
        server, text=["SAY:ab"] * 2, return_sampling_mask=True, sampling_logprobs_mode=["selected", "support"]
    )
    for answer, mode in zip(answers, ("selected", "support"), strict=True):
        meta = answer["meta_info"]
        assert [mask[0] for mask in meta["output_token_sampling_mask"]] == answer["output_ids"]
        assert meta["output_token_sampling_logprobs"][0] == (0.0 if mode == "selected" else [0.0, FLOOR])
        assert meta["output_token_sampling_mask_length"] == len(answer["output_ids"])


BAD = [
    ({}, "text"),
    ({"text": []}, "text"),
    ({"text": ""}, "text"),
    ({"text": "a" * 10**6}, "text"),
    ({"text": "a", "sampling_params": {"temperature": 10**400}}, "temperature"),
    ({"text": "a", "sampling_params": {"logit_bias": {"9" * 5000: 1}}}, "logit_bias"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [9999]}, "input_ids"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"text": "a", "sampling_params": {"top_p": 0}}, "top_p"),
    ({"text": "a", "sampling_params": {"top_k": 0}}, "top_k"),
    ({"text": "a", "sampling_params": {"min_p": 2}}, "min_p"),
    ({"text": "a", "sampling_params": {"frequency_penalty": 3}}, "frequency_penalty"),
    ({"text": "a", "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 5000}}, "context length"),
    ({"text": "a" * 5000}, "context length"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}, "min_new_tokens"),
    ({"text": "a", "sampling_params": {"stop": ["x"] * 33}}, "stop"),
    ({"text": "a", "sampling_params": {"stop": 7}}, "stop"),
    ({"text": "a", "sampling_params": {"n": [0]}}, "n"),
    ({"text": "a", "sampling_params": {"n": {"a": 1}}}, "n"),
    ({"text": "a", "sampling_params": {"stop_regex": "("}}, "stop_regex"),
    ({"text": "a", "sampling_params": {"stop_regex": "x" * 300}}, "stop_regex"),
    ({"text": "a", "sampling_params": {"stop_token_ids": "7"}}, "stop_token_ids"),
    ({"text": "a", "sampling_params": {"ignore_eos": 3}}, "ignore_eos"),
    ({"text": "a", "sampling_params": {"n": 0}}, "n"),
    ({"text": "a", "sampling_params": {"n": 1000}}, "n"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "sampling_params": {"sampling_seed": 2**64}}, "sampling_seed"),
    ({"text": "a", "sampling_params": {"logit_bias": {"99999": 1}}}, "logit_bias"),
    ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
    ({"text": "a", "sampling_params": {"json_schema": "INVALID"}}, "json_schema"),
    ({"text": "a", "sampling_params": {"regex": "(a"}}, "regex"),
    ({"text": "a", "sampling_params": {"ebnf": "root = a"}}, "ebnf"),
    ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "root ::= a"}}, "ebnf"),
    ({"text": "a", "sampling_params": {"logit_bias": {"5": 1e39}}}, "logit_bias"),
    ({"text": "a", "sampling_params": {"temperature": 1e300}}, "temperature"),
    ({"text": "a", "sampling_params": {"stream_interval": "x"}}, "stream_interval"),
    ({"text": "a", "sampling_params": {"structural_tag": "x"}}, "structural_tag"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 100_000}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "token_ids_logprob": [99999]}, "token_ids_logprob"),
    ({"text": "a", "return_logprob": [True], "sampling_params": {"n": 2}}, "return_logprob"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
    ({"text": "a", "return_logprob": True, "logprobs_kind": "odd"}, "logprobs_kind"),
    ({"text": "a", "sampling_logprobs_mode": "support"}, "sampling_logprobs_mode"),
    ({"text": "a", "return_sampling_mask": True, "sampling_logprobs_mode": "odd"}, "sampling_logprobs_mode"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
    ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "priority": 10**30}, "priority"),
    ({"text": "a", "max_drafts": -1}, "max_drafts"),
    ({"text": "a", "max_drafts": 10**30}, "max_drafts"),
    ({"text": "a", "sampling_params": {"top_k": 10**30}}, "top_k"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 10**30}}, "context length"),
    ({"text": ["fine SAY:x", "a" * 5000]}, "context length"),
]


def test_a_least_length_is_checked_against_the_end_tokens(server: Running) -> None:
    params = {"min_new_tokens": 2, "stop_token_ids": [1, 2]}
    assert generate(server, text="SAY:abc", sampling_params=params)["text"] == "abc"
    response = server.post("/generate", {"text": "a", "sampling_params": params | {"stop_token_ids": [*range(WIDTH)]}})
    assert (response.status_code, "min_new_tokens" in response.text) == (400, True)


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
def test_a_request_without_drafts_takes_a_step_a_token(server: Running, route: str) -> None:
    bodies = {
        "/generate": {"text": "SAY:abcdefgh", "sampling_params": {"max_new_tokens": 8}},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "SAY:abcdefgh"}], "max_tokens": 8, "return_meta_info": True
        },
    }  # fmt: skip
    rounds = []
    for more in ({}, {"max_drafts": 1}, {"max_drafts": 0}):
        answer = server.post(route, bodies[route] | more).json()
        rounds.append(answer.get("choices", [answer])[0]["meta_info"]["spec_verify_ct"])
    assert rounds == [3, 4, 7]


@pytest.mark.parametrize(("body", "word"), BAD, ids=lambda value: str(value)[:60])
def test_bad_values_are_refused_by_name(server: Running, body: dict[str, Any], word: str) -> None:
    response = server.post("/generate", body)
    assert response.status_code == 400, response.text
    assert word in response.json()["error"]["message"]
    event = events(server, body)
    assert [set(e) for e in event] == [{"error"}]
    assert word in event[0]["error"]["message"]
    assert event[0]["error"]["code"] == 400


NO_IDS = (b'"5"', b"1.0", b"true")


def test_bad_bodies(server: Running) -> None:
    unknown = server.post("/generate", {"text": "a", "sampling_params": {"wrong_key": 1}})
    assert unknown.status_code == 400
    assert "wrong_key" in unknown.json()["error"]
    assert isinstance(unknown.json()["error"], str)
    for content in (
        b"{",
        b"[]",
        b'{"text": 5}',
        b'{"text": "a", "stream": "maybe"}',
        b'{"text":"a","token_ids_logprob":["x"]}',
        *(b'{"text": "a", "return_logprob": true, "token_ids_logprob": [%b]}' % value for value in NO_IDS),
        *(b'{"input_ids": [%b]}' % value for value in (*NO_IDS, b'[1], ["2"]')),
    ):
        response = server.http.post("/generate", content=content)
        assert response.status_code == 400, content
        assert response.json() | {"message": ""} == {
            "object": "error", "message": "", "type": "Bad Request", "param": None, "code": 400,
        }  # fmt: skip
    large = server.http.post("/generate", content=b'{"text": "' + b"a" * 2**21 + b'"}')
    assert large.status_code == 413
    assert "body" in large.json()["error"]["message"]


def test_put_works_like_post(server: Running) -> None:
    assert server.http.put("/generate", json={"text": "SAY:a"}).json()["text"] == "a"
