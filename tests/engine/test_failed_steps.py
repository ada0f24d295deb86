"""A step that fails, a row that is lost, a Ctrl-C: the others' answers stay what they are, and nothing is half told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes import tiny_model, tiny_target
from scripted import Gathered, ScriptedDrafter, make_engine, oracle, request, run, silent

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.engine.engine import Engine
from exactspec.engine.interrupts import held_interrupts
from exactspec.engine.llm import LLM
from exactspec.model.target import TargetModel
from exactspec.types import Request, SamplingParams

PROMPT = [1, 2, 3, 4, 5]
POISON = 250  # a token whose row is NaN, as an overflow in float16 makes it


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_model()


@pytest.fixture(scope="module")
def poisoned() -> TargetModel:
    loaded = tiny_target()
    loaded.weights.embed[POISON] = float("nan")
    return TargetModel(TorchBackend("cpu"), loaded)


def asked(**changes: Any) -> list[Request]:
    return [
        request("greedy", PROMPT, temperature=0.0, max_new_tokens=9, ignore_eos=True, logprobs=2, **changes),
        request("long", list(range(20, 44)), max_new_tokens=5, temperature=1.0, ignore_eos=True, prompt_logprobs=1),
        request("rows", [7, 8], temperature=0.7, max_new_tokens=7, return_hidden_states=True, sampling_mask="support"),
        request("scored", [9, 8, 7], max_new_tokens=0, logprobs=1),
    ]


def finish_all(engine: Engine, requests: list[Request], failures: type[Exception]) -> tuple[dict[str, Gathered], int]:
    """Steps on through failing steps; how many there were."""
    gathered = {r.request_id: Gathered() for r in requests}
    failed = 0
    while engine.has_work():
        try:
            outputs = engine.step()
        except failures:
            failed += 1
            outputs = []
        for output in outputs:
            gathered[output.request_id].take(output)
        engine.check_integrity()
    return gathered, failed


def failing_once(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """`call`, but for its at-th time, which runs out of memory."""
    calls = iter(range(10**6))

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise torch.OutOfMemoryError("planted")
        return call(*args, **options)

    return wrapped


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("where", ["target.forward", "target.logits", "scorer.score_outputs", "scorer.score_prompt"])
def test_after_a_failed_step_all_go_on_as_if_it_had_not_been(target, where: str, at: int) -> None:
    def engine() -> Engine:
        return make_engine(
            ScriptedDrafter(lambda r, done, room: [1] * room, 3), target=tiny_model(), prefill_chunk=10,
            hidden_states=True,
        )  # fmt: skip

    truth = run(engine(), asked())
    broken = engine()
    owner = getattr(broken, where.split(".")[0])
    name = where.split(".")[1]
    setattr(owner, name, failing_once(getattr(owner, name), at))
    for r in asked():
        broken.add(r)
    found, failed = finish_all(broken, asked(), torch.OutOfMemoryError)
    assert failed == 1
    for request_id, wanted in truth.items():
        assert found[request_id].answer == wanted.answer
        assert found[request_id].prompt_logprobs == wanted.prompt_logprobs
        assert len(found[request_id].hidden) == len(wanted.hidden)


def test_a_request_that_was_committed_and_could_not_be_described_ends_and_the_others_go_on(
    target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine() -> Engine:
        return make_engine(ScriptedDrafter(silent, 0), target=target, hidden_states=True)

    truth = run(engine(), asked())
    broken = engine()
    from exactspec.engine import engine as module

    monkeypatch.setattr(module, "sampling_support", failing_once(module.sampling_support, 2))
    for r in asked():
        broken.add(r)
    found, failed = finish_all(broken, asked(), torch.OutOfMemoryError)
    assert failed == 1
    assert found["rows"].finish.kind == "abort"
    assert "failed" in found["rows"].finish.message
    assert found["rows"].token_ids == truth["rows"].token_ids[:2]
    for request_id in ("greedy", "long", "scored"):
        assert found[request_id].answer == truth[request_id].answer


@pytest.mark.parametrize("limit", [4, 5, 8])
def test_a_lost_row_ends_its_own_request_alone(poisoned, limit: int) -> None:
    llm = LLM.around(make_engine(ScriptedDrafter(silent, 0), target=poisoned))
    params = SamplingParams(max_new_tokens=limit, temperature=0.0, ignore_eos=True, logprobs=0)
    truth = llm.generate([PROMPT], params)[0]
    chunks = []
    for number, chunk in enumerate(llm.stream(PROMPT, params)):
        chunks.append(chunk)
        if number == 3:
            for field in ("logprobs", "prompt_logprobs"):
                (lost,) = llm.generate([[POISON, 7]], SamplingParams(max_new_tokens=3, **{field: 0}))
                assert (lost.finish_reason.kind, lost.token_ids) == ("abort", [])
                assert "NaN" in lost.finish_reason.message
                assert not lost.prompt_logprobs
    assert [t for chunk in chunks for t in chunk.token_ids] == truth.token_ids
    assert [e.logprob for chunk in chunks for e in chunk.logprobs] == [e.logprob for e in truth.logprobs]
    llm.engine.check_integrity()


def test_what_came_before_a_lost_row_in_a_block_is_emitted_as_plain_decoding_does(poisoned) -> None:
    bias = {POISON: 100.0}  # the third token, once the first two are out
    plain = [request("r", PROMPT, temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=1)]
    first = run(make_engine(ScriptedDrafter(silent, 0), target=poisoned), plain)["r"].token_ids[:2]
    wanted = [*first, POISON, 9, 9, 9]
    for gamma, script in ((0, silent), (4, oracle({"r": wanted}))):
        engine = make_engine(ScriptedDrafter(script, gamma), target=poisoned)
        r = request(
            "r", [*PROMPT, *first], temperature=0.0, max_new_tokens=4, ignore_eos=True, logprobs=1, logit_bias=bias
        )
        found = run(engine, [r])["r"]
        assert found.token_ids == [POISON]
        assert [e.logprob == e.logprob for e in found.logprobs] == [True]
        assert found.finish.kind == "abort"


@pytest.fixture
def no_pending_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_end_of_the_step(target, no_pending_signal: None) -> None:
    engine = make_engine(ScriptedDrafter(silent, 0), target=target)
    llm = LLM.around(engine)
    params = SamplingParams(max_new_tokens=6, seed=5)
    truth = llm.generate([PROMPT], params)[0]
    whole, real = [], engine.target.logits

    def interrupted(hidden: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        whole.append(hidden.shape[0])
        return real(hidden)

    engine.target.logits = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, PROMPT[:3]], params)
    finally:
        del engine.target.logits
    assert whole, "the step went on to its end"
    assert engine.scheduler.idle
    engine.check_integrity()
    again = llm.generate([PROMPT], params)[0]
    assert (again.token_ids, again.logprobs) == (truth.token_ids, truth.logprobs)


def test_a_second_ctrl_c_acts_at_once(no_pending_signal: None) -> None:
    reached = []

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("held")

    with pytest.raises(KeyboardInterrupt), held_interrupts():
        twice()
    assert reached == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_refused_grammar_is_refused_before_anything_runs(target) -> None:
    pytest.importorskip("xgrammar")
    llm = LLM.around(make_engine(ScriptedDrafter(silent, 0), target=target, max_waiting_requests=1))
    good = SamplingParams(max_new_tokens=2)
    with pytest.raises(ValueError, match="regex"):
        llm.generate([PROMPT] * 3, [good, good, SamplingParams(regex="(")])
    assert llm.engine.metrics.num_steps == 0


@pytest.mark.parametrize("gamma", [0, 3, 7])
def test_an_answer_without_a_limit_is_as_long_whatever_the_draft(target, gamma: int) -> None:
    engine = make_engine(ScriptedDrafter(lambda r, d, room: [1] * room, gamma), target=target, num_pages=16)
    found = run(engine, [request("r", PROMPT, max_new_tokens=None, ignore_eos=True, temperature=0.0)])["r"]
    assert (len(found.token_ids), found.finish.kind) == (16 * 4 - 16 - len(PROMPT), "length")
    with pytest.raises(ValueError, match="min_new_tokens"):
        engine.add(request("s", PROMPT, max_new_tokens=None, min_new_tokens=60))
