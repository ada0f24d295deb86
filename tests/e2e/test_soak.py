"""Thousands of mixed short requests: no 5xx, pages balance, and sampled answers rescore to the same floats.

EXACTSPEC_SOAK sets the number of requests (default 400; 10000 for the full soak).
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Running, running_server

pytestmark = [pytest.mark.model, pytest.mark.long]

COUNT = int(os.environ.get("EXACTSPEC_SOAK", "400"))
TEXTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "List three colours:", "Q: 2 + 2?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 12, "naïve café 😀",
]  # fmt: skip
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = rng.choice(TEXTS) + rng.choice(["", " ", str(rng.randint(0, 9))])
    params: dict[str, Any] = {"max_new_tokens": rng.choice([0, 1, 2, 8, 24]), "temperature": rng.choice([0, 0.7, 1.0])}
    extra = rng.choice(["", "", "stop", "regex", "json_schema", "penalty", "filters", "n", "bias", "min"])
    params |= {
        "": {}, "stop": {"stop": [".", "\n", "the"], "stop_regex": "[,;]"}, "regex": {"regex": "[a-z]{2,6}( [a-z]+)?"},
        "json_schema": {"json_schema": SCHEMA}, "penalty": {"frequency_penalty": 0.5, "presence_penalty": 0.3},
        "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, "n": {"n": 3}, "bias": {"logit_bias": {"260": -5}},
        "min": {"min_new_tokens": min(4, params["max_new_tokens"])},
    }[extra]  # fmt: skip
    route = rng.choice(["/generate", "/generate", "/v1/completions", "/v1/chat/completions"])
    if route == "/generate":
        return route, {
            "text": text, "sampling_params": params, "stream": rng.random() < 0.3, "return_logprob": True,
            "logprob_start_len": rng.choice([-1, 0]), "top_logprobs_num": rng.choice([0, 3]), "logprobs_kind": "raw",
            "return_prompt_token_ids": True,
        }  # fmt: skip
    params["max_tokens"] = max(1, params.pop("max_new_tokens"))
    params["min_tokens"] = params.pop("min_new_tokens", 0)
    if "json_schema" in params:
        params["response_format"] = {"type": "json_object"}
        del params["json_schema"]
    body = {"model": "default", "stream": rng.random() < 0.3, **params}
    if route == "/v1/completions":
        return route, body | {"prompt": text, "logprobs": rng.choice([None, 0, 2]), "echo": rng.random() < 0.3}
    return route, body | {"messages": [{"role": "user", "content": text}], "logprobs": True}


def one(server: Running, number: int, answers: list[Any], problems: list[str], lock: threading.Lock) -> None:
    rng = random.Random(number)
    route, body = random_request(rng)
    impatient = rng.random() < 0.05
    try:
        response = httpx.post(server.url + route, json=body, timeout=rng.uniform(0.01, 0.3) if impatient else 600)
    except httpx.TimeoutException:
        if not impatient:
            problems.append(f"{number}: no answer")
        return
    with lock:
        if response.status_code != 200:
            problems.append(f"{number}: {response.status_code} {response.text[:200]} {body}")
        elif route == "/generate" and not body["stream"]:
            result = response.json()
            answers += result if isinstance(result, list) else [result]
    if rng.random() < 0.01:
        server.http.post("/abort_request", json={"rid": rng.choice("0123456789abcdef")})


def rescore(server: Running, answer: dict[str, Any]) -> None:
    meta = answer["meta_info"]
    scored = server.post(
        "/generate", input_ids=answer["prompt_token_ids"] + answer["output_ids"], return_logprob=True,
        logprob_start_len=0, sampling_params={"max_new_tokens": 0},
    )["meta_info"]["input_token_logprobs"]  # fmt: skip
    assert scored[meta["prompt_tokens"] :] == meta["output_token_logprobs"]


def test_soak() -> None:
    flags = (
        "--draft",
        "dspark",
        "--max-total-tokens",
        "8192",
        "--max-running-requests",
        "24",
        "--context-length",
        "2048",
    )
    answers: list[Any] = []
    problems: list[str] = []
    lock = threading.Lock()
    with running_server(*flags) as server, ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda number: one(server, number, answers, problems, lock), range(COUNT)))
        assert not problems, problems[:5]
        generated = [a for a in answers if a["output_ids"] and a["meta_info"]["finish_reason"]["type"] != "abort"]
        for answer in random.Random(0).sample(generated, max(20, len(generated) // 50)):
            rescore(server, answer)
        deadline = time.monotonic() + 20
        while True:
            time.sleep(0.7)
            state = server.http.get("/server_info").json()["internal_states"][0]
            if state["num_running"] == state["num_waiting"] == 0 or time.monotonic() > deadline:
                break
        assert (state["num_running"], state["num_waiting"]) == (0, 0)
        assert state["free_pages"] + state["cached_pages"] == state["num_pages"]
        assert server.http.post("/flush_cache?timeout=10").status_code == 200
        state = server.http.get("/server_info").json()["internal_states"][0]
        assert state["free_pages"] == state["num_pages"]
