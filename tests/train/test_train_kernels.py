"""The fused operators in Triton's interpreter against their plain torch twins (and, where marked, on the device)."""

from __future__ import annotations

import pytest
import torch
from train_fakes import run_in_interpreter, run_on_device

from exactspec.train import ops

CASES = """
import torch
from exactspec.train import kernels, ops
torch.manual_seed(0)

def near(a, b, bound=2e-5):
    gap = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)).item()
    assert gap < bound, gap

gate_up = torch.randn(5, 2 * 48)
near(kernels.silu_mul(gate_up), ops.silu_mul(gate_up))
x, branch, weight = torch.randn(6, 40), torch.randn(6, 40), torch.rand(40)
for given in (None, branch):
    for a, b in zip(kernels.add_norm(x, given, weight, 1e-5), ops.add_norm(x, given, weight, 1e-5)):
        near(a, b)
for heads, kv_heads, dim in ((9, 3, 64), (4, 2, 16)):
    positions = torch.tensor([0, 3, 7, 100, 69], dtype=torch.int32)
    angles = torch.rand(128, dim // 2) * 6
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim)
    a, b = qkv.clone(), qkv.clone()
    for which, rows in ((kernels, a), (ops, b)):
        which.rope_(rows, heads + kv_heads, dim, positions, angles.cos(), angles.sin())
    near(a, b)
    k1, v1 = torch.randn(5, kv_heads, 128, dim), torch.randn(5, kv_heads, 128, dim)
    k2, v2 = k1.clone(), v1.clone()
    kernels.write_cache(a, k1, v1, positions, heads)
    ops.write_cache(a, k2, v2, positions, heads)
    assert torch.equal(k1, k2) and torch.equal(v1, v2)
    args = (positions + 1, heads, dim**-0.5)
    near(kernels.decode_attention(a, k1, v1, *args), ops.decode_attention(a, k1, v1, *args))
vocab = 5000  # more than one block, the last one partial
draft, target = torch.randn(3, vocab) * 2, torch.randn(3, vocab) * 2
target[1] = draft[1]
labels, weights = torch.tensor([0, 4999, 77]), torch.rand(3)
for coupling in (None, ops.Coupling(0.4, 0.7, torch.tensor([123456789]), 5)):
    a, b = draft.clone(), draft.clone()
    for one, two in zip(kernels.distance_loss_(a, target, labels, weights, 0.1, 0.9, coupling),
                        ops.distance_loss_(b, target, labels, weights, 0.1, 0.9, coupling)):
        assert (one is None) == (two is None)
        if one is not None:
            near(one + 1, two + 1)
    near(a, b)
logits = torch.randn(4, vocab) * 3
ints = lambda *values: torch.tensor(values, dtype=torch.int32)
heat, least = torch.tensor([0.0, 1.0, 1.0, 0.7]), torch.tensor([0, 0, 1.0, 0])
drawn = kernels.sample(logits, heat, least, ints(1, 2, 3, 4), ints(1, 2, 3, 4))
assert drawn[0] == logits[0].argmax() and drawn[2] == logits[2].argmax()  # greedy; min-p 1 leaves the best alone
rows = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(800, 1)
many = torch.arange(800, dtype=torch.int32)
drawn = kernels.sample(rows, torch.ones(800), torch.zeros(800), many, torch.full_like(many, 7))
share = torch.bincount(drawn.long(), minlength=4) / 800
assert (share - rows[0].exp()).abs().max() < 0.07, share  # 4 standard errors; the seeds are fixed
print("all equal")
"""


def test_kernels_equal_their_twins_in_the_interpreter():
    pytest.importorskip("triton")
    run_in_interpreter(CASES)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_their_twins_on_the_device():
    run_on_device(CASES.replace("2e-5", "2e-3"))


def test_the_written_gradient_is_autograds():
    torch.manual_seed(0)
    logits, target = torch.randn(7, 30, dtype=torch.float64), torch.randn(7, 30, dtype=torch.float64)
    labels, weights = torch.randint(0, 30, (7,)), torch.rand(7, dtype=torch.float64)
    free = logits.clone().requires_grad_()
    ce = torch.nn.functional.cross_entropy(free, labels, reduction="none")
    l1 = (free.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    (weights * (0.3 * ce + 0.7 * l1)).sum().backward()
    written = logits.clone()
    ours = ops.distance_loss_(written, target, labels, weights, 0.3, 0.7)
    assert ours[3:] == (None, None)
    torch.testing.assert_close(written, free.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ours[0].double(), ce.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours[1].double(), l1.detach(), atol=1e-5, rtol=1e-4)


def test_the_coupled_gradient_is_autograds_and_its_noise_is_gumbels():
    torch.manual_seed(0)
    logits, target = torch.randn(7, 30), torch.randn(7, 30)
    labels, weights = torch.randint(0, 30, (7,)), torch.rand(7)
    coupling = ops.Coupling(0.4, 0.7, torch.tensor([11]), 3)
    noise = ops.coupling_noise(coupling.seed, 3, 7, 30)
    drawn = (target + noise).argmax(-1)
    free = logits.clone().requires_grad_()
    coupled = torch.nn.functional.cross_entropy((free + noise) / 0.7, drawn, reduction="none")
    (0.4 * weights * coupled).sum().backward()
    written = logits.clone()
    ours = ops.distance_loss_(written, target, labels, weights, 0.0, 0.0, coupling)
    torch.testing.assert_close(written, free.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ours[3], coupled.detach(), atol=1e-5, rtol=1e-4)
    assert ours[4].tolist() == ((logits + noise).argmax(-1) == drawn).float().tolist()
    many = ops.coupling_noise(torch.tensor([5]), 0, 50, 4000).flatten()
    extremes = -torch.log(-torch.log((torch.tensor([0.0, 2.0**23 - 1]) + 0.5) * 2.0**-23))  # of the hash's range
    assert extremes.isfinite().all()
    assert extremes.min() <= many.min()
    assert many.max() <= extremes.max()
    for point in (-1.0, 0.0, 1.0, 3.0):  # 200,000 draws: 5 standard errors are 0.006
        wanted = torch.tensor(-point).exp().neg().exp()
        assert abs((many <= point).float().mean() - wanted) < 0.006


def test_sampling_follows_temperature_and_min_p():
    """2,000 draws a case, within 5 standard errors: a false alarm in about one of a million runs; seeds are fixed."""
    base = torch.tensor([0.6, 0.3, 0.1]).log()
    many = torch.arange(2000)
    for temperature, min_p in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.4)):
        drawn = ops.sample(
            base.repeat(2000, 1), torch.full((2000,), temperature), torch.full((2000,), min_p), many, many
        )
        wanted = (base / temperature).softmax(-1)
        wanted = torch.where(wanted >= min_p * wanted.max(), wanted, 0.0)
        wanted = wanted / wanted.sum()
        share = torch.bincount(drawn.long(), minlength=3) / 2000
        assert ((share - wanted).abs() <= 5 * (wanted * (1 - wanted) / 2000).sqrt() + 1e-9).all()
