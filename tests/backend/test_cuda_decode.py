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

from exactspec.backend.cuda.confidence import block_confidence
from exactspec.backend.cuda.decode import RoundInputs, draft_rows, draw_step
from exactspec.backend.cuda.sampling import gumbel
from exactspec.backend.cuda.seats import DRAFTS, NUM_FIELDS, Field, judge, make_seats, num_columns, take_seats
from exactspec.backend.cuda.share import share_places, verify_rows
from exactspec.draft.calibration import scale_logits
from exactspec.draft.heads import ConfidenceHead

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


def test_rows_of_a_draft_stand_where_the_page_table_says() -> None:
    rows = draft_rows(some_inputs(), 4, PAGE, 77)
    batch = rows.batch
    assert batch.positions.view(3, 4)[:2].tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert batch.slots.view(3, 4).tolist() == [[6, 7, 28, 29], [8, 9, 10, 11], [-1] * 4]
    assert batch.kv_len.tolist() == [10, 4, 0]
    assert batch.q_start.tolist() == [0, 4, 8, 12]
    assert not batch.causal
    assert (batch.max_kv_len, batch.max_q_len) == (16, 4)
    assert batch.token_ids.view(3, 4).tolist() == [[anchor, 77, 77, 77] for anchor in (11, 22, 33)]
    assert rows.seeds.view(3, 4)[:, 3].tolist() == [-1, 2**40, 5]
    assert rows.output_positions.view(3, 4)[0].tolist() == [2, 3, 4, 5]
    assert rows.temperatures.view(3, 4)[1].tolist() == [0.5] * 4


def test_rows_to_verify_are_an_anchor_and_as_many_drafts_as_have_a_place() -> None:
    """Ragged: two drafts, none, and a request that is inactive; two of seven rows belong to nobody."""
    drafts = integers(1, 2, 3, 4, 5, 6, 7, 8, 9).view(3, 3)
    rows = verify_rows(some_inputs(), integers(2, 0, 0), drafts, 7, PAGE)
    batch = rows.batch
    assert batch.q_start.tolist() == [0, 3, 4, 5]
    assert batch.kv_len.tolist() == [9, 1, 0]
    assert batch.token_ids.tolist() == [11, 1, 2, 22, 33, 0, 0]
    assert batch.positions.tolist()[:4] == [6, 7, 8, 0]
    assert batch.slots.tolist() == [6, 7, 28, 8, -1, -1, -1]
    assert rows.output_positions.tolist()[:4] == [2, 3, 4, 0]
    assert rows.seeds.tolist() == [-1, -1, -1, 2**40, 5, 0, 0]
    assert rows.temperatures.tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.0]
    assert (batch.causal, batch.max_q_len, batch.num_rows) == (True, 4, 7)


@pytest.mark.parametrize(("gamma", "ties"), [(0, False), (5, False), (5, True)])
def test_places_go_to_the_drafts_that_survive_likeliest(gamma: int, ties: bool) -> None:
    """Against a sorted list; requests have limits, caps of their own, and one of them is inactive."""
    count = 19
    generator = torch.Generator().manual_seed(gamma)
    chances = torch.full((count, gamma), 0.5) if ties else torch.rand((count, gamma), generator=generator)
    survival = chances.cumprod(1)
    message = torch.zeros((NUM_FIELDS, count), dtype=torch.int64)
    limits = torch.randint(20, 30, (count,), generator=generator)
    caps = torch.randint(0, 6, (count,), generator=generator)
    message[Field.LIMIT], message[Field.MOST_DRAFTS] = limits, caps.clamp(max=gamma)
    active = torch.ones(count, dtype=torch.int64)
    active[4] = 0
    unread = integers(*[0] * count)
    inputs = RoundInputs(unread, unread + 20, unread, unread, active.to(DEVICE), unread, unread)
    rooms = [max(0, min(int(n) - 22, int(m), gamma)) * int(a) for n, m, a in zip(limits, caps, active, strict=True)]
    order = sorted((-survival[r, k].item(), k, r) for r in range(count) for k in range(rooms[r]))
    for places in (0, 7, 30, count * gamma):
        expected = [sum(owner == r for _, _, owner in order[:places]) for r in range(count)]
        found = share_places(message.to(DEVICE), inputs, survival.to(DEVICE), places)
        assert found.tolist() == expected, places


@pytest.mark.parametrize(("rank", "calibrated"), [(6, True), (0, False)])
def test_confidence_and_survival_of_a_block_in_one_kernel(rank: int, calibrated: bool) -> None:
    """Against the head, the calibration and a running product; a row that is not a number has no chance."""
    count, gamma, width, vocab = 3, 5, 40, 50
    torch.manual_seed(rank)
    head = ConfidenceHead(width, rank, with_markov=rank > 0)
    hidden, w1 = torch.randn(count, gamma, width), torch.randn(vocab, max(rank, 1)).to(HALF)
    hidden[2, 3, 7] = float("nan")
    anchors, drafts = torch.randint(0, vocab, (count,)), torch.randint(0, vocab, (count, gamma))
    temperatures, table = torch.tensor([0.0, 0.4, 3.0]), torch.rand(2, 2, gamma) + 0.5
    before = torch.cat([anchors[:, None], drafts[:, :-1]], dim=1)
    logits = head(hidden, w1[before].float())
    expected = torch.sigmoid(scale_logits(logits, table, temperatures) if calibrated else logits).detach()
    confidence, survival = torch.zeros(2, count, gamma, device=DEVICE).unbind(0)
    block_confidence(
        *(t.to(DEVICE) for t in (hidden, anchors, drafts, w1, head.proj.weight.detach(), head.proj.bias.detach())),
        table.to(DEVICE) if calibrated else None, temperatures.to(DEVICE), confidence, survival,
    )  # fmt: skip
    torch.testing.assert_close(confidence.cpu(), expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(survival.cpu(), expected.nan_to_num(0.0).cumprod(1), rtol=1e-4, atol=1e-5)
    assert (survival[:, 1:] <= survival[:, :-1]).all()


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


def float_bits(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(torch.int32).to(DEVICE, torch.int64)


def test_a_round_starts_from_the_message_or_from_what_the_last_round_left() -> None:
    """Three requests and a row of padding; the second round knows from the host only that they go on."""
    message = torch.zeros((NUM_FIELDS, 6), dtype=torch.int64, device=DEVICE)
    seats = make_seats(6, 5, torch.device(DEVICE))
    inputs = RoundInputs(
        *integers(*[-1] * 20).view(5, 4).unbind(0), torch.ones(4, device=DEVICE),
        torch.zeros((4, 5), dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    for field, values in {
        Field.SEAT: (4, 0, 2, 0), Field.ANCHOR: (7, 8, 9, 0), Field.POSITION: (10, 3, 6, 0), Field.SEED: (5, -6, 7, 0),
        Field.OUTPUT_OFFSET: (-9, 1, 0, 0), Field.LIMIT: (99, 7, 99, 0), Field.ACTIVE: (1, 1, 1, 0),
        Field.MOST_DRAFTS: (3, 3, 1, 0), Field.DECREE: (-1, -1, -1, 0), Field.PAGE_INDEX: (0, 1, -1, -1),
        Field.PAGE: (31, 32, 0, 0),
    }.items():  # fmt: skip
        message[field, :4] = integers(*values)
    message[Field.TEMPERATURE, :4] = float_bits(0.0, 0.5, 1.5, 0.0)
    message[Field.DIVISOR, :4] = float_bits(1.0, 0.0, 1.5, 0.0)
    take_seats(message, seats, inputs)
    assert inputs.anchors[:3].tolist() == [7, 8, 9]
    assert (inputs.output_positions.tolist(), inputs.active.tolist()) == ([1, 4, 6, 0], [1, 1, 1, 0])
    assert inputs.temperatures.tolist() == [0.0, 0.5, 1.5, 0.0]
    assert inputs.page_table[:3].tolist() == [[31, 0, 0, 0, 0], [0, 32, 0, 0, 0], [0] * 5]

    drafts = integers(1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0).view(4, 3)
    lens, q_start = integers(3, 2, 1, 0), integers(0, 4, 7, 9, 10)
    drawn = integers(1, 2, 30, 31, 4, 5, 6, 7, 8, 0, 99)
    survival = torch.tensor([[0.9, 0.5, 0.25]] * 4, device=DEVICE)
    results = torch.zeros((4, num_columns(3)), dtype=torch.int64, device=DEVICE)
    round_of = (message, inputs, seats, drafts, survival, lens, q_start, drawn, results)
    scored = judge(*round_of, score=True)
    assert scored is not None
    # two of three are right; all are right, but only two count before the limit; one counts by the request's own cap
    assert results[:3, :DRAFTS].tolist() == [[2, 3, 3, 0], [2, 2, 2, 4], [1, 1, 1, 7]]
    assert results[:3, DRAFTS : DRAFTS + 3].tolist() == drafts[:3].tolist()
    tokens = results[:3, DRAFTS + 3 : DRAFTS + 7].tolist()
    assert [row[: n + 1] for row, n in zip(tokens, (2, 2, 1), strict=True)] == [[1, 2, 30], [4, 5, 6], [7, 8]]
    assert torch.equal(results[:, DRAFTS + 7 :].int().view(torch.float32), survival)
    assert scored[0].tolist()[:9] == drawn.tolist()[:9]
    assert scored[1].tolist() == [1, 1, 1, 0, 0, 0, 0, 1.5, 1.5, 0, 0]
    assert seats.anchors[[4, 0, 2]].tolist() == [30, 6, 8]
    assert seats.positions[[4, 0, 2]].tolist() == [13, 6, 8]

    message[Field.CARRIED, :3] = 1
    message[Field.PAGE_INDEX, 0], message[Field.PAGE, 0] = 1, 77
    message[Field.DECREE, 2] = 0
    take_seats(message, seats, inputs)
    assert inputs.anchors[:3].tolist() == [30, 6, 8]
    assert inputs.positions[:3].tolist() == [13, 6, 8]
    assert inputs.active.tolist() == [1, 0, 1, 0], "the second has reached its limit of 7 tokens"
    assert inputs.page_table[0].tolist() == seats.page_table[4].tolist() == [31, 77, 0, 0, 0]
    before = seats.positions[0].item()
    judge(*round_of, score=False)
    assert seats.positions[0].item() == before, "who is inactive stays where it was"
    assert (results[2, :2].tolist(), seats.anchors[2].item()) == ([0, 1], 7), "none accepted, by decree"
