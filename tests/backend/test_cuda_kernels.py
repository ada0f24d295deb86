"""The Triton kernels against their torch twins. On a CPU they run in Triton's interpreter, so each index and mask is
tested without a device; on a device they are compiled. Bits are compared with ==, values with the twins."""

from __future__ import annotations

# ruff: noqa: E402 (the interpreter must be chosen before Triton is imported)
import importlib.util
import os

import pytest
import torch
from cuda_cases import (
    one_request,
    ragged_batch,
    random_layers,
    relative_error,
    rope_table,
    tiny_spec,
)

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported for the first time

from exactspec.backend.base import KVPool
from exactspec.backend.cuda import attention as attn
from exactspec.backend.cuda import elementwise, gemm, sampling, twins
from exactspec.backend.cuda.backend import CudaBackend
from exactspec.backend.cuda.linear import CudaLinear
from exactspec.backend.cuda.stack import CudaStack
from exactspec.backend.cuda.tiles import Tile
from exactspec.backend.torch_ref import noise
from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.errors import DeviceError
from exactspec.types import ForwardBatch

DEVICE = "cuda" if ON_DEVICE else "cpu"
HALF = torch.bfloat16 if ON_DEVICE else torch.float16  # the interpreter multiplies float16, not bfloat16
SLOW = () if ON_DEVICE else (pytest.mark.long,)  # seconds each in the interpreter
TILES = [Tile(16, 32, 64, 4, 3), Tile(64, 32, 32, 4, 3), Tile(64, 64, 64, 4, 3, wide=True)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("with_residual", [True, False])
def test_parts_of_ranks_are_added_in_rank_order(with_residual: bool) -> None:
    parts, residual = randn(3, 5, 72, seed=1), randn(5, 72, seed=2) if with_residual else None
    want = twins.add_parts(parts, residual)
    out = torch.full((5, 72), float("nan"), device=DEVICE) if residual is None else residual
    wide = torch.full((5, 144), float("nan"), device=DEVICE)
    elementwise.add_parts(parts, residual, out, wide[:, 72:])
    assert torch.equal(out, want)
    assert torch.equal(wide[:, 72:], want)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("activation", "name"), [(gemm.PLAIN, "none"), (gemm.SILU_MUL, "silu"), (gemm.GELU_MUL, "gelu_tanh")]
)
def test_gemm_with_every_epilogue_equals_its_twin(tile: Tile, activation: int, name: str) -> None:
    rows, depth, cols = 37, 96, 72
    twice = 1 if activation == gemm.PLAIN else 2
    x, w = randn(rows, depth, seed=1).to(HALF), (randn(cols * twice, depth, seed=2) * 0.2).to(HALF)
    bias, residual = randn(cols * twice, seed=3), randn(rows, cols, seed=4)
    out = torch.full((rows, cols), float("nan"), device=DEVICE)
    wide = torch.full((rows, 2 * cols), float("nan"), device=DEVICE)
    gemm.gemm(x, w, out, tile, bias, residual, wide[:, cols:], activation)
    assert relative_error(out, twins.gemm(x, w, bias, residual, name)) < 1e-5
    assert torch.equal(out, wide[:, cols:])
    assert wide[:, :cols].isnan().all(), "the copy must not touch its neighbours"
    in_place = residual.clone()
    gemm.gemm(x, w, in_place, tile, bias, in_place, None, activation, residual_first=True)
    assert torch.equal(in_place, out), "when the residual is read must not matter"


def test_rms_norm_and_its_branch_form() -> None:
    x, weight, residual = randn(5, 96), 1 + 0.1 * randn(96, seed=1), randn(5, 96, seed=2)
    want = twins.rms_norm(x, weight, 1e-5)
    assert relative_error(elementwise.rms_norm(x, weight, 1e-5, torch.empty_like(x)), want) < 1e-6
    half = elementwise.rms_norm(x, weight, 1e-5, torch.empty((5, 96), dtype=HALF, device=DEVICE))
    assert relative_error(half, want) < 4e-3
    copy = torch.empty((5, 192), device=DEVICE)
    total = elementwise.add_rms_norm(x, weight, 1e-5, residual, residual.clone(), copy[:, 96:])
    assert relative_error(total, residual + want) < 1e-6
    assert torch.equal(copy[:, 96:], total)


@pytest.mark.parametrize("rotary", [32, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_equals_its_twin_and_padding_writes_nothing(rotary: int, normed: bool) -> None:
    q_heads, kv_heads, d, rows = 6, 2, 32, 7
    qkv = randn(rows, (q_heads + 2 * kv_heads) * d)
    norms = (1 + 0.1 * randn(d, seed=1), 1 + 0.1 * randn(d, seed=2)) if normed else (None, None)
    rope = rope_table(64, rotary, device=DEVICE)
    positions = torch.tensor([3, 0, 63, 5, 9, 1, 2], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 5, 2, -1, 9, 7, 8], dtype=torch.int32, device=DEVICE)
    pools = [torch.full((12, kv_heads, d), 7.0, dtype=HALF, device=DEVICE) for _ in range(4)]
    q = torch.empty((rows, q_heads, d), dtype=HALF, device=DEVICE)
    elementwise.rope_write(qkv, *norms, rope, positions, slots, q, pools[0], pools[1], 1e-5)
    want_q = twins.rope_write(qkv, *norms, rope, positions, slots, q_heads, pools[2], pools[3], 1e-5)
    assert relative_error(q, want_q) < 4e-3
    assert relative_error(pools[0], pools[2]) < 2e-3
    assert torch.equal(pools[1], pools[3])
    context = [torch.full((12, kv_heads, d), 7.0, dtype=HALF, device=DEVICE) for _ in range(2)]
    kv = qkv[:, q_heads * d :].contiguous()
    elementwise.rope_write(kv, None, norms[1], rope, positions, slots, None, context[0], context[1], 1e-5)
    assert torch.equal(context[0], pools[0]), "write_context must give the bits of the forward"
    assert torch.equal(context[1], pools[1])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, window: int | None, whole: bool
) -> torch.Tensor:
    rows, heads, d = q.shape
    plan = attn.make_plan(batch, heads, k.shape[1], d, num_sms=3, whole=whole)
    out = torch.full((rows, heads * d), float("nan"), dtype=HALF, device=DEVICE)
    return attn.attention(q, k, v, batch, plan, d**-0.5, window, out)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(6, 2, 32), pytest.param(4, 1, 24, marks=SLOW)])
def test_attention_ragged_batch_equals_its_twin_and_its_parts(
    window: int | None, causal: bool, heads: int, kv_heads: int, d: int
) -> None:
    batch, num_slots = ragged_batch([1, 8, 3, 30, 5], [1290, 515, 3, 40, 258], causal, DEVICE)
    q = randn(batch.num_rows, heads, d).to(HALF)
    k, v = randn(num_slots, kv_heads, d, seed=1).to(HALF), randn(num_slots, kv_heads, d, seed=2).to(HALF)
    whole, split = (attend(q, k, v, batch, window, whole) for whole in (True, False))
    assert relative_error(whole, twins.attention(q, k, v, batch, d**-0.5, window)) < 8e-3
    assert torch.equal(whole, split), "the two schedules must give the same bits"
    for r in (0, 1, 3):
        alone, rows = one_request(batch, r)
        assert torch.equal(attend(q[rows], k, v, alone, window, r == 1), whole[rows]), "a request alone"
    if causal:
        single, rows = one_request(batch, 1, first_row=4, num_rows=1)
        assert torch.equal(attend(q[rows], k, v, single, window, False), whole[rows]), "a row alone"


def test_padding_requests_and_rows_of_a_captured_batch_change_nothing() -> None:
    batch, num_slots = ragged_batch([2, 4], [300, 20], device=DEVICE)
    k, v = randn(num_slots, 2, 32, seed=1).to(HALF), randn(num_slots, 2, 32, seed=2).to(HALF)
    q = randn(9, 6, 32).to(HALF)
    padded = ForwardBatch(
        token_ids=torch.zeros(9, dtype=torch.int64, device=DEVICE),
        positions=torch.cat([batch.positions, batch.positions.new_zeros(3)]),
        slots=torch.cat([batch.slots, batch.slots.new_full((3,), -1)]),
        q_start=torch.cat([batch.q_start, batch.q_start.new_full((3,), 6)]),
        kv_len=torch.cat([batch.kv_len, batch.kv_len.new_zeros(3)]),
        page_table=torch.cat([batch.page_table, batch.page_table.new_zeros((3, batch.page_table.shape[1]))]),
        logit_rows=batch.logit_rows, page_size=batch.page_size, max_kv_len=4096, max_q_len=9,
    )  # fmt: skip
    want = attend(q[:6], k, v, batch, None, False)
    for whole in (False, True):
        assert torch.equal(attend(q, k, v, padded, None, whole)[:6], want)


def test_noise_has_the_reference_integers_and_depends_on_its_counter_alone() -> None:
    seeds = torch.tensor([1, 2**40 + 3, -5, 1], device=DEVICE)
    positions = torch.tensor([0, 7, 2**33, 1], device=DEVICE)
    got = sampling.gumbel(seeds, positions, 3, 5000)
    want = noise.gumbel(seeds, positions, 3, 5000)
    assert float((got - want).abs().max()) < 2e-5
    assert torch.equal(sampling.gumbel(seeds[1:2], positions[1:2], 3, 9000)[:, :5000], got[1:2])
    assert not torch.equal(got[0], got[3])


def test_draw_equals_its_twin_with_ties_greedy_rows_and_invalid_columns() -> None:
    vocab, valid = 5003, 4990
    logits = randn(4, vocab) * 3
    logits[:, valid:] = 100.0
    logits[0, [40, 4500, 77]] = 50.0  # a tie: the lowest id wins
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3], device=DEVICE)
    seeds = torch.tensor([1, 2, 3, 4], device=DEVICE)
    positions = torch.tensor([9, 8, 7, 6], device=DEVICE)
    ids, logprobs, lse = sampling.draw(logits, temperatures, seeds, positions, 1, valid)
    gumbel = sampling.gumbel(seeds, positions, 1, vocab)
    want = twins.draw(logits[:, :valid], temperatures, gumbel[:, :valid])
    assert ids.tolist() == want[0].tolist()
    assert ids[0] == 40
    assert relative_error(logprobs, want[1]) < 1e-5
    assert relative_error(lse, want[2]) < 1e-6
    greedy = sampling.draw(logits, None, None, None, valid_vocab=valid)
    assert greedy[0].tolist() == logits[:, :valid].argmax(-1).tolist()
    assert torch.equal(greedy[2], lse)


@pytest.mark.parametrize("everything", [pytest.param(False, marks=SLOW), True])
def test_stack_equals_the_torch_stack_and_captures(everything: bool) -> None:
    spec = tiny_spec(activation="gelu_tanh" if everything else "silu")
    layers = random_layers(spec, DEVICE, HALF, everything=everything)
    ropes = [rope_table(400, 32, device=DEVICE), rope_table(400, 32, 500.0, DEVICE)]
    batch, num_slots = ragged_batch([2, 5, 9], [2, 5, 9], device=DEVICE)
    shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
    pools = [KVPool(*(torch.zeros(shape, dtype=HALF, device=DEVICE) for _ in range(2))) for _ in range(2)]
    x = randn(batch.num_rows, spec.hidden_size)
    before = x.clone()
    stack = CudaStack(spec, layers, ropes, exact=True, pdl=False, num_sms=3)
    got, captured = stack.forward(x, batch, pools[0], (2, 0))
    want, want_captured = TorchBackend(DEVICE).make_stack(spec, layers, ropes).forward(x, batch, pools[1], (2, 0))
    assert torch.equal(x, before), "the input must survive"
    assert relative_error(got, want) < 2e-2
    assert captured is not None
    assert want_captured is not None
    assert relative_error(captured, want_captured) < 2e-2
    assert torch.equal(captured[:, : spec.hidden_size], got)
    for mine, theirs in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
        assert relative_error(mine, theirs) < 2e-2
    stack.write_context(x, batch.positions, batch.slots, pools[0])
    TorchBackend(DEVICE).make_stack(spec, layers, ropes).write_context(x, batch.positions, batch.slots, pools[1])
    assert relative_error(pools[0].k, pools[1].k) < 1e-2
    assert relative_error(pools[0].v, pools[1].v) < 1e-2


def test_row_reductions_break_ties_by_id_and_each_row_stands_for_itself() -> None:
    backend = CudaBackend.__new__(CudaBackend)  # the reductions need no state
    logits = randn(5, 1000).mul(2).round() / 2  # many ties
    logits[3, 10:] = -torch.inf
    logits[4] = torch.where(logits[4] == 0, -0.0, logits[4])
    values, ids = backend.topk_rows(logits, 12)
    for row, got in zip(logits.tolist(), ids.tolist(), strict=True):
        assert got == sorted(range(1000), key=lambda i: (-row[i], i))[:12]
    assert torch.equal(values, logits.gather(1, ids))
    assert backend.argmax_rows(logits).tolist() == ids[:, 0].tolist()
    greatest, lse = backend.logsumexp_rows(logits)
    assert torch.equal(greatest, logits.amax(-1))
    assert relative_error(lse, torch.logsumexp(logits.double(), -1)) < 1e-6
    assert torch.equal(backend.logsumexp_rows(logits[2:3])[1], lse[2:3])


@pytest.mark.parametrize("gated", [False, True])
def test_the_self_check_passes_good_tiles_and_stops_at_a_tile_with_other_bits(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = randn(96, 64).to(HALF)
    linear = CudaLinear(weight, activation=gemm.SILU_MUL if gated else gemm.PLAIN, pdl=False, num_sms=3)
    linear.check_tiles(rows=150)
    honest = gemm.gemm

    def one_tile_rounds(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: Tile, *rest: object) -> torch.Tensor:
        result = honest(x, w, out, tile, *rest)
        return result.mul_(1 + 2**-20) if tile.rows == 64 else result

    monkeypatch.setattr(gemm, "gemm", one_tile_rounds)
    with pytest.raises(DeviceError, match="rows=64"):
        linear.check_tiles(rows=150)
