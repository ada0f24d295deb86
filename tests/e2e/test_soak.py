"""Thousands of mixed short requests under page pressure: no 5xx, pages balance, and sampled answers hold to the float.

EXACTSPEC_SOAK sets the number of requests (default 400; 10000 for the full soak), EXACTSPEC_SOAK_FIRST the first one.
Every answer is checked as it comes (soak_traffic.check). Afterwards 2% of them (EXACTSPEC_SOAK_SHARE), streamed,
aborted and abandoned ones included, are asked for again, alone and in one piece: the same text, tokens and logprobs;
and where these are raw, their tokens are scored as a prompt: the same floats.
"""

from __future__ import annotations

import collections
import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serving import Running, running_server
from soak_traffic import Choice, HungUpError, Job, check, make_job, read, send

pytestmark = [pytest.mark.model, pytest.mark.long]

FIRST = int(os.environ.get("EXACTSPEC_SOAK_FIRST", "0"))
COUNT = int(os.environ.get("EXACTSPEC_SOAK", "400"))
SHARE = float(os.environ.get("EXACTSPEC_SOAK_SHARE", "0.02"))
FLAGS = (
    "--draft", "dspark", "--max-total-tokens", "512", "--context-length", "512", "--max-running-requests", "16",
    "--enable-return-hidden-states",
)  # fmt: skip


class Soak:
    """What the clients share."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.lock = threading.Lock()
        self.answers: list[tuple[Job, list[Choice]]] = []
        self.problems: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.in_flight: set[str] = set()
        self.aborted: set[str] = set()
        self.began = time.monotonic()

    def one(self, number: int) -> None:
        job = make_job(number)
        try:
            self._run(job)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            with self.lock:
                self.problems.append(f"{number} {job.path}: {type(error).__name__} {error} {job.body}"[:1500])
        with self.lock:
            self.counts["requests"] += 1
            if self.counts["requests"] % 250 == 0:
                spent = time.monotonic() - self.began
                print(f"{spent:6.0f} s {dict(self.counts)} {len(self.problems)} problems", flush=True)

    def _run(self, job: Job) -> None:
        if job.path == "/pause":
            self.server.post("/pause_generation", mode="in_place")
            time.sleep(0.05)
            self.server.post("/continue_generation")
            return
        if job.generates and job.number % 40 == 7:
            self._abort_somebody(random.Random(job.number))
        with self.lock:
            self.in_flight.add(job.rid)
            self.counts[job.path] += 1
        try:
            status, events = send(self.server.url, job)
        except HungUpError:
            self.counts["hung up"] += 1
            return
        finally:
            with self.lock:
                self.in_flight.discard(job.rid)
        wanted = (200, 400) if job.path == "/flush_cache" else (job.status,)
        assert status in wanted, f"status {status}: {events}"
        if job.generates:
            choices = read(job, events)
            check(job, choices, aborted=job.rid in self.aborted, whole=job.events is None)
            with self.lock:
                self.answers.append((job, choices))
                self.counts["streamed"] += job.streams
                self.counts["tokens"] += sum(len(choice.ids or choice.logprobs) for choice in choices)
                self.counts["aborted"] += any(choice.finish == "abort" for choice in choices)
                self.counts["left early"] += job.events is not None

    def _abort_somebody(self, rng: random.Random) -> None:
        time.sleep(rng.uniform(0, 0.3))
        with self.lock:
            if not self.in_flight:
                return
            rid = rng.choice(sorted(self.in_flight))
            self.aborted.add(rid)
        self.server.http.post("/abort_request", json={"rid": rid})


# ---- afterwards --------------------------------------------------------------------------------------


def ask_again(server: Running, job: Job, before: list[Choice]) -> int:
    """Alone and in one piece; the values that were found equal. What was cut short must be a beginning of the whole."""
    assert job.body is not None
    body = job.body | {"stream": False, "rid": None, "return_token_ids": True, "incremental_stream": None}
    again = Job(job.number, job.path, body, extra=job.extra)
    status, events = send(server.url, again)
    assert status == 200, events
    compared = 0
    for number, (old, new) in enumerate(zip(before, read(again, events), strict=False)):
        if old.finish in ("stop", "length"):
            old.ids = new.ids if old.ids is None else old.ids
            _drop_cached_rows(old, new)
            assert old == new, f"{job}\n{old}\n{new}"
        assert new.text.startswith(old.text), f"{job}\n{old}\n{new}"
        assert new.logprobs[: len(old.logprobs)] == old.logprobs, f"{job}\n{old}\n{new}"
        compared += len(old.logprobs)
        if _kind(job) == "raw" and not body.get("echo") and new.ids:
            compared += score(server, job, number, old, new.ids)
    return compared


def _drop_cached_rows(old: Choice, new: Choice) -> None:
    """The prompt's block of hidden states lacks the rows that came from the cache: what both have is compared."""
    if old.hidden and new.hidden:
        rows = min(len(old.hidden[0]), len(new.hidden[0]))
        assert rows > 0
        for choice in (old, new):
            choice.hidden = [choice.hidden[0][-rows:], *choice.hidden[1:]]


def _kind(job: Job) -> str:
    assert job.body is not None
    return job.body["logprobs_kind"] or "raw"  # /generate always says


def score(server: Running, job: Job, number: int, old: Choice, ids: list[int]) -> int:
    """The tokens as a prompt: the same floats."""
    assert job.body is not None
    prompt = _prompt_ids(server, job, number)
    count = min(len(old.logprobs), len(ids))
    native = job.path == "/generate"
    scored = server.post(
        "/generate", input_ids=prompt + ids[:count], return_logprob=True, logprob_start_len=0,
        top_logprobs_num=job.body["top_logprobs_num"] if native else 0,
        token_ids_logprob=job.body["token_ids_logprob"] if native else None, sampling_params={"max_new_tokens": 0},
    )["meta_info"]  # fmt: skip
    lists = [scored.get(name) for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")]
    truth = list(zip(*(entry[len(prompt) :] for entry in lists if entry is not None), strict=True))
    got: list[Any] = old.logprobs[:count]
    if not native:
        truth = [entry[0][0] for entry in truth]
        got = [entry["logprob"] if isinstance(entry, dict) else entry[1] for entry in got]
        truth = truth[: len(got)]
    assert truth == got, f"{job}\n{truth}\n{got}"
    return len(got)


def _prompt_ids(server: Running, job: Job, number: int) -> list[int]:
    assert job.body is not None
    if "messages" in job.body:
        return server.post("/tokenize", messages=job.body["messages"])["tokens"]
    prompt = job.body.get("text") or job.body.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[number // job.params.get("n", 1)]
    return server.post("/tokenize", prompt=prompt)["tokens"]


def counter(server: Running, name: str) -> float:
    text = server.http.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def live_state(server: Running) -> dict[str, Any]:
    return server.http.get("/server_info").json()["internal_states"][0]


def check_idle_and_balanced(server: Running) -> None:
    deadline = time.monotonic() + 60
    while True:
        time.sleep(0.7)
        state = live_state(server)
        if state["num_running"] == state["num_waiting"] == 0 or time.monotonic() > deadline:
            break
    assert (state["num_running"], state["num_waiting"]) == (0, 0)
    assert state["free_pages"] + state["cached_pages"] == state["num_pages"]
    assert server.http.post("/flush_cache?timeout=10").status_code == 200
    state = live_state(server)
    assert state["free_pages"] == state["num_pages"]


@pytest.mark.timeout(7200)
def test_soak() -> None:
    with running_server(*FLAGS) as server:
        soak = Soak(server)
        with ThreadPoolExecutor(24) as pool:
            list(pool.map(soak.one, range(FIRST, FIRST + COUNT)))
        figures = dict(soak.counts) | {
            "seconds": round(time.monotonic() - soak.began),
            "retractions": counter(server, "exactspec_num_retractions_total"),
            "accept length": live_state(server).get("avg_spec_accept_length"),
        }
        print(json.dumps(figures), flush=True)
        assert not soak.problems, f"{len(soak.problems)} problems, among them:\n" + "\n".join(soak.problems[:5])
        check_idle_and_balanced(server)
        candidates = [(job, choices) for job, choices in soak.answers if any(choice.logprobs for choice in choices)]
        chosen = random.Random(0).sample(candidates, min(len(candidates), max(20, round(COUNT * SHARE))))
        compared, different = 0, []
        for job, choices in chosen:
            try:
                compared += ask_again(server, job, choices)
            except AssertionError as error:
                different.append(f"{job.number} {str(error)[:1500]}")
        print(f"{len(chosen)} answers asked for again: {compared} values equal, {len(different)} answers differ")
        assert not different, "\n".join(different[:5])
        check_idle_and_balanced(server)
        info = server.http.get("/server_info").json()
        assert (info["status"], info["num_restarts"]) == ("ready", 0)
        assert figures["retractions"] > 0 or COUNT < 400, "there was no page pressure"
