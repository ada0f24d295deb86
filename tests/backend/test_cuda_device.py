"""What only a device can show: equal bits of all tiles on real shapes, graphs against eager, early starts or none."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from cuda_cases import ragged_batch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]


@pytest.fixture(scope="module")
def target():
    from exactspec.backend.cuda.backend import CudaBackend
    from exactspec.model.random_weights import random_target
    from exactspec.model.target import TargetModel

    loaded = random_target("smollm2-135m", device="cuda", context_length=1024, num_layers=6)
    return TargetModel(CudaBackend("cuda"), loaded)


@pytest.mark.parametrize(
    ("out", "into", "gated"),
    [(6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False), (960, 576, False),
     (3072, 576, True), (576, 1536, False), (49152, 576, False)],
)  # fmt: skip
def test_all_tiles_of_a_shape_give_the_same_bits(out: int, into: int, gated: bool) -> None:
    from exactspec.backend.cuda.gemm import PLAIN, SILU_MUL
    from exactspec.backend.cuda.linear import CudaLinear

    weight = (torch.randn((out, into), device="cuda") * into**-0.5).bfloat16()
    CudaLinear(weight, activation=SILU_MUL if gated else PLAIN).check_tiles()


def test_rows_alone_in_blocks_and_in_prefill_have_the_same_bits_and_graphs_change_none(target) -> None:
    """One request of 200 tokens: as one prefill, in chunks, row by row at the end; eagerly and by graphs."""
    from exactspec.backend.cuda.graphs import ForwardGraphs

    batch, num_slots = ragged_batch([200], [200], device="cuda")
    batch.token_ids.random_(0, 49152)
    pool = target.make_pool(num_slots)
    whole, captured = target.forward(batch, pool, (1, 3))
    assert captured is not None
    graphs = ForwardGraphs(target, pool, (1, 3), batch.page_size, 4, 64, torch.device("cuda"))
    for pdl in (True, False):
        target.stack.pdl = pdl and target.backend.pdl
        for sizes in ([64, 64, 64, 8], [150, 49, 1], [180, *[1] * 20], [193, 7]):
            pool.k.zero_()
            pool.v.zero_()
            at = 0
            for size in sizes:
                part = _chunk(batch, at, size)
                for forward in (lambda b: target.forward(b, pool, (1, 3)), graphs):
                    hidden, features = forward(part)
                    assert torch.equal(hidden, whole[at : at + size]), (pdl, sizes, at)
                    assert torch.equal(features, captured[at : at + size]), (pdl, sizes, at)
                at += size
    target.stack.pdl = target.backend.pdl


@pytest.mark.parametrize("rows", [1, 16])
def test_early_starts_among_kernels_that_fill_the_device_change_no_bit(rows: int) -> None:
    """Layers of 8B size, where large GEMMs and the small kernels between them run beside each other; many replays."""
    from exactspec.backend.cuda.backend import CudaBackend
    from exactspec.backend.cuda.graphs import GraphCache
    from exactspec.model.random_weights import random_target
    from exactspec.model.target import TargetModel

    target = TargetModel(
        CudaBackend("cuda"), random_target("qwen3-8b", device="cuda", context_length=2048, num_layers=4)
    )
    batch, num_slots = ragged_batch([rows], [1100], device="cuda")
    pool = target.make_pool(num_slots)
    pool.k.normal_()
    pool.v.normal_()
    target.stack.pdl = False
    want, _ = target.forward(batch, pool)
    keys = pool.k.clone()
    target.stack.pdl = target.backend.pdl
    graph = GraphCache().get("forward", rows, lambda: target.forward(batch, pool)[0])
    for replay in range(30):
        assert torch.equal(graph.replay(), want), replay
    assert torch.equal(pool.k, keys)


def _chunk(batch, at: int, size: int):
    from exactspec.types import ForwardBatch

    rows = slice(at, at + size)
    return ForwardBatch(
        token_ids=batch.token_ids[rows], positions=batch.positions[rows], slots=batch.slots[rows],
        q_start=torch.tensor([0, size], dtype=torch.int32, device="cuda"),
        kv_len=torch.tensor([at + size], dtype=torch.int32, device="cuda"), page_table=batch.page_table,
        logit_rows=batch.logit_rows, page_size=batch.page_size, max_kv_len=at + size, max_q_len=size,
    )  # fmt: skip


def test_the_fused_draw_has_the_bits_of_noise_and_argmax_apart() -> None:
    from exactspec.backend.cuda import sampling
    from exactspec.backend.cuda.scores import logsumexp

    logits = torch.randn((64, 49152), device="cuda") * 3
    temperatures = torch.linspace(0.1, 2.0, 64, device="cuda")
    seeds, positions = torch.arange(64, device="cuda"), torch.arange(64, device="cuda") * 3
    ids, _, lse = sampling.draw(logits, temperatures, seeds, positions)
    scores = logits / temperatures[:, None] + sampling.gumbel(seeds, positions, 0, 49152)
    assert torch.equal(ids, scores.argmax(-1))
    torch.testing.assert_close(logsumexp(logits)[1], lse, rtol=1e-6, atol=1e-6)
    assert torch.equal(sampling.draw(logits[7:8], None, None, None)[2], lse[7:8])
