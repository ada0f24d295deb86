"""Products with prepacked weights and the RMS norm: values, and a row's bits whatever stands around it."""

from __future__ import annotations

import pytest
import torch

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (5, 33), (32, 64), (100, 577), (960, 576), (65, 1536)])
def test_values(backend: CpuBackend, out: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(out)
    weight, x = torch.randn(out, width, generator=g).to(dtype), torch.randn(9, width, generator=g)
    bias = torch.randn(out, generator=g)
    # Both sides multiply the same rounded numbers; only the order of a float32 sum of `width` terms differs.
    truth = x.to(dtype).double() @ weight.double().T
    close = {"rtol": 0, "atol": 1e-6 * width**0.5 * 4}
    assert torch.allclose(backend.make_linear(weight)(x).double(), truth, **close)
    assert torch.allclose(backend.make_linear(weight, bias)(x).double(), truth + bias, **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 1536, 63])
def test_a_rows_bits_do_not_depend_on_the_other_rows(backend: CpuBackend, width: int, dtype: torch.dtype) -> None:
    linear = backend.make_linear(torch.randn(97, width).to(dtype), torch.randn(97))
    x = torch.randn(100, width)
    one_by_one = torch.cat([linear(row[None]) for row in x])
    for n in (*range(1, 34), 64, 100):
        assert torch.equal(linear(x[:n]), one_by_one[:n]), n
        assert torch.equal(linear(x[100 - n :]), one_by_one[100 - n :]), n
    backend.set_num_threads(1)
    assert torch.equal(linear(x), one_by_one)
    backend.set_num_threads(2)


def test_no_rows_is_not_an_error(backend: CpuBackend) -> None:
    assert backend.make_linear(torch.ones(3, 4))(torch.empty(0, 4)).shape == (0, 3)


def test_wrong_shapes_and_dtypes_are_named(backend: CpuBackend) -> None:
    with pytest.raises(ConfigError, match=r"\[rows, 4\], got \[2, 5\]"):
        backend.make_linear(torch.ones(3, 4))(torch.ones(2, 5))
    with pytest.raises(ConfigError, match="float64"):
        backend.make_linear(torch.ones(3, 4, dtype=torch.float64))
    with pytest.raises(ConfigError, match="bias"):
        backend.make_linear(torch.ones(3, 4), torch.ones(4))


@pytest.mark.parametrize("width", [1, 15, 16, 64, 100, 576, 4096])
def test_rms_norm(backend: CpuBackend, width: int) -> None:
    x, w = torch.randn(33, width) * 3, torch.randn(width)
    got = backend.rms_norm(x, w, 1e-5)
    truth = torch.nn.functional.rms_norm(x.double(), (width,), w.double(), 1e-5)
    assert torch.allclose(got.double(), truth, rtol=1e-5, atol=1e-6)
    for n in (1, 2, 17):
        assert torch.equal(backend.rms_norm(x[:n], w, 1e-5), got[:n])


def test_weights_are_freed_with_their_owner(backend: CpuBackend) -> None:
    """Packing 64 MB 12 times, one after the other, fits in 300 MB because each is given back."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    weight = torch.zeros(4096, 4096)
    for _ in range(12):
        backend.make_linear(weight)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 * 1024
