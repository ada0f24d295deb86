"""Row reductions of every kind of device: equal orders, and a row's bits alone equal its bits among others."""

import pytest
import torch
from sampling.row_fakes import HashBackend, make_group

from exactspec.errors import DeviceError
from exactspec.logprobs.processor import LogprobPlan, compute_logprobs, row_logprobs
from exactspec.sampling.filters import Filters, filter_by_sorting, kept_ids
from exactspec.sampling.row_ops import TORCH_ROW_OPS, RowOps, row_ops
from exactspec.sampling.sampler import Sampler, sampling_support

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def native():
    from exactspec.backend.cpu.backend import CpuBackend

    try:
        return CpuBackend(2)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["torch", "native"])
def ops(request) -> RowOps:
    return TORCH_ROW_OPS if request.param == "torch" else row_ops(native())


def ragged_rows(width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(33, width, generator=generator) * torch.linspace(0.5, 9, 33)[:, None]
    rows[3, ::2] = -torch.inf
    rows[4, 1:] = -torch.inf
    rows[5] = 7.0
    return (rows * 8).round() / 8


@pytest.mark.parametrize("width", [5, 300, 1001, 4096, 49152])
def test_a_row_is_the_same_alone_and_among_others(ops, width):
    rows = ragged_rows(width)
    together = (ops.argmax_rows(rows), *ops.logsumexp_rows(rows), *ops.topk_rows(rows, min(50, width)))
    for first, count in ((0, 1), (7, 1), (3, 2), (30, 3), (1, 17)):
        part = rows[first : first + count]
        for source in (part, part.clone()):
            alone = (ops.argmax_rows(source), *ops.logsumexp_rows(source), *ops.topk_rows(source, min(50, width)))
            for one, many in zip(alone, together, strict=True):
                assert torch.equal(one, many[first : first + count])


@pytest.mark.parametrize("width", [5, 300, 1001, 49152])
def test_the_numbers_are_right(ops, width):
    rows = ragged_rows(width)
    assert torch.equal(ops.argmax_rows(rows), rows.sort(dim=-1, descending=True, stable=True).indices[:, 0])
    greatest, lse = ops.logsumexp_rows(rows)
    assert torch.equal(greatest, rows.amax(-1))
    assert torch.allclose(lse.double(), rows.double().logsumexp(-1), atol=1e-5, rtol=2e-7)
    assert lse[4] == rows[4, 0]  # a single possible token is certain: logprob exactly 0.0
    for k in {1, min(width, 20), min(width, 200)}:
        values, ids = ops.topk_rows(rows, k)
        wanted = rows.sort(dim=-1, descending=True, stable=True)
        assert torch.equal(ids, wanted.indices[:, :k])
        assert torch.equal(values, wanted.values[:, :k])


def test_filters_and_logprobs_on_the_devices_kernels(ops):
    rows = ragged_rows(3000)
    filters = [Filters(k, p, m) for k in (-1, 3, 500) for p in (1.0, 0.9, 0.5) for m in (0.0, 0.1, 1.0)] + [
        Filters(-1, 0.99, 0.0)
    ] * 6
    dense = filter_by_sorting(rows, filters, ops)
    for kept_row, ids in zip(dense, kept_ids(rows, filters, ops), strict=True):
        finite = ids[kept_row[ids] > -torch.inf]
        assert finite.sort().values.tolist() == (kept_row > -torch.inf).nonzero()[:, 0].tolist()
    plans = [LogprobPlan("raw", k, (0, 0)) for k in (0, 5, 100)] * 11
    got = compute_logprobs(rows, list(range(33)), plans, 3000, ops=ops)
    for a, b in zip(got, compute_logprobs(rows, list(range(33)), plans, 3000), strict=True):
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert a.logprob == pytest.approx(b.logprob, abs=2e-5, rel=1e-6)


class NativeHash(HashBackend):
    """The noise of the tests with the native row reductions."""

    def __init__(self):
        super().__init__()
        ops = native()
        self.argmax_rows, self.logsumexp_rows, self.topk_rows = ops.argmax_rows, ops.logsumexp_rows, ops.topk_rows


def test_a_backend_that_offers_its_own_reductions_draws_the_same_tokens():
    fields = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}]
    groups = [make_group(seed=i, drafts=[1], **f) for i, f in enumerate(fields)]
    logits = torch.randn(10, 1000, generator=torch.Generator().manual_seed(0)) * 3
    own = Sampler(NativeHash(), 1000, 990, (3,)).sample(logits, groups)
    plain = Sampler(HashBackend(), 1000, 990, (3,)).sample(logits, groups)
    assert own.ops is own.backend
    assert plain.ops is TORCH_ROW_OPS
    assert torch.equal(own.token_ids, plain.token_ids)
    assert torch.equal(own.processed(range(10)), plain.processed(range(10)))
    for (ids, values), (other_ids, others) in zip(
        sampling_support(own, range(4, 10)), sampling_support(plain, range(4, 10)), strict=True
    ):
        assert ids == other_ids
        assert values == pytest.approx(others, abs=1e-5)
    tokens = own.token_ids.tolist()
    entries = row_logprobs(own, range(10), tokens, [LogprobPlan("processed", 3)] * 10, 990)
    assert entries[0].logprob == 0.0
    assert [e.token_id for e in entries] == tokens


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("width", [300, 1001, 4099, 49152])
def test_rows_on_a_gpu(width):
    rows = ragged_rows(width).cuda()
    ops = TORCH_ROW_OPS
    k = min(50, width)
    together = (ops.argmax_rows(rows), *ops.logsumexp_rows(rows), *ops.topk_rows(rows, k))
    filters = [Filters(-1, 0.9, 0.0), Filters(5, 0.9, 0.0), Filters(-1, 1.0, 0.1)] * 11
    dense = filter_by_sorting(rows, filters)
    assert torch.equal(together[0].cpu(), rows.cpu().sort(dim=-1, descending=True, stable=True).indices[:, 0])
    assert torch.equal(together[4].cpu(), TORCH_ROW_OPS.topk_rows(rows.cpu(), k)[1])
    for first, count in ((0, 1), (7, 1), (3, 2), (30, 3), (1, 17)):
        part = rows[first : first + count]
        alone = (ops.argmax_rows(part), *ops.logsumexp_rows(part), *ops.topk_rows(part, k))
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one, many[first : first + count])
        assert torch.equal(filter_by_sorting(part, filters[first : first + count]), dense[first : first + count])


@pytest.mark.cuda
@needs_gpu
def test_draws_on_a_gpu_equal_themselves_alone():
    from exactspec.backend.torch_ref.backend import TorchBackend

    backend = TorchBackend("cuda")
    fields = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 4, "presence_penalty": 1.0}]
    groups = [make_group(seed=i, drafts=[1, 2], **f) for i, f in enumerate(fields)]
    logits = torch.randn(12, 1001, generator=torch.Generator().manual_seed(0)).cuda() * 3
    result = Sampler(backend, 1001, 990, (3,)).sample(logits, groups)
    for g, group in enumerate(groups):
        part = list(range(3 * g, 3 * g + 3))
        alone = Sampler(backend, 1001, 990, (3,)).sample(logits[part].clone(), [group])
        assert torch.equal(alone.token_ids, result.token_ids[part])
        assert torch.equal(alone.processed([0, 1, 2]), result.processed(part))
        plans = [LogprobPlan("processed", 3)] * 3
        tokens = alone.token_ids.tolist()
        assert row_logprobs(alone, [0, 1, 2], tokens, plans, 990) == row_logprobs(result, part, tokens, plans, 990)
