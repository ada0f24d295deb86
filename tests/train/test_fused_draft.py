"""The fused training forward of the draft: the same values and gradients as the network that serving uses."""

from __future__ import annotations

import pytest
import torch
from train_fakes import (
    blocks_of,
    frozen,
    random_batch,
    run_in_interpreter,
    run_on_device,
    small_draft,
    small_recipe,
    small_target,
)

from exactspec.train import draft_ops, objective
from exactspec.train.blocks import block_attend, block_input_ids, context_positions
from exactspec.train.fused import can_fuse, fused_forward

ALGORITHMS = ("dspark", "dflash")


def both_ways(algorithm, **changes):
    """(states, gradients) by the plain network and by the fused forward, for one random loss over used rows."""
    loaded = small_target()
    recipe = small_recipe(algorithm, **changes)
    model, target = small_draft(loaded, recipe), frozen(loaded)
    blocks = blocks_of(random_batch([60, 17, 9], [5, 12, 6], 256), recipe)
    features, _ = target.forward(blocks.token_ids, model.config.target_layer_ids)
    embeddings = target.embed_rows(block_input_ids(blocks, model.config.mask_token_id, model.config.block_size))
    attend = block_attend(blocks, model.config.block_size, target.dtype)
    ways = {
        "plain": lambda: model(features, embeddings, context_positions(blocks), blocks.anchors, attend),
        "fused": lambda: fused_forward(model, features, embeddings, blocks.anchors, draft_ops.TORCH),
    }
    results = {}
    for name, way in ways.items():
        model.zero_grad()
        states = way()
        (states * torch.randn(states.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
        results[name] = (
            states.detach(),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )
    return results


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_states_and_gradients_are_those_of_the_plain_network(algorithm):
    results = both_ways(algorithm)
    torch.testing.assert_close(results["fused"][0], results["plain"][0], atol=2e-5, rtol=1e-4)
    wanted = results["plain"][1]
    assert wanted.keys() == results["fused"][1].keys()
    assert len(wanted) > 20
    for name, grad in results["fused"][1].items():
        torch.testing.assert_close(grad, wanted[name], atol=3e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_only_drafts_without_biases_are_fused():
    model = small_draft(small_target(), small_recipe("dspark"))
    assert can_fuse(model)
    model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(
        torch.zeros(model.layers[0].self_attn.q_proj.out_features)
    )
    assert not can_fuse(model)


def test_anchors_rise_along_a_sequence():
    """The attention kernel stops at the last anchor of its blocks: in any other order it would work in vain."""
    recipe = small_recipe("dspark", num_anchors=12)
    blocks = blocks_of(random_batch([60, 40], [5, 12], 256), recipe)
    for row in blocks.anchors.tolist():
        assert row == sorted(row)


CASES = """
import torch
from exactspec.train import block_attention, draft_kernels, draft_ops, kernels
torch.manual_seed(0)

def near(a, b, bound=2e-5):
    gap = ((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)).item()
    assert gap < bound, gap

def same(name, *args, where=draft_kernels):
    for a, b in zip(getattr(where, name)(*args), getattr(draft_ops, name)(*args)):
        assert (a is None) == (b is None)
        if a is not None:
            near(a, b)

x, branch, weight, grad, more = (torch.randn(shape) for shape in ((70, 40), (70, 40), (40,), (70, 40), (70, 40)))
for given in (None, branch):
    for a, b in zip(kernels.add_norm(x, given, weight, 1e-5), draft_ops.norm_forward(x, given, weight, 1e-5)):
        near(a, b)
    same("norm_backward", x, weight, 1e-5, grad, None if given is None else more)
gate_up = torch.randn(5, 2 * 48) * 3
near(draft_kernels.silu_mul_backward(gate_up, x[:5].repeat(1, 2)[:, :48].contiguous()),
     draft_ops.silu_mul_backward(gate_up, x[:5].repeat(1, 2)[:, :48].contiguous()))
for heads, kv, dim in ((9, 3, 64), (4, 2, 16)):
    total = heads + 2 * kv
    rows, outer = torch.randn(33, total * dim), torch.randn(33, total * dim)
    angles, positions = torch.rand(128, dim // 2) * 6, torch.randint(0, 128, (33,), dtype=torch.int32)
    for norms in (None, torch.rand(heads + kv, dim) + 0.5):
        rest = (positions, angles.cos(), angles.sin(), heads + kv, 1e-5)
        near(draft_kernels.heads_forward(rows, norms, *rest), draft_ops.heads_forward(rows, norms, *rest))
        same("heads_backward", rows, norms, *rest, outer)
    many, few = torch.randint(1, 130, (2, 11)).sort(1).values, torch.tensor([[1], [63]])
    for n, length, anchors in ((7, 130, many), (8, 64, few)):
        rows = torch.randn(2, anchors.shape[1] * n, total, dim)
        context = torch.randn(2, length, 2 * kv, dim)
        outer = torch.randn(2, anchors.shape[1] * n, heads, dim)
        out, kept = block_attention.attention_forward(rows, context, anchors, kv, dim**-0.5)
        wanted, weights = draft_ops.attention_forward(rows, context, anchors, kv, dim**-0.5)
        near(out, wanted)
        ours = block_attention.attention_backward(rows, context, anchors, kv, dim**-0.5, out, kept, outer)
        theirs = draft_ops.attention_backward(rows, context, anchors, kv, dim**-0.5, wanted, weights, outer)
        for a, b in zip(ours, theirs):
            near(a, b)
print("all equal")
"""


def test_kernels_equal_their_twins_in_the_interpreter():
    pytest.importorskip("triton")
    run_in_interpreter(CASES)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_their_twins_on_the_device():
    """Float32 products of Triton's tl.dot run in tf32 there."""
    run_on_device(CASES.replace("2e-5", "3e-3"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_objective_takes_the_fused_way_and_gives_the_same_loss(algorithm, monkeypatch):
    loaded = small_target()
    recipe = small_recipe(algorithm)
    model, target = small_draft(loaded, recipe), frozen(loaded)
    blocks = blocks_of(random_batch([30, 17, 9], [5, 12, 6], 256), recipe)
    plain = objective.evaluate(model, target, blocks, recipe).loss
    monkeypatch.setattr(objective, "_fused_operators", lambda device: draft_ops.TORCH)
    torch.testing.assert_close(objective.evaluate(model, target, blocks, recipe).loss, plain)
