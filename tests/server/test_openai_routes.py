"""The OpenAI routes over a scripted engine."""

from __future__ import annotations

import itertools
import json
from itertools import chain
from typing import Any

import openai
import pytest
from conftest import Running
from fake_engine import EOS, START, VOCAB, FakeTokenizer, logprob

from exactspec.server.formatting import TextOffsets, TokenTexts, completion_logprobs
from exactspec.types import TokenLogprob

TOKENIZER = FakeTokenizer()


def ask(server: Running, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Running, path: str, **body: Any) -> list[Any]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_completion(server: Running) -> None:
    answer = ask(server, COMPLETIONS, prompt="SAY:hello", model="default")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "default"
    assert answer["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "matched_stop": EOS}
    ]
    prompt = len(TOKENIZER.encode("SAY:hello"))
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6, "prompt_tokens_details": None,
        "reasoning_tokens": 0, "completion_tokens_details": None,
    }  # fmt: skip
    assert ask(server, COMPLETIONS, prompt="x" * 30)["usage"]["completion_tokens"] == 16  # the default max_tokens


def test_prompts_of_every_form_keep_their_order(server: Running) -> None:
    ids = [TOKENIZER.encode(f"SAY:{c}") for c in "ab"]
    for prompt, texts in (
        (["SAY:a", "SAY:b"], ["a", "a", "b", "b"]),
        (ids, ["a", "a", "b", "b"]),
        (ids[0], ["a", "a"]),
    ):
        answer = ask(server, COMPLETIONS, prompt=prompt, n=2)
        assert [c["text"] for c in answer["choices"]] == texts
        assert [c["index"] for c in answer["choices"]] == list(range(len(texts)))
        firsts = prompt if isinstance(prompt[0], list | str) else [prompt]
        tokens = [TOKENIZER.encode(p) if isinstance(p, str) else p for p in firsts]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_echo_and_logprobs_score_the_prompt(server: Running) -> None:
    prompt = TOKENIZER.encode("abc SAY:y")
    n = len(prompt)
    for max_tokens in (1, 0):
        choice = ask(
            server, COMPLETIONS, prompt=[prompt], echo=True, logprobs=2, max_tokens=max_tokens, temperature=0, seed=1
        )["choices"][0]
        lists = choice["logprobs"]
        assert {len(v) for v in lists.values()} == {n + max_tokens}
        assert lists["token_logprobs"][0] is None
        assert lists["top_logprobs"][0] is None
        assert lists["token_logprobs"][1:n] == [logprob(i, prompt[i]) for i in range(1, n)]
        assert len(lists["text_offset"]) == n + max_tokens
        for value, top in zip(lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True):
            assert value in top.values()
        assert choice["text"].startswith("abc SAY:y")


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [0, 1])
def test_text_offsets_cut_the_text_into_its_tokens(server: Running, logprobs: int, echo: bool, tokens: bool) -> None:
    """Half a character takes no room: the token that completes it takes all of it. A hidden special token neither."""
    text = "ab the €é SAY: the é€<"
    body = {"prompt": TOKENIZER.encode(text) if tokens else text, "echo": echo, "logprobs": logprobs}
    choice = ask(server, COMPLETIONS, **body)["choices"][0]
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    pieces = [choice["text"][start:end] for start, end in itertools.pairwise(offsets)]
    said = [" the", " ", "", "é", "", "€", "<", ""]
    prompt = ["ab", " the", " ", "", "€", "", "é", " ", "SAY", ":", *said[:-1]]
    assert pieces == (prompt if echo and logprobs else []) + said
    assert offsets[0] == (len(text) if echo and not logprobs else 0)


def test_text_offsets_behind_a_stop_and_around_special_tokens(server: Running) -> None:
    answer = ask(server, COMPLETIONS, prompt="SAY:abcd", stop="cd", logprobs=1)["choices"][0]
    assert (answer["text"], answer["logprobs"]["text_offset"]) == ("ab", [0, 2, 3])
    ids = [START, *TOKENIZER.encode("SAY:x")]
    shown = ask(server, COMPLETIONS, prompt=ids, echo=True, logprobs=1, skip_special_tokens=False, no_stop_trim=True)
    assert shown["choices"][0]["text"] == "SAY:xx<|end|>"
    assert shown["choices"][0]["logprobs"]["text_offset"] == [0, 0, 3, 4, 5, 6]


def test_tokens_of_one_text_are_all_listed_and_the_sampled_one_keeps_its_name() -> None:
    """0xAC alone is a byte and a piece of this vocabulary, and "¬" is what both look like."""
    byte, piece = 0xAC, VOCAB.index(b"\xac", 256)
    texts = TokenTexts(TOKENIZER)
    for own in (byte, piece):
        entry = TokenLogprob(own, -2.0 if own == piece else -1.0, ((byte, -1.0), (97, -1.5), (piece, -2.0)))
        [top] = completion_logprobs([], [entry], texts, TextOffsets(TOKENIZER, "", True), top=True)["top_logprobs"]
        other = piece if own == byte else byte
        assert top == {"¬": entry.logprob, "a": -1.5, f"token_id:{other}": -3.0 - entry.logprob}
    outside = TokenLogprob(97, -9.0, ((byte, -1.0), (piece, -2.0)))
    [top] = completion_logprobs([], [outside], texts, TextOffsets(TOKENIZER, "", True), top=True)["top_logprobs"]
    assert list(top.items()) == [("¬", -1.0), (f"token_id:{piece}", -2.0), ("a", -9.0)]


def test_completion_logprobs_zero_and_none(server: Running) -> None:
    choice = ask(server, COMPLETIONS, prompt="SAY:hé", logprobs=0)["choices"][0]
    assert choice["logprobs"]["top_logprobs"] == []
    assert choice["logprobs"]["tokens"] == ["h", "Ã", "©", "<|end|>"]  # half characters as latin-1
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert ask(server, COMPLETIONS, prompt="SAY:a")["choices"][0]["logprobs"] is None
    echoed = ask(server, COMPLETIONS, prompt="SAY:a", logprobs=0, echo=True)["choices"][0]
    assert echoed["text"] == "SAY:aa"
    assert len(echoed["logprobs"]["tokens"]) == 2


@pytest.mark.parametrize("stop", [None, " the", "abz"])
def test_completion_stream_equals_the_answer(server: Running, stop: str | None) -> None:
    body = {"prompt": "SAY:ab the € abz", "logprobs": 1, "echo": True, "stop": stop, "max_tokens": 64}
    whole = ask(server, COMPLETIONS, **body)["choices"][0]
    pieces = chunks(server, COMPLETIONS, **body, stream_options={"include_usage": True})
    assert pieces[-1]["choices"] == []
    assert pieces[-1]["usage"]["completion_tokens"] + len(TOKENIZER.encode(body["prompt"])) == len(
        whole["logprobs"]["tokens"]
    )
    content = [piece["choices"][0] for piece in pieces[:-1]]
    assert all(piece["usage"] is None for piece in pieces[:-1])
    assert "".join(c["text"] for c in content) == whole["text"]
    for name in whole["logprobs"]:
        assert list(chain.from_iterable(c["logprobs"][name] for c in content)) == whole["logprobs"][name]
    assert [c["finish_reason"] for c in content[:-1]] == [None] * (len(content) - 1)
    assert content[-1]["matched_stop"] == whole["matched_stop"] == (stop or EOS)


def test_chat(server: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "SAY:"}, {"type": "text", "text": "hi"}]}]
    answer = ask(server, CHAT, messages=messages, logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hi", "reasoning_content": None}
    assert choice["matched_stop"] == EOS
    content = choice["logprobs"]["content"]
    n = answer["usage"]["prompt_tokens"]
    assert [c["token"] for c in content] == ["h", "i", "<|end|>"]
    assert [c["logprob"] for c in content] == [logprob(n + j, t) for j, t in enumerate([ord("h"), ord("i"), EOS])]
    assert all(len(c["top_logprobs"]) == 2 for c in content)
    assert content[0]["bytes"] == [ord("h")]


def test_no_alternatives_without_logprobs_is_no_contradiction(server: Running) -> None:
    messages = [{"role": "user", "content": "SAY:a"}]
    assert ask(server, CHAT, messages=messages, logprobs=False, top_logprobs=0)["choices"][0]["logprobs"] is None


def test_half_characters_have_their_true_bytes(server: Running) -> None:
    content = ask(server, CHAT, messages=[{"role": "user", "content": "SAY:€"}], logprobs=True)["choices"][0][
        "logprobs"
    ]
    assert [(c["token"], c["bytes"]) for c in content["content"][:2]] == [("�", [0xE2, 0x82]), ("�", [0xAC])]


def test_chat_stream_equals_the_answer(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "SAY:ab the € abz"}], "logprobs": True, "top_logprobs": 1, "n": 2,
        "stop": "bz", "max_completion_tokens": 50,
    }  # fmt: skip
    whole = ask(server, CHAT, **body)["choices"]
    pieces = chunks(server, CHAT, **body)
    assert all(piece["choices"] for piece in pieces)
    assert all(piece["object"] == "chat.completion.chunk" for piece in pieces)
    for index in (0, 1):
        own = [p["choices"][0] for p in pieces if p["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert (
            "".join(c["delta"].get("content") or "" for c in own) == whole[index]["message"]["content"] == "ab the € a"
        )
        assert own[-1]["delta"] == {}
        assert (own[-1]["finish_reason"], own[-1]["matched_stop"]) == ("stop", "bz")
        entries = list(chain.from_iterable((c["logprobs"] or {}).get("content", []) for c in own))
        assert entries == whole[index]["logprobs"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "SAY:€uro abX"}), (CHAT, {"messages": [{"role": "user", "content": "SAY:€uro abX"}]})],
)
def test_a_stream_tells_sources_of_held_back_tokens_and_what_the_answer_can_be_had_again_with(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    body = {**body, "max_tokens": 20, "stop": ["abc"], "return_token_sources": True, "n": 2, "temperature": 0}
    whole = ask(server, path, **body)
    pieces = chunks(server, path, **body, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        told = [c for piece in pieces for c in piece["choices"] if c["index"] == choice["index"]]
        assert [s for c in told for s in c.get("token_sources") or []] == choice["token_sources"]
    assert [sorted(p["metadata"]) for p in pieces if "metadata" in p] == [["sampling_seeds", "weight_version"]]
    assert "metadata" in pieces[-2]
    scored = chunks(server, path, **{**body, "n": 1}, logprobs=path == CHAT or 1, seed=5)
    assert scored[-1]["metadata"]["logprobs_kind"] == "raw"
    assert scored[-1]["metadata"]["sampling_seeds"] == [5]


def test_a_token_behind_half_a_character_begins_behind_its_sign(server: Running) -> None:
    answer = ask(server, COMPLETIONS, prompt=[0xE2, 97, 98], echo=True, logprobs=1, max_tokens=1)
    choice = answer["choices"][0]
    assert choice["text"].startswith("\ufffdab")
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


def test_defaults_of_the_model_apply_to_chat_only(server: Running) -> None:
    """The fake model's generation config says top_k 7; nothing of it may be refused or leak into completions."""
    assert ask(server, CHAT, messages=[{"role": "user", "content": "SAY:a"}])["choices"][0]["finish_reason"] == "stop"


def test_response_formats(server: Running) -> None:
    def content(kind: Any) -> str:
        messages = [{"role": "user", "content": "SAY:}}}}}}}}"}]
        return ask(server, CHAT, messages=messages, response_format=kind)["choices"][0]["message"]["content"]

    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert isinstance(json.loads(content({"type": "json_object"})), dict)
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert set(json.loads(content(named))) == {"a"}
    assert content({"type": "text"}) == "}}}}}}}}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": "SAY:xyzuvwst"}), (CHAT, {"messages": [{"role": "user", "content": "SAY:xyzuvwst"}]})],
)
def test_counts_of_rounds_where_asked_for(
    server: Running, path: str, body: dict[str, Any], n: int, stream: bool
) -> None:
    body = body | {"n": n, "return_spec_tokens_details": True}
    if stream:
        *pieces, last = chunks(server, path, **body)
        assert all("sglext" not in piece and piece["choices"] for piece in pieces)
        assert last["choices"] == []
    else:
        last = ask(server, path, **body)
    details = last["sglext"]["spec_tokens_details"]
    assert isinstance(details, list) is (n > 1)
    for one in details if n > 1 else [details]:
        assert (one["spec_verify_ct"], one["spec_accept_length"]) == (3, 3.0)
        assert one["spec_correct_drafts_histogram"] == [0, 1, 2]
    assert "sglext" not in ask(server, path, **body | {"return_spec_tokens_details": False})
    assert "sglext" not in ask(server, path, **body | {"max_tokens": 1})  # no round


def test_ids_of_completions(server: Running) -> None:
    """One string is the beginning of all; a list has one for each prompt."""
    for rid, answer_id in (("r", "r"), (["a", "b"], "a")):
        assert ask(server, COMPLETIONS, prompt=["SAY:x", "SAY:y"], rid=rid)["id"] == answer_id
    for rid in (["a", "a"], ["a"], "x" * 1025):
        for path, prompt in ((COMPLETIONS, {"prompt": ["SAY:x", "SAY:y"]}), ("/generate", {"text": ["a", "b"]})):
            refused = server.post(path, {**prompt, "rid": rid})
            assert (refused.status_code, "rid" in refused.text) == (400, True)


def test_hidden_states_of_a_choice_are_its_last_row(server: Running) -> None:
    rows = [
        ask(server, COMPLETIONS, prompt="SAY:abc", return_hidden_states=wanted)["choices"][0]["hidden_states"]
        for wanted in (True, "last")
    ]
    assert rows[0] == rows[1] == [len(TOKENIZER.encode("SAY:abc")) + 2.0] * 4
    one = ask(server, COMPLETIONS, prompt="SAY:abc", return_hidden_states="last", max_tokens=1)
    assert one["choices"][0]["hidden_states"] == []  # only the prompt's block
    assert "return_hidden_states" in server.post(COMPLETIONS, {"prompt": "a", "return_hidden_states": "first"}).text


BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"allOf": True, "type": "string"}, "allOf"), ({"anyOf": 3, "type": "integer"}, "anyOf"),
    ({"oneOf": 1.5, "type": "integer"}, "oneOf"),
    ({"type": "object", "properties": {"c": {}}, "required": [{"a": 1}]}, "required"),
    ({"type": "object", "properties": {"c": {}}, "required": "c"}, "required"),
]  # fmt: skip
BAD_COMPLETIONS = [
    *(({"prompt": "x", "json_schema": json.dumps(schema)}, word) for schema, word in BAD_SCHEMAS),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": "a", "logprobs": -1}, "logprobs"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 5000}, "context length"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "x"}, "suffix"),
    ({"prompt": "a", "response_format": {"type": "odd"}}, "response_format"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
    ({"prompt": "a", "json_schema": "INVALID"}, "json_schema"),
    ({"prompt": "a", "json_schema": "{}", "response_format": {"type": "json_object"}}, "json_schema"),
    ({"prompt": "a", "logprobs_kind": "odd"}, "logprobs_kind"),
    ({"prompt": "a", "lora_path": "x"}, "lora_path"),
    ({"prompt": "a", "n": 10_000}, "n"),
    ({"prompt": "a", "min_tokens": 99}, "min_tokens: 99 is over max_tokens 16"),
]
BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    (
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template",
    ),
    ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": -1}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "x"}], "seed": 2**63}, "seed"),
    ({"messages": [{"role": "user", "content": "x"}], "stream": True, "return_meta_info": True}, "return_meta_info"),
]


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [(COMPLETIONS, *case) for case in BAD_COMPLETIONS] + [(CHAT, *case) for case in BAD_CHATS],
    ids=lambda value: str(value)[:60],
)
def test_bad_values_are_refused_by_name(server: Running, path: str, body: dict[str, Any], word: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["object"], error["code"], error["param"]) == ("error", 400, None)
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert word in error["message"]
    assert server.post(path, {**body, "stream": True}).status_code == 400  # before the first event


def test_bodies_must_be_json(server: Running) -> None:
    for path in (COMPLETIONS, CHAT):
        for headers, content in (({"Content-Type": "text/plain"}, b"{}"), ({"Content-Type": "application/json"}, b"{")):
            response = server.http.post(path, content=content, headers=headers)
            assert response.status_code == 400
            assert response.json()["type"] == "Bad Request"
    good = server.http.post(
        COMPLETIONS, content=b'{"prompt": "SAY:a"}', headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert good.status_code == 200


def test_models(server: Running) -> None:
    card = server.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("fake-model", 4096)
    assert server.http.get("/v1/models/fake-model").json() == card
    missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_official_client(server: Running) -> None:
    client = openai.Client(api_key="EMPTY", base_url=server.url + "/v1")
    assert [model.id for model in client.models.list()] == ["fake-model"]
    chat = client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "SAY:hey"}], logprobs=True, top_logprobs=1, seed=3
    )
    assert chat.choices[0].message.content == "hey"
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content[0].bytes == [ord("h")]  # type: ignore[index]
    stream = client.chat.completions.create(
        model="x",
        messages=[{"role": "user", "content": "SAY:hey"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "hey"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 4
    completion = client.completions.create(
        model="x", prompt=[[ord("a")], [ord("b")]], max_tokens=1, logprobs=1, echo=True
    )
    assert [c.index for c in completion.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=21
        )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": [99999]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
    ],
)
def test_chat_refusals_name_fields_of_chat(server: Running, body: dict[str, Any], field: str) -> None:
    response = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], **body})
    assert response.status_code == 400
    assert response.json()["message"].startswith(f"{field}:")


def test_chat_input_ids_bypass_the_template(server: Running) -> None:
    ids = [START, *TOKENIZER.encode("SAY:t")]
    answer = ask(
        server,
        CHAT,
        messages=[{"role": "user", "content": "x"}],
        input_ids=ids,
        return_token_ids=True,
        return_meta_info=True,
    )
    assert answer["choices"][0]["prompt_token_ids"] == ids
    assert answer["choices"][0]["meta_info"]["prompt_tokens"] == len(ids)
