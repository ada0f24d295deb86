"""What `exactspec serve` runs in tests that need a real engine and no real model: the tiny target, with a drafter that
knows the truth of every request, lies about every fourth token (where the seed is not 0), and goes on behind every
end."""

# ruff: noqa: E402 (the folders of the helpers must be known first)

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

for folder in ("", "engine"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

from fakes import EOS_ID, byte_tokenizer, tiny_target
from scripted import ScriptedDrafter, make_engine
from truth import truth_of

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.engine.engine import Engine
from exactspec.grammar import GrammarCompiler, needs_grammar
from exactspec.model.target import TargetModel
from exactspec.types import RunningRequest

GAMMA, NUM_PAGES, PAGE_SIZE = 7, 300, 4
FACTORY = ("--factory", "tiny_engine:make_tiny_engine", "--tokenizer-factory", "tiny_engine:make_tokenizer")


def make_target() -> TargetModel:
    return TargetModel(CpuBackend(), tiny_target())


def make_tokenizer(model: str) -> Any:
    return byte_tokenizer()


class Knowing:
    """A script (tests/engine/scripted.py)."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.grammars = GrammarCompiler(target.tokenizer, target.config.vocab_size, target.eos_ids)
        self.known: dict[str, list[int]] = {}
        self.chance = random.Random(0)

    def __call__(self, running: RunningRequest, done: int, room: int) -> list[int]:
        name = running.request.request_id
        if name not in self.known:
            compiled = self.grammars.compile(running.params) if needs_grammar(running.params) else None
            endless = replace(running.params, ignore_eos=True, stop=(), stop_regex=(), logprobs=None)
            self.known[name] = truth_of(self.target, replace(running.request, params=endless), compiled).token_ids
        right = self.known[name][done : done + room]
        honest = 1.0 if running.request.seed == 0 else 0.75
        drafts = [token if self.chance.random() < honest else (token + 1) % EOS_ID for token in right]
        return drafts + [self.chance.choice([EOS_ID, 97, 98]) for _ in range(room - len(right))]


def make_tiny_engine(settings: dict[str, Any]) -> Engine:
    torch.set_num_threads(1)
    target = make_target()
    return make_engine(
        ScriptedDrafter(Knowing(target), GAMMA), target=target, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
        prefill_chunk=16, max_running_requests=16, hidden_states=True, max_waiting_requests=500,
    )  # fmt: skip
