"""Captured rounds give what ordinary rounds give: tokens, logprobs, counts. Where there is no device the kernels run in
Triton's interpreter and a cache that simply calls the functions stands for the graphs, so the logic is the same."""

from __future__ import annotations

# ruff: noqa: E402 (the interpreter must be chosen before Triton is imported)
import importlib.util
import itertools
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"

from fakes import tiny_target

from exactspec.backend.cuda.backend import CudaBackend
from exactspec.backend.cuda.graphs import GraphCache
from exactspec.draft.block import BlockDrafter
from exactspec.draft.ngram import NgramDrafter
from exactspec.draft.none import NoDrafter
from exactspec.draft.random_weights import random_draft
from exactspec.engine import cuda_profile
from exactspec.engine.config import EngineConfig
from exactspec.engine.cuda_round import CudaRoundRunner
from exactspec.engine.cuda_stage import RoundShape
from exactspec.engine.engine import Engine
from exactspec.engine.live_costs import LiveCosts
from exactspec.engine.profile import StepCosts
from exactspec.engine.verify_policy import VerifyAll, VerifyByConfidence, VerifyPolicy
from exactspec.model.target import TargetModel
from exactspec.scheduler.plan import StepPlan
from exactspec.types import Request, SamplingParams
from exactspec.verify.sps import SpsKey, SpsTable

HALF = torch.bfloat16 if ON_DEVICE else torch.float16
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_layers": 2}


class InterpretedBackend(CudaBackend):
    """The CUDA backend on CPU tensors, for Triton's interpreter."""

    def __init__(self) -> None:
        self.device, self.numerics, self.exact, self.num_sms, self.pdl = torch.device("cpu"), "exact", True, 3, False

    def self_check(self, *stacks_and_linears: Any) -> None:
        """Tested by itself; 600 rows take the interpreter too long."""


class NoGraphs:
    """Runs the function at every replay. As with graphs that share a memory pool, a replay destroys what earlier
    replays of its kind left behind: reading stale results shows as NaN."""

    is_capturing = True

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._known: set[tuple[str, Hashable]] = set()
        self._left: dict[str, list[torch.Tensor]] = {}

    def has(self, kind: str, key: Hashable) -> bool:
        return (kind, key) in self._known

    def get(self, kind: str, key: Hashable, function: Callable[[], Any]) -> Any:
        self.kinds.add(kind)
        self._known.add((kind, key))
        return type("Call", (), {"replay": staticmethod(lambda: self._replay(kind, function))})()

    def _replay(self, kind: str, function: Callable[[], Any]) -> Any:
        for tensor in self._left.get(kind, ()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        outputs = function()
        self._left[kind] = [t for t in outputs or () if isinstance(t, torch.Tensor)]
        return outputs


def make_engine(
    draft: str,
    captured: bool,
    overlap: bool = True,
    make_policy: Callable[[int], VerifyPolicy] = lambda gamma: VerifyAll(),
    patience: int = 0,
) -> Engine:
    backend = CudaBackend("cuda") if ON_DEVICE else InterpretedBackend()
    target = TargetModel(backend, tiny_target(dtype=HALF, context_length=32, max_context=32, **SHAPE))
    drafter: Any = NoDrafter() if draft == "none" else NgramDrafter(3)
    if draft in ("dspark", "dflash"):
        model = random_draft(target.config, gamma=3, num_layers=1, markov_rank=8 if draft == "dspark" else 0,
                             sample_from_anchor=draft == "dspark")  # fmt: skip
        drafter = BlockDrafter(model, target, num_slots=40 * 4)
    config = EngineConfig(
        model="tiny", page_size=4, max_running_requests=3, prefill_chunk=16, kv_tokens=160, overlap=overlap
    )
    engine = Engine(config, target, drafter, 40, make_policy(drafter.gamma))
    old = engine.runner
    if captured:
        graphs = GraphCache() if ON_DEVICE else NoGraphs()
        engine.runner = CudaRoundRunner(
            target, drafter, old.sampler, old.policy, old.pool, 4, most_requests=3, graphs=graphs
        )
        engine.runner.patience = patience
    elif isinstance(old, CudaRoundRunner):
        from exactspec.engine.round import RoundRunner

        engine.runner = RoundRunner(target, drafter, old.sampler, old.policy, old.pool, 4)
    return engine


def answers(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """Everything a client sees, by request."""
    for request in requests:
        engine.add(request)
    seen: dict[str, Any] = {request.request_id: ([], [], [], None) for request in requests}
    while engine.has_work():
        for output in engine.step():
            tokens, logprobs, sources, _ = seen[output.request_id]
            tokens += output.token_ids
            logprobs += [(e.token_id, e.logprob, e.top) for e in output.logprobs or ()]
            sources += output.sources
            counts = (output.stats.rounds, output.stats.num_drafted, output.stats.num_verified,
                      output.stats.num_accepted, output.stats.num_committed)  # fmt: skip
            seen[output.request_id] = (tokens, logprobs, sources, (output.finish, counts))
    engine.check_integrity()
    return seen


def some_requests() -> list[Request]:
    shared = [5, 9, 5, 9, 5]
    params = [
        SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True),
        SamplingParams(max_new_tokens=3, temperature=0.8, ignore_eos=True, logprobs=2, logprobs_kind="scaled"),
        SamplingParams(max_new_tokens=2, temperature=1.0, ignore_eos=True, logprobs=0),  # prefills beside decodes
        SamplingParams(max_new_tokens=2, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    ]
    return [Request(f"r{i}", tuple(shared + [i] * i), p, seed=40 + i) for i, p in enumerate(params)]


SLOW = () if ON_DEVICE else (pytest.mark.long,)  # the interpreter takes half a minute for each


@pytest.mark.parametrize("draft", ["dspark", *(pytest.param(name, marks=SLOW) for name in ("none", "ngram", "dflash"))])
def test_captured_rounds_equal_ordinary_rounds(draft: str) -> None:
    engine = make_engine(draft, captured=True)
    got = answers(engine, some_requests()[:3])
    want = answers(make_engine(draft, captured=False), some_requests()[:3])
    assert engine.rounds.num_overlapped > 0 or draft == "ngram", "whose drafts come from the host"
    for name in want:
        # which drafts are proposed may differ in the last bit of a draft's logits; what is emitted may not
        assert got[name][:2] == want[name][:2], name
        assert got[name][3][0] == want[name][3][0], name
        if draft in ("none", "ngram"):
            assert got[name] == want[name], name


@pytest.mark.parametrize("draft", [pytest.param("dspark", marks=SLOW)])
def test_plain_steps_take_the_captured_way_and_others_do_not(draft: str) -> None:
    engine = make_engine(draft, captured=True)
    answers(engine, some_requests()[:1])
    if not ON_DEVICE:
        assert engine.runner.graphs.kinds == {"draft", "verify", "forward"}
    engine = make_engine(draft, captured=True)
    answers(engine, some_requests()[3:])
    if not ON_DEVICE:
        assert engine.runner.graphs.kinds == {"forward"}


@pytest.mark.parametrize("draft", [pytest.param(name, marks=SLOW) for name in ("none", "dspark", "dflash")])
def test_overlap_on_and_off_agree_and_a_newcomer_takes_a_seat(draft: str) -> None:
    """Requests end at different times and a third one joins late, on a seat that another had."""
    found = []
    for overlap in (True, False):
        engine = make_engine(draft, captured=True, overlap=overlap)
        requests = some_requests()[:3]
        early = [replace(request, params=replace(request.params, max_new_tokens=2 + 5 * i)) for i, request in
                 enumerate(requests[:2])]  # fmt: skip
        got = answers(engine, early)
        got.update(answers(engine, [replace(requests[2], request_id="late"), replace(early[1], request_id="again")]))
        assert got["again"][:3] == got["r1"][:3]
        assert (engine.rounds.num_overlapped > 0) == overlap
        found.append(got)
    assert found[0] == found[1]


class Told(VerifyByConfidence):
    """Decides by a script: one number of drafts after the other, by its place in `choices`; the last one stays."""

    def __init__(self, gamma: int, levels: tuple[int, ...]) -> None:
        table = SpsTable(SpsKey("", "", "", ""), (1, 512), (0.01, 0.0101))
        super().__init__("coupled", gamma, LiveCosts(StepCosts(table, None), fixed=True))
        self.levels = list(levels)
        self.told: list[tuple[int, list[int], list[int]]] = []  # places, verified, accepted
        self.survivals: list[Any] = []
        self._asked: list[int] = []

    def drafts_ahead(self, plan: StepPlan, base_rows: int, choices: Sequence[int]) -> int:
        level = self.levels.pop(0) if len(self.levels) > 1 else self.levels[0]
        if choices[level]:
            self._asked.append(choices[level])
        return choices[level]

    def note_round(self, survival: Any, verified: Sequence[int], accepted: Sequence[int]) -> None:
        super().note_round(survival, verified, accepted)
        self.told.append((self._asked.pop(0), list(verified), list(accepted)))
        self.survivals.append(survival)


SOME, FEW, ALL, NONE = 2, 1, -1, 0


@pytest.mark.parametrize("draft", ["dspark", *(pytest.param(name, marks=SLOW) for name in ("dflash", "ngram"))])
def test_whatever_number_of_drafts_is_verified_the_answers_are_those_of_ordinary_rounds(draft: str) -> None:
    """Rounds with some, none, few and all of the drafts follow each other unread."""
    levels = (SOME, NONE, FEW, ALL, SOME)
    engine = make_engine(draft, captured=True, make_policy=lambda gamma: Told(gamma, levels))
    requests = [
        replace(r, params=replace(r.params, max_new_tokens=3 + 4 * i)) for i, r in enumerate(some_requests()[:2])
    ]
    got = answers(engine, requests)
    want = answers(make_engine("none", captured=False), requests)
    for name in want:
        assert got[name][:2] == want[name][:2], name
        assert got[name][3][0] == want[name][3][0], name
    policy = cast(Told, engine.runner.policy)
    assert policy.told, "no round was reported"
    for places, verified, accepted in policy.told:
        assert sum(verified) <= places
        assert all(a <= v for a, v in zip(accepted, verified, strict=True))
    drafted, verified = engine.stats().num_drafted, engine.stats().num_verified
    assert 0 < verified <= drafted
    assert verified < drafted or draft == "ngram", "which proposes little"
    if draft == "dspark":
        assert engine.rounds.num_overlapped > 0
        shown = [row for rows in policy.survivals for row in rows.tolist()]
        assert all(1.0 >= a >= b >= 0.0 for row in shown for a, b in itertools.pairwise(row))
        assert 0 < max(map(max, shown)) < 1
    if not ON_DEVICE and draft == "dspark":
        assert engine.runner.graphs.kinds == {"draft", "verify", "forward"}


def test_a_number_of_drafts_is_captured_when_it_has_been_wanted_for_a_while() -> None:
    """Until then more are verified, among them all that was asked for; those with a graph first."""
    engine = make_engine("dspark", captured=True, make_policy=lambda gamma: Told(gamma, (FEW,)), patience=2)
    runner, shape, levels = cast(CudaRoundRunner, engine.runner), RoundShape(2, False, None, [None]), (0, 2, 4, 6)
    assert [runner._affordable(shape, 2, levels) for _ in range(4)] == [6, 6, 2, 2]
    assert [runner._affordable(shape, places, levels) for places in (0, 6)] == [0, 6]
    other = replace(shape, sampled=True)
    assert runner._affordable(other, 2, levels) == 6, "its graphs are others"
    if not ON_DEVICE:
        runner._verify_graph(other, 4)
        assert [runner._affordable(other, places, levels) for places in (2, 4)] == [4, 4]
    runner.policy = VerifyAll()
    assert runner._affordable(replace(shape, top=5), 2, levels) == 2, "what is not an estimate is done at once"


@pytest.mark.parametrize("draft", [pytest.param("dspark", marks=SLOW)])
def test_while_a_number_of_drafts_has_no_graph_more_are_verified(draft: str) -> None:
    engine = make_engine(draft, captured=True, make_policy=lambda gamma: Told(gamma, (FEW,)), patience=1)
    policy = cast(Told, engine.runner.policy)
    request = some_requests()[0]
    answers(engine, [replace(request, params=replace(request.params, max_new_tokens=8), max_drafts=3)])
    verified = [sum(numbers) for _, numbers, _ in policy.told]
    assert verified[:2] == [3, 1]


REJECTION = [("dspark", True), ("dspark", False), ("dflash", True), ("none", True)]


@pytest.mark.parametrize(("draft", "overlap"), [pytest.param(*case, marks=SLOW) for case in REJECTION])
def test_captured_rounds_with_rejection_equal_ordinary_ones(draft: str, overlap: bool) -> None:
    """Answers depend on the drafts here, so the captured drafts and what they were drawn from must be the ordinary
    ones. Temperatures are powers of two: the two ways divide by them differently."""
    params = [
        SamplingParams(max_new_tokens=14, temperature=1.0, ignore_eos=True, logprobs=2, logprobs_kind="scaled"),
        SamplingParams(max_new_tokens=9, temperature=0.5, ignore_eos=True),
        SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0),
    ]
    requests = [Request(f"r{i}", (5, 9, 5, 9, 5, *([i] * i)), p, seed=40 + i) for i, p in enumerate(params)]
    rule: Any = lambda gamma: VerifyAll("rejection")  # noqa: E731
    engine = make_engine(draft, captured=True, overlap=overlap, make_policy=rule)
    got = answers(engine, requests)
    ordinary = make_engine(draft, captured=False, make_policy=rule)
    assert got == answers(ordinary, requests)
    assert (engine.rounds.num_overlapped > 0) == overlap
    assert engine.stats().accepted_histogram == ordinary.stats().accepted_histogram
    if draft != "none":
        assert 0 < engine.stats().num_accepted < engine.stats().num_verified, "nothing was decided"


@pytest.mark.parametrize("draft", [pytest.param(name, marks=SLOW) for name in ("dspark", "ngram")])
def test_what_rounds_cost_is_measured_by_running_them(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_profile, "REPEATS", 1)
    monkeypatch.setattr(cuda_profile, "GraphCache", GraphCache if ON_DEVICE else NoGraphs)
    backend = CudaBackend("cuda") if ON_DEVICE else InterpretedBackend()
    target = TargetModel(backend, tiny_target(dtype=HALF, context_length=512, max_context=512, **SHAPE))
    drafter: Any = NgramDrafter(3)
    if draft == "dspark":
        drafter = BlockDrafter(random_draft(target.config, gamma=3, num_layers=1, markov_rank=8), target, 320)
    bench = cuda_profile.RoundBench(target, drafter, buckets=(1, 2))
    rows, seconds = bench.steps()
    assert rows == [1, 2, 3, 4, 6, 8], "one request and two, each with no drafts, a third, two thirds and all"
    counts, draft_seconds = bench.drafts()
    assert counts == [1, 2]
    assert all(took > 0 for took in [*seconds, *draft_seconds])


@pytest.mark.parametrize(("at", "overlap"), [(3, False), (7, True)])
def test_after_a_round_that_was_not_sent_the_device_is_told_all_pages_again(overlap: bool, at: int) -> None:
    """An error after the host has noted what it sends, before it is sent; the request beside goes, this one stays."""

    def asked() -> list[Request]:
        params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
        return [Request("stays", (5, 9, 5, 9, 5, 1), params, 1), Request("goes", (7, 8, 9), params, 2)]

    truth = answers(make_engine("none", True), asked()[:1])["stays"]
    engine = make_engine("none", True, overlap=overlap)
    stage = cast(CudaRoundRunner, engine.runner).stage
    note, calls = stage._note_pages, itertools.count(1)

    def noting(requests: list[Any]) -> None:
        note(requests)
        if next(calls) == at:
            raise torch.OutOfMemoryError("planted")

    stage._note_pages = noting  # type: ignore[method-assign]
    for request in asked():
        engine.add(request)
    tokens: list[int] = []
    entries: list[Any] = []
    while engine.has_work():
        try:
            outputs = engine.step()
        except torch.OutOfMemoryError:
            assert engine.abort("goes")
            continue
        for output in outputs:
            if output.request_id == "stays":
                tokens += output.token_ids
                entries += [(e.token_id, e.logprob, e.top) for e in output.logprobs or ()]
    assert next(calls) > at
    assert (tokens, entries) == (truth[0], truth[1])
    engine.check_integrity()
