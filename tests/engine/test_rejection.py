"""Rejection acceptance through the whole engine: its tokens depend on the draft, their distribution does not.

Tokens are biased to three, so that the joint distribution of an answer can be computed; the drafts see the same bias.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from fakes import tiny_target
from sampling.row_fakes import chi_square, chi_square_limit
from scripted import make_engine, request, run

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.bench.exactness import VerifyInTurn
from exactspec.draft.base import Drafter
from exactspec.draft.block import BlockDrafter
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.ngram import NgramDrafter
from exactspec.model.target import TargetModel
from exactspec.naive import logit_domains, sequence_logits
from exactspec.types import SamplingParams, TokenSource

sys.path.insert(0, str(Path(__file__).parent.parent / "draft"))
from draft_fakes import draft_config, write_draft

PROMPT = [70, 71, 72, 70, 70, 72, 71, 71]
TOKENS = (70, 71, 72)
LENGTH, COUNT = 4, 1500
PARAMS = {
    "max_new_tokens": LENGTH, "ignore_eos": True, "logit_bias": dict.fromkeys(TOKENS, 60.0), "frequency_penalty": 0.4,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return TargetModel(CpuBackend(), tiny_target(std=0.08, num_layers=3))


def joint(target, params: SamplingParams) -> torch.Tensor:
    """Exact probabilities [3, 3, 3, 3] of all answers, from one plain forward each."""
    chances = torch.zeros((3,) * LENGTH, dtype=torch.float64)
    for places in itertools.product(range(3), repeat=LENGTH):
        tokens, chance = [TOKENS[i] for i in places], 1.0
        rows = sequence_logits(target, [*PROMPT, *tokens])[len(PROMPT) - 1 :]
        for k, token in enumerate(tokens):
            processed = logit_domains(target, rows[k], params, tokens[:k])["processed"]
            chance *= float(torch.softmax(processed.double(), -1)[token])
        chances[places] = chance
    assert float(chances.sum()) == pytest.approx(1, abs=1e-6)
    return chances


def drafter_of(kind: str, target, folder: Path) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(3)
    changes = {"dspark": {}, "dflash": {
        "architectures": ["LlamaDFlashModel"], "anchor_is_first_prediction": False, "markov_rank": 0,
        "enable_confidence_head": False,
    }}[kind]  # fmt: skip
    return BlockDrafter(load_block_model(write_draft(folder, draft_config(**changes))), target, 4096)


@pytest.mark.parametrize(
    ("kind", "turns", "filters"),
    [("ngram", False, {}), ("dspark", True, {"temperature": 0.8, "top_p": 0.85}), ("dflash", False, {})],
    ids=["ngram", "dspark", "dflash"],
)
def test_the_joint_distribution_of_whole_answers(target, kind, turns, filters, tmp_path):
    """Accepted tokens, corrections and bonuses, in answers of four tokens. False alarm 3e-7 a case."""
    engine = make_engine(
        drafter_of(kind, target, tmp_path), target=target, num_pages=1024, acceptance="rejection",
        max_running_requests=64, prefill_chunk=512,
    )  # fmt: skip
    if turns:  # verify lengths that know nothing of the drafts
        engine.runner.policy = VerifyInTurn()
        engine.runner.policy.needs_draft_probs = True
    params = SamplingParams(**PARAMS, **filters)
    found = run(engine, [request(f"r{seed}", PROMPT, seed=seed, **PARAMS, **filters) for seed in range(COUNT)])
    counts, sources = torch.zeros((3,) * LENGTH), set()
    for one in found.values():
        counts[tuple(TOKENS.index(token) for token in one.token_ids)] += 1
        sources |= set(one.sources)
    assert sources >= {TokenSource.ACCEPTED, TokenSource.CORRECTION, TokenSource.BONUS}
    statistic, cells = chi_square(counts, joint(target, params))
    assert statistic < chi_square_limit(cells)
