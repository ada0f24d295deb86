"""Every route over a real engine, its drafts right, wrong and beyond the end: what a client reads is the naive truth,
float by float, streamed or not, among unlike neighbours."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from serving import Running, running_server
from tiny_engine import FACTORY, make_target

from exactspec.grammar import GrammarCompiler, needs_grammar
from exactspec.naive import LOGPROB_FLOOR
from exactspec.sampling.seeds import sample_seed
from exactspec.types import Request, SamplingParams, TokenLogprob

# isort: split
from fakes import EOS_ID, TINY_VOCAB  # tiny_engine has found their folder
from random_traffic import make_requests
from scripted import request
from truth import Truth, truth_of

TARGET = make_target()
GRAMMARS = GrammarCompiler(TARGET.tokenizer, TARGET.config.vocab_size, TARGET.eos_ids)
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
SHARED = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos", "no_stop_trim", "skip_special_tokens", "regex", "ebnf",
)  # fmt: skip
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    folder = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        with running_server(*FACTORY, "--draft", "ngram", "--enable-cache-report", model="tiny") as running:
            yield running


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def truth_for(one: Request) -> Truth:
    return truth_of(TARGET, one, GRAMMARS.compile(one.params) if needs_grammar(one.params) else None)


# ---- requests as bodies, and the request that a body stands for ------------------------------------------


def shared_fields(params: SamplingParams) -> dict[str, Any]:
    body = {name: getattr(params, name) for name in SHARED} | {
        "stop": list(params.stop or ()), "stop_regex": list(params.stop_regex or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "logit_bias": {str(k): v for k, v in (params.logit_bias or {}).items()},
    }  # fmt: skip
    return body


def native(one: Request) -> tuple[dict[str, Any], Request]:
    params = one.params
    asks = params.logprobs is not None
    start = params.prompt_logprob_start if asks and params.prompt_logprobs is not None else -1
    sampling = shared_fields(params) | {"json_schema": params.json_schema, "sampling_seed": one.seed}
    sampling |= {"max_new_tokens": params.max_new_tokens, "min_new_tokens": params.min_new_tokens}
    body = {
        "input_ids": list(one.prompt_ids), "sampling_params": sampling, "return_logprob": asks,
        "top_logprobs_num": params.logprobs or 0, "token_ids_logprob": list(params.logprob_token_ids or ()),
        "logprob_start_len": start, "logprobs_kind": params.logprobs_kind, "max_drafts": one.max_drafts,
        "return_sampling_mask": one.sampling_mask is not None, "sampling_logprobs_mode": one.sampling_mask,
    }  # fmt: skip
    scored = {"prompt_logprobs": params.logprobs if start >= 0 else None, "prompt_logprob_start": max(start, 0)}
    return body, replace(one, params=replace(params, **scored))


def completion(one: Request, echo: bool) -> tuple[dict[str, Any], Request]:
    params, room = one.params, TARGET.config.context_length - len(one.prompt_ids)
    if params.max_new_tokens is None:  # here no limit means 16
        params = replace(params, max_new_tokens=room)
    if params.max_new_tokens is None:  # here that means 16, not all that the context leaves
        params = replace(params, max_new_tokens=TARGET.config.context_length - len(one.prompt_ids))
    body = shared_fields(params) | {
        "prompt": list(one.prompt_ids), "max_tokens": params.max_new_tokens, "min_tokens": params.min_new_tokens,
        "seed": one.seed, "logprobs": params.logprobs, "echo": echo, "logprobs_kind": params.logprobs_kind,
        "return_token_ids": True, "json_schema": params.json_schema, "max_drafts": one.max_drafts,
    }  # fmt: skip
    scored = params.logprobs if echo and params.logprobs else None
    changes = {"prompt_logprobs": scored, "prompt_logprob_start": 0, "logprob_token_ids": None}
    return body, replace(one, params=replace(params, **changes))


def chat(one: Request) -> tuple[dict[str, Any], Request]:
    params = replace(
        one.params, max_new_tokens=max(1, one.params.max_new_tokens or 1), prompt_logprobs=None, logprob_token_ids=None,
        logprobs=None if one.params.logprobs is None else min(20, one.params.logprobs),
    )  # fmt: skip
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(params.json_schema or "{}")}}
    body = shared_fields(params) | {
        "messages": [{"role": "user", "content": "x"}], "input_ids": list(one.prompt_ids), "seed": one.seed,
        "max_completion_tokens": params.max_new_tokens, "min_tokens": params.min_new_tokens,
        "logprobs": params.logprobs is not None, "top_logprobs": params.logprobs, "logprobs_kind": params.logprobs_kind,
        "response_format": schema if params.json_schema else None, "max_drafts": one.max_drafts,
    }  # fmt: skip
    return body, replace(one, params=params)


# ---- sending and reading ---------------------------------------------------------------------------------


@dataclass
class Reply:
    """What a client puts together of an answer, in one shape for all routes, streamed or not."""

    text: str = ""
    ids: list[int] | None = None
    finish: tuple[Any, Any] = (None, None)
    lists: dict[str, list[Any]] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)

    def extend(self, lists: dict[str, Any] | None) -> None:
        for name, part in (lists or {}).items():
            self.lists.setdefault(name, []).extend(part or [])


def post(server: Running, path: str, body: dict[str, Any]) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return strict(response.text)


def events(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [strict(line) for line in lines]


def ask_native(server: Running, body: dict[str, Any], how: str) -> Reply:
    """how: whole, cumulative, or pieces."""
    pieces = [post(server, GENERATE, body)] if how == "whole" else events(
        server, GENERATE, body | {"incremental_stream": how == "pieces"}
    )  # fmt: skip
    reply = Reply(ids=[])
    for piece in pieces:
        meta = piece["meta_info"]
        if how == "cumulative":
            assert piece["text"].startswith(reply.text)
            reply = Reply(ids=[])
        reply.text += piece["text"]
        reply.ids += piece["output_ids"]
        outputs = {k: v for k, v in meta.items() if k.startswith("output_") and not k.endswith("_length")}
        reply.extend(outputs)
        reply.lists |= {k: v for k, v in meta.items() if k.startswith("input_")}
        finish = meta["finish_reason"] or {}
        reply.finish = finish.get("type"), finish.get("matched")
        reply.usage = meta["prompt_tokens"], meta["completion_tokens"]
    return reply


def ask_openai(server: Running, path: str, body: dict[str, Any], streamed: bool) -> list[Reply]:
    answers = [post(server, path, body)]
    if streamed:
        body = {k: v for k, v in body.items() if path == COMPLETIONS or k != "return_token_ids"}
        answers = events(server, path, body | {"stream_options": {"include_usage": True}})
    replies: dict[int, Reply] = {}
    for answer in answers:
        for choice in answer["choices"]:
            reply = replies.setdefault(choice["index"], Reply())
            assert reply.finish == (None, None), "a piece after the end"
            said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
            reply.text += said.get("content") or ""
            reply.ids = choice.get("token_ids", reply.ids)
            reply.extend(choice["logprobs"])
            reply.finish = choice["finish_reason"], choice["matched_stop"]
        if answer["usage"] is not None:
            counts = answer["usage"]
            assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
            assert counts["prompt_tokens_details"]["cached_tokens"] <= counts["prompt_tokens"]
            for reply in replies.values():
                reply.usage = counts["prompt_tokens"], counts["completion_tokens"]
    return [replies[index] for index in sorted(replies)]


# ---- the truth in the words of a route -------------------------------------------------------------------


def triples(pairs: Any) -> list[list[Any]]:
    return [[value, token_id, None] for token_id, value in pairs]


def native_lists(entries: list[TokenLogprob], side: str, params: SamplingParams) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {f"{side}_token_logprobs": triples((e.token_id, e.logprob) for e in entries)}
    if params.logprobs:
        lists[f"{side}_top_logprobs"] = [triples(e.top) for e in entries]
    if params.logprob_token_ids:
        lists[f"{side}_token_ids_logprobs"] = [triples(e.chosen) for e in entries]
    if side == "input" and entries:  # whatever the start, by the API's convention
        lists["input_token_logprobs"][0][0] = None
        for name in set(lists) - {"input_token_logprobs"}:
            lists[name][0] = None
    return lists


def check_native(one: Request, truth: Truth, reply: Reply) -> None:
    params = one.params
    assert (reply.text, reply.ids) == (truth.text, truth.token_ids), one
    matched = truth.finish.matched if truth.finish.kind == "stop" else None
    assert reply.finish == (truth.finish.kind, matched)
    assert reply.usage == (len(one.prompt_ids), len(truth.token_ids))
    wanted: dict[str, list[Any]] = {}
    if params.logprobs is not None:
        entries = truth.logprobs if truth.after is None else [truth.after]
        wanted = native_lists(entries, "output", params) | native_lists(truth.prompt_logprobs or [], "input", params)
    masks = {k: reply.lists.pop(k) for k in list(reply.lists) if "sampling" in k}
    assert reply.lists == wanted, one
    if one.sampling_mask is not None:
        assert masks["output_token_sampling_mask"] == truth.supports, one
        assert len(masks["output_token_sampling_logprobs"]) == len(truth.token_ids)


def check_completion(one: Request, truth: Truth, reply: Reply, echo: bool) -> None:
    shown = TARGET.tokenizer.decode(list(one.prompt_ids)) if echo else ""
    assert (reply.text, reply.ids) == (shown + truth.text, truth.token_ids), one
    assert reply.finish == (truth.finish.kind, truth.finish.matched)
    assert reply.usage == (len(one.prompt_ids), len(truth.token_ids))
    if one.params.logprobs is None:
        assert not reply.lists
        return
    entries = [*(truth.prompt_logprobs or []), *truth.logprobs]
    assert reply.lists["token_logprobs"] == [entry.logprob for entry in entries], one
    assert len(reply.lists["tokens"]) == len(reply.lists["text_offset"]) == len(entries)
    assert reply.lists["text_offset"] == sorted(reply.lists["text_offset"])
    for top, entry in zip(reply.lists["top_logprobs"], entries, strict=bool(one.params.logprobs)):
        listed = dict(entry.top) | ({} if entry.logprob is None else {entry.token_id: entry.logprob})
        assert (top is None) == (entry.logprob is None)
        assert sorted((top or {}).values()) == sorted(listed.values() if top else [])


def check_chat(one: Request, truth: Truth, reply: Reply) -> None:
    assert reply.text == truth.text, one
    assert reply.finish == (truth.finish.kind, truth.finish.matched)
    assert reply.usage == (len(one.prompt_ids), len(truth.token_ids))

    def said(token_id: int, value: float | None) -> dict[str, Any]:
        data = TARGET.tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": value}

    wanted = [
        said(e.token_id, e.logprob) | {"top_logprobs": [said(*pair) for pair in e.top]} for e in truth.logprobs or []
    ]
    assert reply.lists.get("content", []) == wanted, one


# ---- tests -----------------------------------------------------------------------------------------------


def ask_and_check(server: Running, number: int, one: Request) -> None:
    streamed = number % 2 == 1
    if number % 5 < 3:
        body, meant = native(one)
        check_native(meant, truth_for(meant), ask_native(server, body, ("whole", "cumulative", "pieces")[number % 3]))
    elif number % 5 == 3:
        echo = number % 4 < 2
        body, meant = completion(one, echo)
        (reply,) = ask_openai(server, COMPLETIONS, body, streamed)
        check_completion(meant, truth_for(meant), reply, echo)
    else:
        body, meant = chat(one)
        (reply,) = ask_openai(server, CHAT, body, streamed)
        check_chat(meant, truth_for(meant), reply)


def check_idle(server: Running) -> None:
    assert server.http.post("/flush_cache?timeout=10").status_code == 200
    state = server.http.get("/server_info").json()["internal_states"][0]
    assert (state["num_running"], state["num_waiting"]) == (0, 0)
    assert state["free_pages"] == state["num_pages"]


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_together(server, seed):
    """40 at once, a third of the pages that they would like to have."""
    requests = make_requests(random.Random(100 + seed), TARGET, 40)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda pair: ask_and_check(server, *pair), enumerate(requests)))
    check_idle(server)


@pytest.mark.parametrize("how", ["whole", "cumulative", "pieces"])
def test_samples_of_one_prompt(server, how):
    """n = 4, a stop string inside blocks: each sample is cut at its own place, and all are had again from the seed."""
    params = {"max_new_tokens": 20, "temperature": 1.0, "stop": ["e", "o", "a", " "], "logprobs": 2}
    body, meant = native(request("x", PROMPT, seed=5, **params))
    body["sampling_params"]["n"] = 4
    if how == "whole":
        answers = post(server, GENERATE, body)
        assert [a["output_ids"] for a in post(server, GENERATE, body)] == [a["output_ids"] for a in answers]
    else:
        got = events(server, GENERATE, body | {"incremental_stream": how == "pieces"})
        answers = [[e for e in got if e["index"] == index] for index in range(4)]
    truths = [truth_for(replace(meant, seed=sample_seed(5, index))) for index in range(4)]
    assert len({tuple(truth.token_ids) for truth in truths}) == 4
    for answer, truth in zip(answers, truths, strict=True):
        parts = [answer] if how == "whole" else answer if how == "pieces" else answer[-1:]
        assert [i for part in parts for i in part["output_ids"]] == truth.token_ids
        assert "".join(part["text"] for part in parts) == truth.text
        lists = [e for part in parts for e in part["meta_info"]["output_token_logprobs"]]
        assert lists == triples((e.token_id, e.logprob) for e in truth.logprobs)
        assert sum(1 for part in parts if part["meta_info"]["finish_reason"]) == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_scoring_without_generating(server, streamed, echo):
    """Two prompts, two samples each, no token: no draft either."""
    prompts = [PROMPT, [9, 80, 7, 7, 61, 200, 33]]
    body = {"prompt": prompts, "max_tokens": 0, "echo": echo, "logprobs": 1, "n": 2, "temperature": 0}
    before = drafted(server)
    replies = ask_openai(server, COMPLETIONS, body, streamed)
    assert len(replies) == 4
    for reply, ids in zip(replies, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        wanted = truth_for(request("x", ids, max_new_tokens=0, prompt_logprobs=1)).prompt_logprobs if echo else []
        assert reply.lists["token_logprobs"] == [entry.logprob for entry in wanted]
        assert reply.text == (TARGET.tokenizer.decode(ids) if echo else "")
        assert reply.finish == ("length", None)
        assert reply.usage[1] == 0
        assert [None if top is None else max(top.values()) for top in reply.lists["top_logprobs"]] == [
            entry.top[0][1] if entry.top else None for entry in wanted
        ]
    assert drafted(server) == before


def drafted(server: Running) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("exactspec_num_drafted"))


def test_a_segment_is_scored_on_top_of_the_cache(server):
    """A dialog's next turn, scored from its first token: that one's value is real, and the turns before are reused."""
    chance = random.Random(4)
    ids = [chance.randrange(256) for _ in range(40)]
    asked = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    for n in range(20, 30):
        post(server, GENERATE, {"input_ids": ids[:n], "sampling_params": asked})
        body = {
            "input_ids": ids, "sampling_params": asked, "return_logprob": True, "logprob_start_len": n,
            "top_logprobs_num": 2, "token_ids_logprob": [3, 17, 3],
        }  # fmt: skip
        meta = post(server, GENERATE, body)["meta_info"]
        assert meta["cached_tokens"] >= (n - 1) // 4 * 4
        params = {"logprobs": 2, "prompt_logprobs": 2, "prompt_logprob_start": n, "logprob_token_ids": [3, 17, 3]}
        one = request("x", ids, **asked, **params)
        wanted = native_lists(truth_for(one).prompt_logprobs, "input", one.params)
        assert {name: meta[name] for name in wanted} == wanted
    for start, count in ((-1, 0), (39, 1), (40, 0)):
        meta = post(server, GENERATE, body | {"logprob_start_len": start})["meta_info"]
        assert len(meta["input_token_logprobs"]) == count
    refused = server.http.post(GENERATE, json=body | {"logprob_start_len": 41})
    assert (refused.status_code, "logprob_start_len" in refused.text) == (400, True)


@pytest.mark.parametrize("kind", ["raw", "scaled", "processed"])
@pytest.mark.parametrize("streamed", [False, True])
def test_impossible_tokens_never_break_the_json(server, kind, streamed):
    """top_k = 1, a grammar of one word and a bias of -100: raw values are finite, else one floor stands for them."""
    cases = [
        {"top_k": 1, "temperature": 1.0}, {"regex": "xyzzy", "temperature": 1.0},
        {"logit_bias": {truth_for(request("x", PROMPT, max_new_tokens=1, temperature=0)).token_ids[0]: -100.0}},
    ]  # fmt: skip
    for case in cases:
        one = request("x", PROMPT, seed=3, max_new_tokens=6, logprobs=20, logprobs_kind=kind, **case)
        body, meant = native(one)
        reply = ask_native(server, body, "cumulative" if streamed else "whole")
        check_native(meant, truth_for(meant), reply)
        values = [value for row in reply.lists["output_top_logprobs"] for value, _, _ in row]
        assert len(values) == 20 * len(reply.ids)
        impossible = [value for value in values if value < -1e6]
        assert set(impossible) <= {LOGPROB_FLOOR}
        assert bool(impossible) == ((kind == "processed" and "top_k" in case) or (kind != "raw" and "regex" in case))
        assert min(value for value, _, _ in reply.lists["output_token_logprobs"]) > -1e6
        for path, (body, meant) in ((COMPLETIONS, completion(one, True)), (CHAT, chat(one))):
            (reply,) = ask_openai(server, path, body, streamed)
            check = check_chat if path == CHAT else lambda *args: check_completion(*args, True)
            check(meant, truth_for(meant), reply)


def test_the_option_matrix(server):
    """What a client may ask of each route, and how many entries it gets."""
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 1, "ignore_eos": True}
    for asked, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 1), ({"top_logprobs": 20}, 20)):
        content = post(server, CHAT, talk | {"logprobs": True} | asked)["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [count, count]
        for entry, (a, b) in itertools.product(content, [(0, 1), (3, 4), (18, 19)][: count // 7 + 1]):
            values = [other["logprob"] for other in entry["top_logprobs"]]
            assert not values[b:] or values[a] >= values[b]
            assert not values or values[0] >= entry["logprob"]
    assert post(server, CHAT, talk)["choices"][0]["logprobs"] is None
    for wrong in ({"logprobs": True, "top_logprobs": 21}, {"logprobs": False, "top_logprobs": 3}, {"top_logprobs": 3}):
        response = server.http.post(CHAT, json=talk | wrong)
        assert (response.status_code, "top_logprobs" in response.text) == (400, True)
    text = {"prompt": PROMPT, "max_tokens": 2, "seed": 1, "ignore_eos": True}
    assert post(server, COMPLETIONS, text)["choices"][0]["logprobs"] is None
    for k in (0, 1, 5):
        lists = post(server, COMPLETIONS, text | {"logprobs": k})["choices"][0]["logprobs"]
        assert len(lists["token_logprobs"]) == 2
        assert [k <= len(top) <= k + 1 for top in lists["top_logprobs"]] == [True, True][: 2 * (k > 0)]
    response = server.http.post(COMPLETIONS, json=text | {"logprobs": -1})
    assert (response.status_code, "logprobs" in response.text) == (400, True)
    base = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    assert "output_token_ids_logprobs" not in post(server, GENERATE, base | {"token_ids_logprob": []})["meta_info"]
    response = server.http.post(GENERATE, json=base | {"token_ids_logprob": [3, TINY_VOCAB]})
    assert (response.status_code, "token_ids_logprob" in response.text) == (400, True)


@pytest.mark.parametrize("position", range(9))
def test_counts_are_those_of_the_tokens_returned(server, position):
    """An end at every place of a block of accepted drafts. Nothing that is counted is more than what was sent."""
    free = truth_for(request("x", PROMPT, max_new_tokens=20, temperature=0, ignore_eos=True)).token_ids
    sampling = {"max_new_tokens": 20, "temperature": 0, "stop_token_ids": [free[position]], "sampling_seed": 0}
    answer = post(server, GENERATE, {"input_ids": PROMPT, "sampling_params": sampling})
    meta, count = answer["meta_info"], free.index(free[position]) + 1
    assert (meta["completion_tokens"], len(answer["output_ids"])) == (count, count)
    assert meta["finish_reason"] == {"type": "stop", "matched": free[position]}
    assert meta["cached_tokens"] <= meta["prompt_tokens"] == len(PROMPT)
    assert meta.get("spec_num_correct_drafts", 0) <= max(count - 1, 0)
    histogram = meta.get("spec_correct_drafts_histogram", [])
    assert (count > 1) == bool(histogram)
    assert sum(number * rounds for number, rounds in enumerate(histogram)) <= count


BAD = [
    ({"sampling_params": {"regex": "(["}}, "regex"), ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"return_logprob": True, "token_ids_logprob": [TINY_VOCAB]}, "token_ids_logprob"),
    ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ({"sampling_params": {"max_new_tokens": 3, "min_new_tokens": 4}}, "min_new_tokens"),
]  # fmt: skip


def test_askers_of_all_kinds_and_refusals_between_them(server):
    """60 at once. Who asked for logprobs has them, who cannot be served is told why, and the next request is served."""
    kinds = [
        {}, {"return_logprob": True}, {"return_logprob": True, "top_logprobs_num": 5},
        {"return_logprob": True, "logprob_start_len": 0}, {"return_logprob": True, "token_ids_logprob": [3, 17, 250]},
    ]  # fmt: skip

    def ask(number: int) -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
        if number % 3 == 2:
            wrong, name = BAD[number % len(BAD)]
            response = server.http.post(GENERATE, json=body | wrong)
            assert (response.status_code, name in response.text) == (400, True)
            return
        asked = kinds[number % len(kinds)]
        meta = post(server, GENERATE, body | asked)["meta_info"]
        lists = {name: len(rows) for name, rows in meta.items() if name.endswith("_logprobs") and rows}
        wanted = {"output_token_logprobs": 9} if asked else {}
        wanted |= {"output_top_logprobs": 9} if "top_logprobs_num" in asked else {}
        wanted |= {"output_token_ids_logprobs": 9} if "token_ids_logprob" in asked else {}
        wanted |= {"input_token_logprobs": len(PROMPT)} if "logprob_start_len" in asked else {}
        assert lists == wanted

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(ask, range(60)))
    check_idle(server)


def test_whoever_leaves_and_whenever_all_memory_comes_back(server):
    """Ends of every kind, streams closed after a few events, aborts: the pages add up, and nobody else notices."""

    def leave(number: int) -> None:
        sampling = {
            "max_new_tokens": 60,
            "temperature": number % 2,
            "ignore_eos": number % 3 > 0,
            "stop": [["e"], []][number % 2],
        }
        body = {
            "input_ids": [*PROMPT, number % 7],
            "sampling_params": sampling,
            "rid": f"leaver-{number}",
            "stream": True,
        }
        kind = number % 4
        with server.http.stream("POST", GENERATE, json=body) as response:
            for count, _ in enumerate(response.iter_lines()):
                if kind == 1 and count >= number % 9:
                    return
                if kind == 2 and count == number % 9:
                    server.http.post("/abort_request", json={"rid": body["rid"]})

    def stay(number: int) -> None:
        one = request("x", [*PROMPT, number % 7], seed=number, max_new_tokens=20, temperature=1.0, logprobs=1)
        body, meant = native(one)
        check_native(meant, truth_for(meant), ask_native(server, body, "pieces"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: (stay if number % 5 == 0 else leave)(number), range(100)))
    check_idle(server)


def test_seeds(server):
    """All 64-bit ones are seeds of their own; others are refused; without one samples are independent."""
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    texts = []
    for seed in (0, 2**31, 2**63 - 1, -1, *[None] * 12):
        answer = post(server, GENERATE, {"input_ids": PROMPT, "sampling_params": sampling | {"sampling_seed": seed}})
        reported = {"sampling_seed": answer["meta_info"]["sampling_seed"]}
        again = post(server, GENERATE, {"input_ids": PROMPT, "sampling_params": sampling | reported})
        assert again["output_ids"] == answer["output_ids"]
        texts.append(tuple(answer["output_ids"]))
    assert len(set(texts)) == 16
    for seed in (2**63, -(2**63) - 1, 1.5, "x"):
        body = {"input_ids": PROMPT, "sampling_params": sampling | {"sampling_seed": seed}}
        response = server.http.post(GENERATE, json=body)
        assert (response.status_code, "sampling_seed" in response.text) == (400, True)
    check_idle(server)
    assert EOS_ID not in texts[0]
