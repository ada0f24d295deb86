"""What a draft knows of a text must not depend on how that text was computed: only the speed would tell.

Engines over the tiny target with random block drafts. Acceptance is by decree, so that drafts become text: a single
draft that differs changes everything after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import tiny_target
from scripted import make_engine, request, run

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.draft.block import BlockDrafter
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.simulate import SimulatedAcceptance
from exactspec.engine.engine import Engine
from exactspec.engine.verify_policy import AcceptByDecree, VerifyAll
from exactspec.model.target import TargetModel
from exactspec.types import Request

sys.path.insert(0, str(Path(__file__).parent.parent / "draft"))
from draft_fakes import draft_config, write_draft

PAGE = 4
SYSTEM = [11, 5, 90, 33, 2, 71, 64, 9, 120, 17]
PROMPTS = {"a": [*SYSTEM, 40, 41, 42, 77, 3, 19, 200, 54], "b": [*SYSTEM[:9], 8, 8, 60], "c": [99, 1, 7]}
DFLASH = {
    "architectures": ["LlamaDFlashModel"], "anchor_is_first_prediction": False, "markov_rank": 0,
    "enable_confidence_head": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return TargetModel(CpuBackend(), tiny_target(num_layers=3))


@pytest.fixture(scope="module", params=["dspark", "dflash"])
def draft(request, tmp_path_factory):
    changes = DFLASH if request.param == "dflash" else {}
    return load_block_model(write_draft(tmp_path_factory.mktemp("draft"), draft_config(**changes)))


def asked(**params: Any) -> list[Request]:
    params = {"max_new_tokens": 22, "temperature": 0.0, "ignore_eos": True, **params}
    return [request(name, prompt, seed=len(prompt), **params) for name, prompt in PROMPTS.items()]


def decreed_engine(target, draft, num_pages: int = 128, **config: Any) -> Engine:
    drafter = BlockDrafter(draft, target, num_pages * PAGE)
    engine = make_engine(drafter, target=target, num_pages=num_pages, page_size=PAGE, **config)
    engine.runner.policy = AcceptByDecree(VerifyAll(), SimulatedAcceptance(3.0, drafter.gamma, 0))
    return engine


def drafted(engine: Engine, requests: Sequence[Request]) -> dict[str, Any]:
    found = run(engine, requests)
    return {name: (one.token_ids, one.stats.accepted_per_round) for name, one in found.items()}


def alone(target, draft, requests: Sequence[Request]) -> dict[str, Any]:
    """Each request by itself, in one chunk, nothing cached."""
    found: dict[str, Any] = {}
    for one in requests:
        found |= drafted(decreed_engine(target, draft, prefix_cache=False), [one])
    assert any(sum(accepted) > 5 for _, accepted in found.values())
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_neighbours_and_chunks(target, draft, chunk, temperature):
    requests = asked(temperature=temperature)
    found = drafted(decreed_engine(target, draft, prefill_chunk=chunk), requests)
    assert found == alone(target, draft, requests)


@pytest.mark.parametrize("chunk", [5, 512])
def test_prompt_logprobs_of_some(target, draft, chunk):
    """One prompt is scored from its start, one from its middle, one not at all: in one prefill."""
    requests = asked()
    scored = [
        replace(one, params=replace(one.params, prompt_logprobs=k, prompt_logprob_start=start))
        for one, (k, start) in zip(requests, ((1, 0), (2, 6), (None, 0)), strict=True)
    ]
    engine = decreed_engine(target, draft, prefill_chunk=chunk, hidden_states=True)
    assert drafted(engine, scored) == alone(target, draft, requests)
    assert drafted(engine, scored[::-1]) == alone(target, draft, requests)


def test_a_prefix_from_the_cache(target, draft):
    """The same prompt again, another end after two pages, and a dialog that goes on after what was generated."""
    engine = decreed_engine(target, draft)
    first = asked()
    cold = drafted(engine, first)
    assert cold == alone(target, draft, first)
    assert drafted(engine, first) == cold
    follow_ups = [
        request("a", [*PROMPTS["a"][: 2 * PAGE], 5, 5, 81], max_new_tokens=14, temperature=0.0, ignore_eos=True),
        request("b", [*PROMPTS["b"], *cold["b"][0], 9, 30], max_new_tokens=14, temperature=0.0, ignore_eos=True),
    ]
    found = run(engine, follow_ups)
    assert found["a"].stats.cached_tokens == 2 * PAGE
    assert found["b"].stats.cached_tokens == (len(PROMPTS["b"]) + 21) // PAGE * PAGE
    assert drafted(engine, follow_ups) == alone(target, draft, follow_ups)
    assert {name: one.token_ids for name, one in found.items()} == {
        name: ids for name, (ids, _) in alone(target, draft, follow_ups).items()
    }


def test_after_eviction_and_retraction(target, draft):
    """A pool for one request and a half: they throw each other out, and cached pages are used again."""
    longer = asked(max_new_tokens=60, temperature=1.0)
    requests = [*asked(max_new_tokens=60), *(replace(one, request_id=f"{one.request_id}2") for one in longer)]
    engine = decreed_engine(target, draft, num_pages=34, prefill_chunk=6)
    found = run(engine, requests)
    assert sum(one.stats.num_retracted for one in found.values()) > 0
    assert engine.cache.num_evicted > 0
    assert {name: (one.token_ids, one.stats.accepted_per_round) for name, one in found.items()} == alone(
        target, draft, requests
    )


@pytest.mark.parametrize("every", [3, 5])
def test_forced_retraction(target, draft, every):
    requests = asked()
    engine = decreed_engine(target, draft, prefill_chunk=40)
    for one in requests:
        engine.add(one)
    texts: dict[str, list[int]] = {one.request_id: [] for one in requests}
    steps = 0
    while engine.has_work():
        for output in engine.step():
            texts[output.request_id] += output.token_ids
        steps += 1
        assert steps < 300
        running = engine.scheduler.running()
        if running and steps % every == 0:
            engine.scheduler.force_retract(running[steps % len(running)])
            if steps % (2 * every) == 0:
                engine.retract_running()
                engine.flush_cache(while_waiting=True)
    assert texts == {name: ids for name, (ids, _) in alone(target, draft, requests).items()}
