"""The kernels of a captured decode round against plain loops (in Triton's interpreter where there is no device)."""

from __future__ import annotations

# ruff: noqa: E402 (the interpreter must be chosen before Triton is imported)
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"

from exactspec.backend.cuda.decode import RoundInputs, draw_step, round_rows
from exactspec.backend.cuda.sampling import gumbel

DEVICE = "cuda" if ON_DEVICE else "cpu"
HALF = torch.bfloat16 if ON_DEVICE else torch.float16
PAGE = 4


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def some_inputs() -> RoundInputs:
    table = torch.tensor([[3, 1, 7, 0], [2, 5, 0, 0], [9, 9, 9, 9]], dtype=torch.int32, device=DEVICE)
    return RoundInputs(
        anchors=integers(11, 22, 33), positions=integers(6, 0, 4), seeds=integers(-1, 2**40, 5),
        output_positions=integers(2, 0, 9), active=integers(1, 1, 0),
        temperatures=torch.tensor([0.0, 0.5, 1.0], device=DEVICE), page_table=table,
    )  # fmt: skip


@pytest.mark.parametrize(("causal", "fill"), [(True, None), (False, 77)])
def test_rows_of_a_round_stand_where_the_page_table_says(causal: bool, fill: int | None) -> None:
    rows = round_rows(some_inputs(), 4, PAGE, causal, fill)
    batch = rows.batch
    assert batch.positions.view(3, 4)[:2].tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert batch.slots.view(3, 4).tolist() == [[6, 7, 28, 29], [8, 9, 10, 11], [-1] * 4]
    assert batch.kv_len.tolist() == [10, 4, 0]
    assert batch.q_start.tolist() == [0, 4, 8, 12]
    assert batch.causal == causal
    assert (batch.max_kv_len, batch.max_q_len) == (16, 4)
    assert batch.token_ids.view(3, 4)[:, 0].tolist() == [11, 22, 33]
    if fill is not None:
        assert batch.token_ids.view(3, 4)[:, 1:].unique().tolist() == [fill]
    assert rows.seeds.view(3, 4)[:, 3].tolist() == [-1, 2**40, 5]
    assert rows.output_positions.view(3, 4)[0].tolist() == [2, 3, 4, 5]
    assert rows.temperatures.view(3, 4)[1].tolist() == [0.5] * 4


@pytest.mark.parametrize("count", [19, 3, 1])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_step_of_the_sequential_draw_equals_the_full_row(sampled: bool, count: int) -> None:
    vocab, valid, rank, step = 700, 690, 24, 3
    generator = torch.Generator().manual_seed(0)
    base = torch.randn((count, 2, vocab), generator=generator).to(DEVICE)
    latent = torch.randn((count, rank), generator=generator).to(DEVICE).to(HALF).float()
    w1 = torch.randn((vocab, rank), generator=generator).to(DEVICE, HALF)
    w2 = torch.randn((vocab, rank), generator=generator).to(DEVICE, HALF)
    ids = torch.zeros((count, 5), dtype=torch.int64, device=DEVICE)
    previous = torch.zeros_like(latent)
    temperatures = torch.linspace(0, 2, count).to(DEVICE)
    seeds, positions = torch.arange(count, device=DEVICE) * 7, torch.arange(count, device=DEVICE)
    noise = (temperatures, seeds, positions) if sampled else None
    draw_step(base[:, 1], latent, w2, w1, step, ids[:, 2], previous, noise, 0, valid)
    scores = (base[:, 1] + latent @ w2.float().T)[:, :valid]
    if sampled:
        hot = scores / temperatures.clamp_min(1e-9)[:, None] + gumbel(seeds, positions + step, 0, valid)
        scores = torch.where(temperatures[:, None] > 0, hot, scores)
    best = scores.max(-1).values
    drawn = scores.gather(1, ids[:, 2:3])[:, 0]
    assert (best - drawn < 1e-3).all(), "near ties may fall either way, nothing else may"
    assert ids[:, [0, 1, 3, 4]].eq(0).all()
    assert torch.equal(previous, w1[ids[:, 2]].float())
