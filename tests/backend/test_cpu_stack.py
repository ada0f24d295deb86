"""The native stack: values against plain float32 torch, and bits against itself in every way rows can be cut."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from cpu_cases import Pages, kv_at, linear, make_layers, make_rope, make_spec, reference_forward, rms_norm, rotate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exactspec.backend.base import StackSpec
from exactspec.backend.cpu.backend import CpuBackend
from exactspec.backend.cpu.stack import CpuStack
from exactspec.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16)
N = 150  # rows of most sequences here: three key blocks, the last one partly filled

# float32: sums of a few hundred products in another order. bfloat16: queries and softmax weights are rounded as well
# (2^-9 relative each), on top of rounding points that flip between the two computations.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}

FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "biases": ({}, {"biases": True}),
    "qk_norm": ({}, {"qk_norm": True}),
    "gemma": ({"activation": "gelu_tanh", "attention_scale": 0.1}, {"post_norms": True, "qk_norm": True}),
    "windows": ({"num_layers": 3, "windows": (20, None, 70), "rope_index": (0, 1, 0)}, {}),
    "one head": ({"num_heads": 1, "num_kv_heads": 1, "num_layers": 1}, {}),
    "wide group": ({"num_heads": 14, "num_kv_heads": 2, "num_layers": 1}, {}),
    "head 80": ({"head_dim": 80, "num_layers": 1}, {"biases": True}),
    "head 96": ({"head_dim": 96, "num_layers": 1}, {}),
    "head 128": ({"head_dim": 128, "num_layers": 1}, {"qk_norm": True}),
    "head 256": ({"head_dim": 256, "num_layers": 1, "num_heads": 4}, {}),
    "odd widths": ({"hidden_size": 37, "intermediate_size": 45}, {"biases": True, "post_norms": True}),
}


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(2)


def build(backend: CpuBackend, name: str, dtype: torch.dtype) -> tuple[StackSpec, Any, Any, CpuStack]:
    spec_changes, layer_changes = FEATURES[name]
    spec = make_spec(**spec_changes)
    layers = make_layers(spec, dtype, **layer_changes)
    ropes = [make_rope(spec), make_rope(spec, theta=1e6, rotary=spec.head_dim // 2)]
    return spec, layers, ropes, backend.make_stack(spec, layers, ropes)


def run(
    backend: CpuBackend, stack: CpuStack, x: Tensor, cuts: list[int], dtype: torch.dtype, pages: Pages | None = None
) -> Tensor:
    """x through the stack in chunks that end at `cuts`, over a pool that starts as NaN."""
    pages = pages or Pages()
    pool = backend.make_pool(stack.spec, pages.num_slots, dtype)
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    bounds = [0, *cuts, len(x)]
    return torch.cat(
        [stack.forward(x[a:b], pages.batch([(0, a, b - a)]), pool)[0] for a, b in pairwise(bounds) if b > a]
    )


def rows(spec: StackSpec, n: int = N, seed: int = 1) -> Tensor:
    return torch.randn(n, spec.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_values_match_plain_torch_and_any_cut_gives_the_same_bits(
    backend: CpuBackend, name: str, dtype: torch.dtype
) -> None:
    spec, layers, ropes, stack = build(backend, name, dtype)
    x = rows(spec)
    truth = reference_forward(spec, layers, ropes, x, kv_dtype=dtype)[-1]
    whole = run(backend, stack, x, [], dtype)
    assert (whole - truth).abs().max() < TOLERANCE[dtype] * truth.std()
    for cuts in ([1, 2, 3], [64], [63, 65, 100], [7, 15, 23, 31, 47, 48, 80, 113, 149]):
        assert torch.equal(run(backend, stack, x, cuts, dtype), whole), cuts


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_q_len(backend: CpuBackend, dtype: torch.dtype) -> None:
    spec, _, _, stack = build(backend, "llama", dtype)
    pages = Pages()
    x = rows(spec, 40 + 100)
    pool = backend.make_pool(spec, pages.num_slots, dtype)
    stack.forward(x[:40], pages.batch([(0, 0, 40)]), pool)
    longest = stack.forward(x[40:], pages.batch([(0, 40, 100)]), pool)[0]
    for n in (*range(1, 34), 64, 100):
        got = stack.forward(x[40 : 40 + n], pages.batch([(0, 40, n)]), pool)[0]
        assert torch.equal(got, longest[:n]), n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("windows", [(None,), (300,)])
def test_long_contexts(backend: CpuBackend, windows: tuple[int | None], dtype: torch.dtype) -> None:
    """700 keys are three splits; few rows are dealt out by split, many by whole tile: the bits are the same."""
    spec = make_spec(num_layers=1, windows=windows)
    layers, rope = make_layers(spec, dtype), make_rope(spec, 1024)
    stack, x = backend.make_stack(spec, layers, [rope]), rows(spec, 700)
    whole = run(backend, stack, x, [], dtype, Pages(capacity=704))
    truth = reference_forward(spec, layers, [rope], x, kv_dtype=dtype)[-1]
    assert (whole - truth).abs().max() < TOLERANCE[dtype] * truth.std()
    cuts = [255, 256, 257, 300, 511, 512, 520, 690, 698, 699]
    for threads in (3, 1, 2):
        backend.set_num_threads(threads)
        assert torch.equal(run(backend, stack, x, cuts, dtype, Pages(capacity=704)), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_pages_do_not_matter(backend: CpuBackend, page_size: int, dtype: torch.dtype) -> None:
    spec, _, _, stack = build(backend, "windows", dtype)
    x = rows(spec)
    expected = run(backend, stack, x, [], dtype, Pages(16, seed=None))
    assert torch.equal(run(backend, stack, x, [70], dtype, Pages(page_size, seed=5)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_and_two_threads_give_the_same_bits(backend: CpuBackend, dtype: torch.dtype) -> None:
    spec, _, _, stack = build(backend, "gemma", dtype)
    x = rows(spec)
    got = []
    for threads in (1, 2, 3):
        backend.set_num_threads(threads)
        assert backend.num_threads == threads
        got.append(run(backend, stack, x, [90, 98, 99], dtype))
    backend.set_num_threads(2)
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=3, max_size=3),
    dtype=st.sampled_from(DTYPES),
    mixing=st.integers(0, 2**32 - 1),
)
def test_neighbours_in_the_batch_do_not_matter(lengths: list[int], dtype: torch.dtype, mixing: int) -> None:
    """Three requests, each step a random ragged mix of them: every row equals the same row computed alone."""
    backend, rng = CpuBackend(2), random.Random(mixing)
    spec, _, _, stack = build(backend, "windows", dtype)
    xs = [rows(spec, n, seed=10 + i) for i, n in enumerate(lengths)]
    alone = [run(backend, stack, x, [], dtype) for x in xs]
    pages = Pages(8, 3, 128, seed=2)
    pool = backend.make_pool(spec, pages.num_slots, dtype)
    done = [0, 0, 0]
    parts: list[list[Tensor]] = [[], [], []]
    while done != lengths:
        order = rng.sample(range(3), 3)
        chunks = [(r, done[r], min(rng.choice([0, 1, 2, 8, 17, 50]), lengths[r] - done[r])) for r in order]
        chunks = [chunk for chunk in chunks if chunk[2]]
        if not chunks:
            continue
        x = torch.cat([xs[r][start : start + n] for r, start, n in chunks])
        out = stack.forward(x, pages.batch(chunks), pool)[0]
        for (r, _, n), part in zip(chunks, out.split([n for *_, n in chunks]), strict=True):
            parts[r].append(part)
            done[r] += n
    for r in range(3):
        assert torch.equal(torch.cat(parts[r]), alone[r])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_later_row_cannot_reach_an_earlier_one(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Row 5 is NaN; rows 0..4 of the same call share key blocks (and a pair of keys) with it."""
    spec, _, _, stack = build(backend, "llama", dtype)
    x = rows(spec, 9)
    broken = x.clone()
    broken[5:] = torch.nan
    good, bad = run(backend, stack, x, [], dtype), run(backend, stack, broken, [], dtype)
    assert torch.equal(good[:5], bad[:5])
    assert bad[5:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_drafters_see_context_and_the_whole_block(backend: CpuBackend, dtype: torch.dtype) -> None:
    """write_context fills the pool from hidden states; then a block attends to it and to all of itself."""
    spec, layers, ropes, stack = build(backend, "qk_norm", dtype)
    pages, context = Pages(), rows(spec, 75, seed=4)
    pool = backend.make_pool(spec, pages.num_slots, dtype)
    positions = torch.arange(75)
    stack.write_context(context, positions.int(), pages.slots(0, positions), pool)
    kv = spec.num_kv_heads * spec.head_dim
    for (k, v), w in zip(kv_at(pool, pages, 0, positions), layers, strict=True):
        part = linear(context, w.qkv[-2 * kv :], None).view(75, 2, spec.num_kv_heads, spec.head_dim)
        expected = rotate(rms_norm(part[:, 0], w.k_norm, spec.rms_eps), ropes[0], positions)
        assert torch.allclose(k, expected.to(dtype).float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
        assert torch.allclose(v, part[:, 1].to(dtype).float(), atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    block = rows(spec, 7, seed=6)
    out = stack.forward(block, pages.batch([(0, 75, 7)], causal=False), pool)[0]
    truth = reference_forward(
        spec, layers, ropes, block, start=75, context=kv_at(pool, pages, 0, positions), kv_dtype=dtype, causal=False
    )[-1]
    assert (out - truth).abs().max() < TOLERANCE[dtype] * truth.std()


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_has_the_same_bits_in_pieces(backend: CpuBackend, dtype: torch.dtype) -> None:
    spec, _, _, stack = build(backend, "biases", dtype)
    pages, context, positions = Pages(), rows(spec, 75), torch.arange(75)
    slots = pages.slots(0, positions)
    pools = [backend.make_pool(spec, pages.num_slots, dtype) for _ in range(2)]
    stack.write_context(context, positions.int(), slots, pools[0])
    for a, b in ((0, 1), (1, 9), (9, 75)):
        stack.write_context(context[a:b], positions[a:b].int(), slots[a:b], pools[1])
    assert torch.equal(pools[0].k, pools[1].k)
    assert torch.equal(pools[0].v, pools[1].v)


def test_callers_from_several_threads_take_turns(backend: CpuBackend) -> None:
    """Four Python threads share the team, one of them keeps changing its size: everybody gets their own answer."""
    spec, _, _, stack = build(backend, "windows", torch.bfloat16)
    xs = [rows(spec, 60 + 10 * i, seed=i) for i in range(4)]
    expected = [run(backend, stack, x, [], torch.bfloat16) for x in xs]

    def work(i: int) -> bool:
        good = True
        for turn in range(10):
            if i == 0:
                backend.set_num_threads(1 + turn % 3)
            good &= torch.equal(run(backend, stack, xs[i], [20, 21], torch.bfloat16), expected[i])
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    backend.set_num_threads(2)


def test_the_callers_float_mode_does_not_matter(backend: CpuBackend) -> None:
    """Tiny weights make denormal products, which a caller may or may not have asked torch to flush."""
    spec, layers, ropes, _ = build(backend, "llama", torch.float32)
    for w in layers:
        w.o, w.down = w.o * 1e-38, w.down * 1e-38
    stack, x = backend.make_stack(spec, layers, ropes), rows(spec, 30) * 1e-6
    plain = run(backend, stack, x, [8, 9], torch.float32)
    try:
        torch.set_flush_denormal(True)
        assert torch.equal(run(backend, stack, x, [], torch.float32), plain)
    finally:
        torch.set_flush_denormal(False)


def test_captured_layers_come_side_by_side_in_the_asked_order(backend: CpuBackend) -> None:
    spec, layers, ropes, stack = build(backend, "gemma", torch.float32)
    x, pages = rows(spec, 20), Pages()
    truth = reference_forward(spec, layers, ropes, x)
    out, captured = stack.forward(
        x, pages.batch([(0, 0, 20)]), backend.make_pool(spec, pages.num_slots, torch.float32), (1, 0, 1)
    )
    assert captured is not None
    assert torch.allclose(captured, torch.cat([truth[1], truth[0], truth[1]], 1), atol=1e-4)
    assert torch.equal(captured[:, : spec.hidden_size], out)


def test_a_bf16_model_may_keep_its_pool_in_float32(backend: CpuBackend) -> None:
    spec, layers, ropes, stack = build(backend, "llama", torch.bfloat16)
    x = rows(spec)
    truth = reference_forward(spec, layers, ropes, x)[-1]
    out = run(backend, stack, x, [9, 80], torch.float32)
    assert (out - truth).abs().max() < TOLERANCE[torch.bfloat16] * truth.std()


def test_the_input_is_left_alone(backend: CpuBackend) -> None:
    spec, _, _, stack = build(backend, "llama", torch.float32)
    x = rows(spec, 5)
    before = x.clone()
    run(backend, stack, x, [], torch.float32)
    assert torch.equal(x, before)


def test_what_would_touch_foreign_memory_is_refused_by_name(backend: CpuBackend) -> None:
    spec, layers, ropes, stack = build(backend, "llama", torch.float32)
    pages, x = Pages(capacity=64), rows(spec, 4)
    pool = backend.make_pool(spec, pages.num_slots, torch.float32)

    def refused(match: str, **changes: Tensor) -> None:
        batch = pages.batch([(0, 0, 4)])
        for name, value in changes.items():
            setattr(batch, name, value)
        with pytest.raises(ConfigError, match=match):
            stack.forward(x, batch, pool)

    refused("slots\\[3\\] = 64", slots=torch.tensor([0, 1, 2, 64]))
    refused("positions\\[1\\] = 512", positions=torch.tensor([0, 512, 2, 3]))
    refused("page_table\\[0, 0\\] = 4", page_table=torch.full((1, 4), 4))
    refused("kv_len\\[0\\] = 65", kv_len=torch.tensor([65]))
    refused("q_start", q_start=torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match="pool"):
        stack.forward(x, pages.batch([(0, 0, 4)]), backend.make_pool(make_spec(head_dim=32), 64, torch.float32))
    with pytest.raises(ConfigError, match="capture"):
        stack.forward(x, pages.batch([(0, 0, 4)]), pool, (2,))
    with pytest.raises(ConfigError, match="head_dim"):
        backend.make_stack(make_spec(head_dim=24), layers, ropes)
    with pytest.raises(ConfigError, match=r"layers\[0\]\.qkv"):
        backend.make_stack(make_spec(num_heads=4, num_kv_heads=4), layers, ropes)
    half = make_layers(spec, torch.float16)
    with pytest.raises(ConfigError, match="float16"):
        backend.make_stack(spec, half, ropes)
