"""Greedy rollouts of the real target, recorded by a slow independent implementation, replayed through the drafters.

The recording: weights dequantised from the GGUF, rounded to bfloat16, computed in float32, with the bfloat16 drafts of
that time. Two things are compared: a draft that is at hand in exactly that form (a folder in EXACTSPEC_GOLDEN_DRAFTS
with the checkpoints by name) must give the recorded draft tokens, confidences and accept counts; whatever draft is
shipped must need no more rounds for the recorded text than the recorded drafts, a tenth aside.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from draft_fakes import running
from fakes import make_batch

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.draft.base import DraftBatch, Drafter
from exactspec.draft.factory import SHIPPED, make_drafter
from exactspec.model.target import TargetModel
from exactspec.model.weights import LoadedTarget
from exactspec.types import Proposal, RunningRequest

pytestmark = pytest.mark.model
PAGE, NUM_SLOTS = 16, 512
PAGES = list(range(9, 0, -1))
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_drafts.json").read_text())
EXACT_DRAFTS = os.environ.get("EXACTSPEC_GOLDEN_DRAFTS")


@pytest.fixture(scope="module")
def target(smollm2: LoadedTarget) -> TargetModel:
    """bfloat16 weights in float32 arithmetic."""

    def widen(layer):
        fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
        return type(layer)(**{name: value if value is None else value.float() for name, value in fields.items()})

    weights = smollm2.weights
    embed = weights.embed.float()
    wide = dataclasses.replace(weights, embed=embed, lm_head=embed, layers=[widen(x) for x in weights.layers])
    return TargetModel(TorchBackend("cpu", "fast"), dataclasses.replace(smollm2, weights=wide))


class Rollout:
    """Rounds of one request as the engine does them: propose, verify, observe, accept."""

    def __init__(self, target: TargetModel, drafter: Drafter, golden: dict) -> None:
        self.target, self.drafter, self.golden = target, drafter, golden
        self.pool = target.make_pool(NUM_SLOTS)
        self.prompt_len = len(golden["prompt_ids"])
        self.text = golden["prompt_ids"] + golden["output_ids"]
        self.logprob_error = 0.0
        first = self.forward(0, golden["prompt_ids"])[-1]
        assert first == self.text[self.prompt_len]

    def forward(self, start: int, token_ids: list[int]) -> list[int]:
        """Greedy tokens after each row; the rows' K/V and features are stored."""
        batch = make_batch([(start, token_ids)], PAGE, [PAGES])
        hidden, captured = self.target.forward(batch, self.pool, self.drafter.capture_layers)
        self.drafter.observe(batch, captured)
        logits = self.target.logits(hidden)
        for row in range(len(token_ids)):
            position = start + row + 1
            if position >= self.prompt_len and token_ids[: row + 1] == self.text[start:position]:
                i = position - self.prompt_len
                if i < len(self.golden["output_ids"]):
                    logprob = torch.log_softmax(logits[row], -1)[self.text[position]]
                    self.logprob_error = max(
                        self.logprob_error, abs(float(logprob) - self.golden["output_logprobs"][i])
                    )
        return logits.argmax(-1).tolist()

    def propose(self, request: RunningRequest) -> Proposal:
        anchor = len(request.token_ids) - 1
        return self.drafter.propose(
            DraftBatch(
                requests=[request],
                anchor_ids=torch.tensor(request.token_ids[-1:]),
                anchor_positions=torch.tensor([anchor], dtype=torch.int32),
                page_table=torch.tensor([PAGES], dtype=torch.int32),
                page_size=PAGE,
                max_kv_len=anchor,
            )
        )

    def round(self, request: RunningRequest) -> tuple[Proposal, int]:
        proposal = self.propose(request)
        drafts = proposal.token_ids[0].tolist()
        sampled = self.forward(len(request.token_ids) - 1, [request.token_ids[-1], *drafts])
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
            accepted += 1
        request.token_ids += sampled[: accepted + 1]
        return proposal, accepted

    def request(self) -> RunningRequest:
        return running(self.text[: self.prompt_len + 1], prompt_len=self.prompt_len, max_new=200)


def drafter_of(folder: Path, target: TargetModel) -> Drafter:
    return make_drafter(str(folder), target, num_slots=NUM_SLOTS, gamma=None, backend=target.backend)


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_the_recorded_drafts_are_reproduced(name, target):
    if EXACT_DRAFTS is None:
        pytest.skip("EXACTSPEC_GOLDEN_DRAFTS does not name a folder with the recorded drafts")
    golden = GOLDEN[name]
    drafter = drafter_of(Path(EXACT_DRAFTS) / golden["draft"], target)
    for recorded in golden["rollouts"]:
        rollout = Rollout(target, drafter, recorded)
        request = rollout.request()
        for expected in recorded["rounds"]:
            assert len(request.token_ids) - 1 == expected["anchor_position"]
            proposal, accepted = rollout.round(request)
            assert proposal.token_ids[0].tolist() == expected["draft_tokens"]
            assert accepted == expected["num_accepted"]
            if expected["confidence"]:
                found = proposal.confidence[0]
                torch.testing.assert_close(found, torch.tensor(expected["confidence"]), rtol=0, atol=1e-4)
        assert request.token_ids == rollout.text[: len(request.token_ids)]
        assert rollout.logprob_error < 5e-5


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_the_shipped_draft_needs_no_more_rounds_than_the_recorded_one(name, target):
    folders = sorted(SHIPPED.glob(f"{name}-smollm2-135m"))
    if not folders:
        pytest.skip(f"no {name} draft in this installation")
    golden = GOLDEN[name]
    drafter = drafter_of(folders[0], target)
    recorded_rounds = rounds = 0
    for recorded in golden["rollouts"]:
        rollout = Rollout(target, drafter, recorded)
        request = rollout.request()
        last = recorded["rounds"][-1]
        end = last["anchor_position"] + last["num_accepted"] + 1
        while len(request.token_ids) - 1 < end:
            rollout.round(request)
            rounds += 1
        recorded_rounds += len(recorded["rounds"])
        common = min(len(request.token_ids), len(rollout.text))
        assert request.token_ids[:common] == rollout.text[:common]
    assert rounds <= 1.1 * recorded_rounds
