"""Random traffic against the slow truth, to the last bit: whatever was asked for, whoever drafted, whatever went on."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_target
from random_traffic import Run, make_requests, make_script, make_traffic_engine, play
from scripted import Gathered, ScriptedDrafter
from truth import Truth, truth_about, truth_of

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.ngram import NgramDrafter
from exactspec.draft.none import NoDrafter
from exactspec.engine.admission import RESERVED_ROWS
from exactspec.grammar import GrammarCompiler, needs_grammar
from exactspec.model.target import TargetModel
from exactspec.naive import sequence_logits
from exactspec.types import Request

sys.path.insert(0, str(Path(__file__).parent.parent / "draft"))
from draft_fakes import draft_config, write_draft

CONTEXT = 112
PADDED = 300  # rows of the widest target's embedding; ids from 262 on are no tokens
DFLASH = {
    "architectures": ["LlamaDFlashModel"], "anchor_is_first_prediction": False, "markov_rank": 0,
    "enable_confidence_head": False,
}  # fmt: skip
SCRIPTS = ("right", "wrong", "sometimes", "repeat", "ends", "any")


class World:
    """A target, its grammar compiler and its block drafts, whose mask token is a padded row where there are some."""

    def __init__(self, backend, folder, **changes) -> None:
        self.target = TargetModel(
            backend, tiny_target(num_layers=3, context_length=CONTEXT, max_context=CONTEXT, **changes)
        )
        vocab = self.target.config.vocab_size
        self.grammars = GrammarCompiler(self.target.tokenizer, vocab, self.target.eos_ids)
        shape = {"vocab_size": vocab, "mask_token_id": 299 if vocab == PADDED else 259, "block_size": 8}
        self.drafts = {
            name: load_block_model(write_draft(folder / name, draft_config(**shape, **more)))
            for name, more in (("dspark", {}), ("dflash", DFLASH))
        }

    def truth(self, requests: list[Request]) -> dict[str, Truth]:
        return {one.request_id: truth_of(self.target, one, self.compiled(one)) for one in requests}

    def truth_about(self, requests: list[Request], run: Run) -> dict[str, Truth]:
        """Of answers that depend on the draft."""
        return {
            one.request_id: truth_about(self.target, one, run.answers[one.request_id].token_ids, self.compiled(one))
            for one in requests
        }

    def compiled(self, one: Request) -> Any:
        return self.grammars.compile(one.params) if needs_grammar(one.params) else None

    def drafter(self, kind: str, gamma: int, truth: dict[str, Truth], slots: int, rng: random.Random) -> Drafter:
        if kind in self.drafts:
            return BlockDrafter(self.drafts[kind], self.target, slots, min(gamma, 7))
        if kind == "ngram":
            return NgramDrafter(gamma)
        if kind == "none":
            return NoDrafter()
        tokens = {name: one.token_ids for name, one in truth.items()}
        return ScriptedDrafter(make_script(kind, tokens, self.target.config.vocab_size, rng), gamma)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> list[World]:
    return make_worlds(tmp_path_factory.mktemp("drafts"))


def make_worlds(folder: Path) -> list[World]:
    shapes = [
        {}, {"std": 0.05, "seed": 3}, {"vocab_size": PADDED, "seed": 5},
        {"windows": (6, None, 9), "qk_norm": True, "post_norms": True, "tied": True, "seed": 7},
    ]  # fmt: skip
    made = [(backend, shape) for backend in (TorchBackend("cpu"), CpuBackend()) for shape in shapes]
    made.append((CpuBackend(), {"dtype": torch.bfloat16}))
    return [World(backend, folder / str(number), **shape) for number, (backend, shape) in enumerate(made)]


def episode(worlds: list[World], seed: int, acceptance: str = "coupled") -> int:
    """Compares everything; returns how many requests took part."""
    rng = random.Random(seed)
    world = rng.choice(worlds)
    requests = make_requests(rng, world.target, rng.randint(1, 8))
    truth = world.truth(requests)
    gamma, page = rng.choice([1, 2, 6, 7, 15, 16]), rng.choice([1, 2, 4, 16])
    longest = max(len(one.prompt_ids) + (one.params.max_new_tokens or CONTEXT) for one in requests)
    longest = min(longest, CONTEXT) + max(gamma + 2, RESERVED_ROWS)
    num_pages = -(-longest // page) + rng.choice([1, 2, 4, 9, 1600 // page])
    kind = rng.choice([*SCRIPTS, "ngram", "none", "dspark", "dflash"])
    drafter = world.drafter(kind, gamma, truth, num_pages * page, rng)
    engine = make_traffic_engine(rng, world.target, drafter, num_pages, page, acceptance)
    run = play(rng, engine, requests)
    assert not run.refused
    if acceptance == "rejection":
        check_greedy(requests, run, truth)
        requests = [
            one
            for one in requests
            if run.answers[one.request_id].finish.kind != "abort" and truth[one.request_id].token_ids
        ]
        truth = world.truth_about(requests, run)
    for one in requests:
        where = f"seed {seed}, draft {kind}, gamma {gamma}, page {page}: {one}"
        compare(world.target, one, run, truth[one.request_id], where)
    return len(requests)


def check_greedy(requests: list[Request], run: Run, truth: dict[str, Truth]) -> None:
    """Without randomness both rules accept the same."""
    for one in requests:
        if one.params.greedy:
            count = len(run.answers[one.request_id].token_ids)
            assert run.answers[one.request_id].token_ids == truth[one.request_id].token_ids[:count], one


def compare(target: TargetModel, one: Request, run: Run, truth: Truth, where: str) -> None:
    got = run.answers[one.request_id]
    count = len(got.token_ids)
    if one.request_id in run.aborted and got.finish.kind == "abort":
        assert got.token_ids == truth.token_ids[:count], where
        assert got.logprobs == (truth.logprobs or [])[:count], where
        return
    assert got.token_ids == truth.token_ids, where
    assert (got.finish.kind, got.finish.matched) == (truth.finish.kind, truth.finish.matched), where
    assert got.logprobs == (truth.logprobs or []), where
    assert got.prompt_logprobs == truth.prompt_logprobs, where
    assert run.texts[one.request_id] == truth.text, where
    assert [output.next_token for output in got.outputs if output.next_token] == [truth.after] * (
        truth.after is not None
    )
    assert len(got.sources) == count
    compare_extras(target, one, got, truth, where)


def compare_extras(target: TargetModel, one: Request, got: Gathered, truth: Truth, where: str) -> None:
    """Supports, and hidden states by the logits they give: row i gave token i, the prompt's last row the first."""
    if one.sampling_mask:
        masks = [mask for output in got.outputs for mask in output.sampling_mask or []]
        assert [ids for ids, _ in masks] == truth.supports, where
        assert all(sum(torch.tensor(values).exp().tolist()) == pytest.approx(1, abs=1e-5) for _, values in masks)
    if one.return_hidden_states:
        ids = [*one.prompt_ids, *truth.token_ids]
        rows = sequence_logits(target, ids)
        (prompt,) = [output.prompt_hidden for output in got.outputs if output.prompt_hidden is not None]
        hidden = torch.cat([prompt, *(row[None] for row in got.hidden[1:])])
        first = len(one.prompt_ids) - len(prompt)  # what came from the cache has no row
        assert torch.equal(target.logits(hidden), rows[first : first + len(hidden)]), where
        assert len(got.hidden) == len(truth.token_ids), where


@pytest.mark.parametrize("first", range(0, 40, 5))
def test_random_traffic_returns_the_truth(worlds, first):
    assert sum(episode(worlds, seed) for seed in range(first, first + 5)) >= 5


@pytest.mark.parametrize("first", range(5000, 5020, 5))
def test_with_rejection_every_token_is_possible_and_told_truly(worlds, first):
    """Its tokens depend on the draft; what is said of them does not, and greedy answers are the truth itself."""
    assert sum(episode(worlds, seed, "rejection") for seed in range(first, first + 5)) >= 5


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_much_random_traffic_returns_the_truth(worlds, first):
    for seed in range(first, first + 100):
        episode(worlds, seed)
        episode(worlds, seed, "rejection")
