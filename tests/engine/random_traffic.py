"""Random requests with everything that can be asked for, and random ways of running them. A seed is an episode."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes import EOS_ID, TINY_VOCAB
from flights import launching
from scripted import Gathered, Script, ScriptedDrafter, make_engine, request

from exactspec.bench.exactness import VerifyInTurn
from exactspec.draft.base import Drafter
from exactspec.engine.engine import Engine
from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import StepCosts
from exactspec.engine.verify_policy import VerifyByConfidence
from exactspec.errors import RequestError
from exactspec.model.target import TargetModel
from exactspec.sampling.seeds import sample_seed
from exactspec.text.stream import TextStream
from exactspec.types import Request
from exactspec.verify.sps import SpsKey, SpsTable

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
GRAMMARS: list[dict[str, str]] = [
    {"regex": "[a-c]{1,4}"}, {"regex": "(ab?c)+"}, {"regex": "(.|\n){0,6}"}, {"regex": "x"}, {"regex": "[é€]{2,5}z?"},
    {"json_schema": json.dumps(SCHEMA)}, {"ebnf": 'root ::= "yes" | "no" | "may" "be"+'},
]  # fmt: skip
# field -> (how often it is set, its values)
FIELDS: dict[str, tuple[float, Sequence[Any]]] = {
    "ignore_eos": (0.3, [True]), "top_k": (0.2, [1, 2, 5, 40, 1000]), "top_p": (0.2, [1e-4, 0.3, 0.9, 0.999]),
    "min_p": (0.15, [1.0, 0.3, 0.01]), "frequency_penalty": (0.2, [0.5, -0.7, 2.0]),
    "presence_penalty": (0.15, [0.5, -1.5]), "repetition_penalty": (0.15, [1.3, 0.6]),
    "logprobs": (0.5, [0, 1, 3, 20, 65, TINY_VOCAB]), "prompt_logprobs": (0.35, [0, 1, 4, 70]),
    "logprob_token_ids": (0.3, [[7], [3, 250, 3], [0, 261]]), "stop_regex": (0.1, ["[a-f]", "[0-9]{2}", ".{9}"]),
    "no_stop_trim": (0.2, [True]), "skip_special_tokens": (0.3, [False]),
}  # fmt: skip
EXTRAS: dict[str, tuple[float, Sequence[Any]]] = {
    "return_hidden_states": (0.15, [True]), "sampling_mask": (0.15, ["selected", "support"]),
    "priority": (0.2, [-1, 1, 2]), "max_drafts": (0.15, [0, 1, 3]),
}  # fmt: skip


def _some(rng: random.Random, table: dict[str, tuple[float, Sequence[Any]]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, (often, values) in table.items() if rng.random() < often}


def _params(rng: random.Random, prompt: Sequence[int], tokens: Sequence[int], text: str) -> dict[str, Any]:
    """Parameters for a prompt whose greedy continuation is known, so that stops are met now and then."""
    limit = rng.choice([0, 1, 2, 3, 5, 8, 12, 20, 26])
    params = _some(rng, FIELDS) | {
        "max_new_tokens": limit, "temperature": rng.choice([0, 0, 0, 0.5, 1.0, 1.0, 1.7, 1e-7]),
        "logprobs_kind": rng.choice(["raw", "scaled", "processed"]),
        "prompt_logprob_start": rng.choice([0, 0, 1, len(prompt) // 2, len(prompt) - 1, len(prompt)]),
    }  # fmt: skip
    if rng.random() < 0.2:
        params["logit_bias"] = {
            rng.randrange(TINY_VOCAB): rng.choice([5.0, -100.0, 30.0, -2.5]) for _ in range(rng.randint(1, 4))
        } | ({EOS_ID: rng.choice([3.0, 6.0])} if rng.random() < 0.5 else {})
    if rng.random() < 0.2:
        params["min_new_tokens"] = rng.randint(0, limit)
    if rng.random() < 0.3:
        params["stop_token_ids"] = [*rng.choices(tokens, k=rng.randint(1, 3)), 119690]
    if rng.random() < 0.3:
        starts = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
        stops = [text[start : start + rng.randint(1, 3)] for start in starts]
        params["stop"] = [stop[:1] + "q" if rng.random() < 0.3 else stop for stop in stops]
    if rng.random() < 0.2:
        params |= rng.choice(GRAMMARS)
    return params


def make_requests(rng: random.Random, target: TargetModel, count: int) -> list[Request]:
    """Prompts share beginnings of all lengths; some come with n = 3, some go on to the end of the context."""
    system = [rng.randrange(256) for _ in range(rng.choice([0, 3, 8, 17, 33]))]
    probe = make_engine(ScriptedDrafter(lambda *_: [], 0), target=target)
    requests: list[Request] = []
    while len(requests) < count:
        prompt = system[: rng.randrange(len(system) + 1)]
        room, to_the_end = target.config.context_length - len(prompt), rng.random() < 0.05
        length = room - rng.randint(1, 12) if to_the_end else rng.choice([1, 2, 5, 9, 20])
        prompt += [rng.randrange(TINY_VOCAB) for _ in range(length)]
        shown = min(10, room - length)
        probe.add(request("probe", prompt, temperature=0.0, max_new_tokens=shown, ignore_eos=True))
        tokens = [i for _ in range(shown) for output in probe.step() for i in output.token_ids]
        params = _params(rng, prompt, tokens, target.tokenizer.decode(tokens) or "a")
        if to_the_end:
            params |= {"max_new_tokens": rng.choice([None, room - length]), "min_new_tokens": 0}
        extras, seed = _some(rng, EXTRAS), rng.choice([0, 1, -1, 2**63 - 1, rng.randrange(2**40)])
        for index in range(rng.choice([1, 1, 1, 3])):
            name = f"r{len(requests)}"
            requests.append(request(name, prompt, seed=sample_seed(seed, index), **params, **extras))
    return requests


def make_script(kind: str, truth: dict[str, Sequence[int]], vocab_size: int, rng: random.Random) -> Script:
    """Drafts of every quality; beyond the truth's end too, as a drafter that knows nothing of ends would."""

    def right(running: Any, done: int, room: int) -> list[int]:
        known = list(truth[running.request.request_id][done : done + room])
        return known + [rng.randrange(vocab_size) for _ in range(room - len(known))]

    def wrong(running: Any, done: int, room: int) -> list[int]:
        return [(token + 1) % vocab_size for token in right(running, done, room)]

    def sometimes(running: Any, done: int, room: int) -> list[int]:
        drafts = right(running, done, room)[: rng.randint(0, room)]
        return [(token + 1) % vocab_size if rng.random() < 0.25 else token for token in drafts]

    def repeat(running: Any, done: int, room: int) -> list[int]:
        return [running.token_ids[-1]] * room

    def ends(running: Any, done: int, room: int) -> list[int]:
        return [rng.choice([EOS_ID, rng.randrange(vocab_size)]) for _ in range(room)]

    scripts: dict[str, Script] = {
        "right": right,
        "wrong": wrong,
        "sometimes": sometimes,
        "repeat": repeat,
        "ends": ends,
    }
    return scripts.get(kind) or (lambda *args: rng.choice(list(scripts.values()))(*args))


@dataclass
class Run:
    """What came of the requests that an engine was given."""

    answers: dict[str, Gathered] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


def make_traffic_engine(
    rng: random.Random, target: TargetModel, drafter: Drafter, num_pages: int, page: int, acceptance: str = "coupled"
) -> Engine:
    overlap = rng.random() < 0.3
    engine = make_engine(
        drafter, target=target, num_pages=num_pages, page_size=page, overlap=overlap, hidden_states=True,
        acceptance=acceptance, prefix_cache=rng.random() < 0.8, prefill_chunk=rng.choice([1, 3, 7, 16, 512]),
        max_running_requests=rng.choice([1, 2, 4, 32]),
    )  # fmt: skip
    policy = rng.choice(["all", "turn", "confidence"])
    if policy == "turn":
        engine.runner.policy = VerifyInTurn()
        engine.runner.policy.needs_draft_probs = acceptance == "rejection"
    if policy == "confidence" and drafter.gamma:
        seconds = rng.choice([(0.01, 0.0101), (0.001, 0.512)])
        costs = LiveCosts(StepCosts(SpsTable(SpsKey("t", "float32", "t", "0"), (1, 512), seconds), None), fixed=True)
        engine.runner.policy = VerifyByConfidence(acceptance, drafter.gamma, costs)
    if overlap:
        launching(engine)
    return engine


def play(rng: random.Random, engine: Engine, requests: Sequence[Request]) -> Run:
    """Random arrivals, retractions, emptied caches and aborts until all have ended; the pages must add up."""
    run, waiting = Run(), list(requests)
    streams = {one.request_id: TextStream(engine.target.tokenizer, one.params) for one in requests}
    arrive, disturb = rng.choice([1.0, 0.5, 0.2]), rng.choice([0, 0, 0.1, 0.3])
    while waiting or engine.has_work():
        while waiting and rng.random() < arrive:
            one = waiting.pop(0)
            try:
                engine.add(one)
                run.answers[one.request_id], run.texts[one.request_id] = Gathered(), ""
            except RequestError:
                run.refused.add(one.request_id)
        for output in engine.step():
            run.answers[output.request_id].take(output)
            run.texts[output.request_id] += streams[output.request_id].append(output.token_ids, output.finish)
        engine.check_integrity()
        if rng.random() < disturb:
            _disturb(rng, engine, run)
    assert engine.flush_cache()
    assert engine.cache.num_free == engine.cache.num_pages
    return run


def _disturb(rng: random.Random, engine: Engine, run: Run) -> None:
    running, kind = engine.scheduler.running(), rng.random()
    if not running:
        return
    if kind < 0.5:
        engine.scheduler.force_retract(rng.choice(running))
    elif kind < 0.8:
        engine.retract_running()
        if kind < 0.65:
            engine.flush_cache(while_waiting=True)
    else:
        victim = rng.choice(running).request.request_id
        assert engine.abort(victim)
        run.aborted.add(victim)
