"""Rejection acceptance decided on the device is `accept_rejection`, draft by draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_round import ON_DEVICE, InterpretedBackend

from exactspec.backend.cuda.backend import CudaBackend
from exactspec.backend.cuda.decode import RoundInputs
from exactspec.backend.cuda.seats import DRAFTS, NUM_FIELDS, Column, Field, judge, make_seats, num_columns
from exactspec.engine.cuda_draws import VerifiedRows, distributions, reject
from exactspec.sampling.rows import RowGroup
from exactspec.sampling.sampler import Sampler
from exactspec.types import Request, RunningRequest, SamplingParams
from exactspec.verify.accept import AcceptResult, accept_rejection

GAMMA, VOCAB, VALID, PAD = 3, 70, 64, 2  # PAD rows of nobody
TEMPERATURES = (1.0, 0.5, 1.0, 0.0, 0.8, 0.0)
LENGTHS = (3, 2, 0, 3, 1, 2)


def decided_on_device(
    logits: torch.Tensor, drawn: torch.Tensor, drafts: torch.Tensor, probs: torch.Tensor, inputs: RoundInputs
) -> torch.Tensor:
    """[R, columns]: what a round reports of rejection over ragged rows."""
    device, count = logits.device, len(LENGTHS)
    lens = torch.tensor(LENGTHS, device=device)
    q_start = torch.cat([lens.new_zeros(1), (lens + 1).cumsum(0)]).int()
    heat = torch.repeat_interleave(inputs.temperatures, lens + 1)
    heat = torch.cat([heat, heat.new_zeros(PAD)])
    rows = VerifiedRows(logits, drawn, heat, q_start[:-1].long(), lens, VALID)
    tokens, marked = reject(rows, inputs, drafts, probs)
    message = torch.zeros((NUM_FIELDS, count), dtype=torch.int64, device=device)
    message[Field.SEAT] = torch.arange(count, device=device)
    message[Field.LIMIT], message[Field.MOST_DRAFTS], message[Field.DECREE] = 1000, GAMMA, -1
    results = torch.zeros((count, num_columns(GAMMA)), dtype=torch.int64, device=device)
    survival = torch.ones((count, GAMMA), device=device)
    seats = make_seats(count, 4, device)
    judge(message, inputs, seats, marked, survival, lens, q_start, tokens, results, score=False)
    last = results[:, DRAFTS + GAMMA :].gather(1, results[:, :1])[:, 0]
    assert torch.equal(seats.anchors, last), "the next round starts from another token than is emitted"
    return results


@pytest.mark.parametrize("seed", range(3))
def test_the_device_decides_as_accept_rejection_does(seed: int) -> None:
    backend: Any = CudaBackend("cuda") if ON_DEVICE else InterpretedBackend()
    generator = torch.Generator().manual_seed(seed)
    num_rows = sum(LENGTHS) + len(LENGTHS)
    logits = (2.0 * torch.randn(num_rows + PAD, VOCAB, generator=generator)).to(backend.device)
    groups, keys = [], []
    for r, (heat, length) in enumerate(zip(TEMPERATURES, LENGTHS, strict=True)):
        params = SamplingParams(temperature=heat, max_new_tokens=50)
        running = RunningRequest(Request(f"r{r}", (1, 2), params, seed=100 * seed + r), [1, 2])
        groups.append(RowGroup(running, first_position=3 * r, draft_tokens=[0] * length))
        keys.append((100 * seed + r, 3 * r))
    sampler = Sampler(backend, VOCAB, VALID, ())
    drawn = sampler.sample(logits[:num_rows], groups)
    # drafts near what the target would say: some pass, some do not, of a sampled and of a greedy request alike
    seeds, positions = torch.tensor(keys, device=backend.device).T.contiguous().unbind(0)
    heats = torch.tensor(TEMPERATURES, device=backend.device)
    near = torch.zeros(len(LENGTHS), GAMMA, VOCAB)
    row = 0
    for r, length in enumerate(LENGTHS):
        near[r, :length] = logits[row : row + length].cpu()
        row += length + 1
    near = (near + torch.randn(near.shape, generator=generator)).to(backend.device)
    drafts, probs = torch.zeros_like(near[..., 0], dtype=torch.int64), torch.zeros_like(near)
    for k in range(GAMMA):
        drafts[:, k] = backend.draw(near[:, k].contiguous(), heats, seeds, positions + k, 1, VALID)[0]
        probs[:, k] = distributions(near[:, k].contiguous(), heats, drafts[:, k], VALID)
    for r, group in enumerate(groups):
        group.draft_tokens[:] = drafts[r, : LENGTHS[r]].tolist()
    want = accept_rejection(drawn, groups, probs)
    inputs = RoundInputs(
        anchors=torch.zeros_like(seeds), positions=torch.full_like(seeds, 5), seeds=seeds, output_positions=positions,
        active=torch.ones_like(seeds), temperatures=heats,
        page_table=torch.zeros((len(LENGTHS), 4), dtype=torch.int32, device=backend.device),
    )  # fmt: skip
    padded = torch.cat([drawn.token_ids, drawn.token_ids.new_zeros(PAD)])
    results = decided_on_device(logits, padded, drafts, probs, inputs).cpu()
    counts = results[:, Column.ACCEPTED].tolist()
    tokens = [results[r, DRAFTS + GAMMA : DRAFTS + GAMMA + n + 1].tolist() for r, n in enumerate(counts)]
    assert counts == [result.num_accepted for result in want]
    assert tokens == [result.tokens for result in want]
    assert_both_happen(want)


def assert_both_happen(results: list[AcceptResult]) -> None:
    passed = sum(result.num_accepted for result in results)
    assert 0 < passed < sum(LENGTHS), "nothing was decided"
