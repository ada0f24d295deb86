"""Row reductions of logits against torch, with ties, infinities and NaN."""

from __future__ import annotations

import pytest
import torch

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.errors import RequestError

SHAPES = [(1, 1), (3, 15), (2, 64), (5, 4097), (9, 49152)]


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(2)


def logits(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 8


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_argmax(backend: CpuBackend, rows: int, width: int) -> None:
    x = logits(rows, width)
    assert torch.equal(backend.argmax_rows(x), x.argmax(1))


def test_argmax_ties_go_to_the_lowest_id(backend: CpuBackend) -> None:
    x = torch.zeros(1, 9000)
    for ids in ([0, 1], [5, 21, 22], [4096, 4095], [8999, 8500], [17, 8999]):
        y = x.clone()
        y[0, ids] = 1.0
        assert backend.argmax_rows(y).item() == min(ids)
    assert backend.argmax_rows(x).item() == 0
    assert backend.argmax_rows(torch.full((1, 70), -torch.inf)).item() == 0


def test_a_nan_is_never_chosen(backend: CpuBackend) -> None:
    x = logits(1, 300)
    best = x.argmax().item()
    x[0, [0, 100, 299]] = torch.nan
    assert backend.argmax_rows(x).item() == best
    assert best in backend.topk_rows(x, 5)[1].tolist()[0]
    assert not backend.topk_rows(x, 5)[0].isnan().any()


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_logsumexp(backend: CpuBackend, rows: int, width: int) -> None:
    x = logits(rows, width)
    top, total = backend.logsumexp_rows(x)
    assert torch.equal(top, x.amax(1))
    assert torch.allclose(total.double(), x.double().logsumexp(1), rtol=1e-6, atol=1e-6)
    for r in range(rows):
        assert torch.equal(backend.logsumexp_rows(x[r : r + 1])[1], total[r : r + 1])
    backend.set_num_threads(1)
    assert torch.equal(backend.logsumexp_rows(x)[1], total)
    backend.set_num_threads(2)


def test_masked_logits(backend: CpuBackend) -> None:
    x = torch.full((3, 9000), -torch.inf)
    x[0, 8000] = 3.0
    x[1, [1, 5000]] = torch.tensor([-200.0, -200.0])
    top, total = backend.logsumexp_rows(x)
    assert top.tolist() == [3.0, -200.0, -torch.inf]
    assert total[0].item() == 3.0
    assert total[1].item() == pytest.approx(-200 + 0.6931472)
    assert total[2].item() == -torch.inf


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_topk(backend: CpuBackend, rows: int, width: int) -> None:
    x = logits(rows, width)
    for k in {1, min(5, width), min(20, width), min(130, width)}:
        values, ids = backend.topk_rows(x, k)
        expected = torch.sort(x, dim=1, descending=True, stable=True)
        assert torch.equal(values, expected.values[:, :k])
        assert torch.equal(ids, expected.indices[:, :k])


def test_topk_orders_equal_values_by_id(backend: CpuBackend) -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0] * 50])
    expected = torch.sort(x, dim=1, descending=True, stable=True).indices
    for k in (1, 3, 150, 200, 300):
        assert torch.equal(backend.topk_rows(x, k)[1], expected[:, :k])


def test_slices_of_wider_rows_are_taken_as_they_are(backend: CpuBackend) -> None:
    wide = logits(4, 5000)
    x = wide[:, :4500]
    assert torch.equal(backend.argmax_rows(x), x.argmax(1))
    assert torch.equal(backend.logsumexp_rows(x)[1], backend.logsumexp_rows(x.contiguous())[1])
    assert torch.equal(backend.topk_rows(x, 9)[1], backend.topk_rows(x.contiguous(), 9)[1])
    assert torch.equal(backend.argmax_rows(wide.T.contiguous().T), wide.argmax(1))


def test_k_beyond_the_row_is_refused(backend: CpuBackend) -> None:
    for k in (0, 5):
        with pytest.raises(RequestError, match="k"):
            backend.topk_rows(torch.zeros(1, 4), k)
