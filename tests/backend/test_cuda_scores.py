"""The kernels of the logprob processor (in Triton's interpreter where there is no device): values as by plain
operators, bits that depend on the row alone, whoever asks."""

from __future__ import annotations

# ruff: noqa: E402 (the interpreter must be chosen before Triton is imported)
import importlib.util
import os

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"

from exactspec.backend.cuda.backend import CudaBackend
from exactspec.logprobs.processor import (
    LOGPROB_FLOOR,
    LogprobPlan,
    compute_logprobs,
    lost_row,
    pack_scores,
    unpack_scores,
)
from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowScorer

DEVICE = "cuda" if ON_DEVICE else "cpu"
BACKEND = CudaBackend.__new__(CudaBackend)  # the reductions need no state


def some_rows(count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn((count, vocab), generator=generator).mul(4).round() / 4 * 3  # many ties
    rows[1, 5:] = -torch.inf
    return rows.to(DEVICE), torch.randint(vocab, (count,), generator=generator).to(DEVICE)


@pytest.mark.parametrize(("vocab", "valid", "top_k"), [(5003, 4990, 5), (200, 200, 20), (64, 3, 3), (4096, 4096, 0)])
def test_values_and_ids_are_those_of_plain_operators(vocab: int, valid: int, top_k: int) -> None:
    assert isinstance(BACKEND, RowScorer)
    rows, ids = some_rows(4, vocab)
    got = pack_scores(rows, ids, top_k, valid, BACKEND).cpu()
    want = pack_scores(rows, ids, top_k, valid, TORCH_ROW_OPS).cpu()
    assert got[:, 1 + top_k :].tolist() == want[:, 1 + top_k :].tolist()
    values, others = got[:, : 1 + top_k].view(torch.float32), want[:, : 1 + top_k].view(torch.float32)
    assert torch.equal(values == LOGPROB_FLOOR, others == LOGPROB_FLOOR)
    assert torch.allclose(values, others, atol=1e-5)


def test_a_row_has_the_same_bits_alone_divided_before_and_in_any_company() -> None:
    """What a captured round gives (divisors, some rows left out) is what prompt scoring and lists of ids give."""
    rows, ids = some_rows(6, 5003)
    plans = [LogprobPlan("raw", 5)] * 6
    alone = [compute_logprobs(rows[i : i + 1], [int(ids[i])], plans[:1], 5003, ops=BACKEND)[0] for i in range(6)]
    assert compute_logprobs(rows, ids, plans, 5003, ops=BACKEND) == alone
    assert (
        compute_logprobs(rows, ids, [LogprobPlan("raw", k) for k in (5, 0, 1, 70, 5, 2)], 5003, ops=BACKEND)[4]
        == (alone[4])
    )
    divisors = torch.tensor([1.0, 0.0, 0.7, 1.0, 0.0, 1.3], device=DEVICE)
    room = torch.full((6, 11), -7, dtype=torch.int32, device=DEVICE)
    pack_scores(rows, ids, 5, 5003, BACKEND, divisors, room)
    assert room[[1, 4]].eq(-7).all(), "rows left out are not written"
    for i in (0, 2, 3, 5):
        scaled = rows[i : i + 1] / divisors[i]
        want = compute_logprobs(scaled, [int(ids[i])], plans[:1], 5003, ops=BACKEND)
        assert unpack_scores(room[i : i + 1].cpu().numpy(), [int(ids[i])], [5]) == want
    chosen = compute_logprobs(rows[3:4], [int(ids[3])], [LogprobPlan("raw", 0, (int(ids[3]), 7))], 5003, ops=BACKEND)[0]
    assert chosen.chosen[0] == (int(ids[3]), alone[3].logprob)


def test_a_row_without_a_number_is_reported() -> None:
    rows, ids = some_rows(2, 100)
    rows[0, 7] = torch.nan
    packed = pack_scores(rows, ids, 2, 100, BACKEND).cpu().numpy()
    assert lost_row(unpack_scores(packed, [1, 2], [2, 2])) == 0
    assert lost_row(unpack_scores(packed[1:], [2], [2])) is None
    assert np.isfinite(packed[1:, :3].view(np.float32)).all()
