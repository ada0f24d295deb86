"""The plain-torch backend: a row's bits depend on the row and the keys it sees, on nothing else (contract C2)."""

from __future__ import annotations

import math

import pytest
import torch
from fakes import full_logits, make_batch, tiny_model, tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st

from exactspec.backend.select import select_backend
from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.backend.torch_ref.noise import philox4x32, uniform_row
from exactspec.errors import CheckpointError, ConfigError, DeviceError
from exactspec.model.rope import default_rope
from exactspec.model.target import TargetModel

TOKENS = [(i * 89 + i * i) % 256 for i in range(160)]
# shapes that take every path: plain Llama, windows, q/k norms and post norms with gelu, bfloat16
VARIANTS = {
    "llama": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "window": {"windows": (9, None)},
    "gemma": {
        "windows": (70, None), "qk_norm": True, "post_norms": True, "activation": "gelu_tanh", "rope_index": (0, 1),
        "ropes": (default_rope(1e4, 16), default_rope(1e6, 16)), "embed_scale": 32**0.5, "tied": True,
    },
    "odd sizes": {"hidden_size": 36, "intermediate_size": 50, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10},
}  # fmt: skip


@pytest.fixture(scope="module", params=VARIANTS)
def model(request):
    return tiny_model(**VARIANTS[request.param])


@pytest.fixture(scope="module")
def truth(model):
    """Logits of TOKENS in one forward."""
    return full_logits(model, TOKENS)


@pytest.mark.parametrize("rows", range(1, 41))
def test_a_block_of_any_length_has_the_bits_of_the_whole(model, truth, rows):
    """Verify blocks of 1 to 40 rows behind a context that ends inside, at and after a key block."""
    for start in (0, 17, 63, 64, 100):
        pages = [list(range(40))]
        pool = model.make_pool(160)
        if start:
            model.forward(make_batch([(0, TOKENS[:start])], pages=pages), pool)
        hidden, _ = model.forward(make_batch([(start, TOKENS[start : start + rows])], pages=pages), pool)
        assert torch.equal(model.logits(hidden), truth[start : start + rows])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_neighbours_chunks_and_rejected_rows_change_no_bit(data, model, truth):
    """Several requests with the same text enter in random pieces, side by side; some pieces are wrong drafts that
    are overwritten later. Every row must equal the undisturbed one."""
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    count = data.draw(st.integers(1, 4))
    total = 70
    per_request = -(-total // page_size)
    order = data.draw(st.permutations(range(count * per_request)))
    pages = [list(order[r * per_request : (r + 1) * per_request]) for r in range(count)]
    pool = model.make_pool(count * per_request * page_size)
    done = [0] * count
    for _ in range(8):
        pieces, owners, right = [], [], []
        for r in data.draw(st.permutations(range(count))):
            rows = data.draw(st.integers(0, min(40, total - done[r])))
            if rows:
                good = data.draw(st.integers(1, rows))  # the rest of the block is a wrong draft
                ids = TOKENS[done[r] : done[r] + good] + [7] * (rows - good)
                pieces.append((done[r], ids))
                owners.append(r)
                right.append(good)
        if not pieces:
            continue
        batch = make_batch(pieces, page_size, [pages[r] for r in owners])
        hidden, _ = model.forward(batch, pool)
        logits = model.logits(hidden)
        at = 0
        for (start, ids), r, good in zip(pieces, owners, right, strict=True):
            assert torch.equal(logits[at : at + good], truth[start : start + good])
            at += len(ids)
            done[r] = start + good


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.sampled_from([5, 16, 24, 50, 576, 1536]),
    out=st.sampled_from([1, 3, 8, 30, 192]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    place=st.integers(0, 69),
)
def test_operators_row_by_row(rows, width, out, dtype, place):
    """A linear map and a norm of one row alone, and of the same row anywhere among others."""
    backend = TorchBackend()
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    x = torch.randn(rows, width, generator=generator)
    linear = backend.make_linear(torch.randn(out, width, generator=generator).to(dtype), torch.randn(out))
    place %= rows
    assert torch.equal(linear(x)[place], linear(x[place : place + 1])[0])
    norm = torch.randn(width)
    assert torch.equal(backend.rms_norm(x, norm, 1e-5)[place], backend.rms_norm(x[place : place + 1], norm, 1e-5)[0])


def test_linears_accumulate_in_float32():
    """Products of bfloat16 numbers are exact in float32: the result is not rounded to bfloat16."""
    weight, x = torch.randn(24, 96).bfloat16(), torch.randn(3, 96)
    expected = x.bfloat16().double() @ weight.double().T
    assert (TorchBackend().make_linear(weight)(x) - expected).abs().max() < 1e-5


def test_no_rows_give_no_rows(model):
    assert model.logits(torch.zeros(0, model.config.hidden_size)).shape == (0, model.config.vocab_size)
    assert model.backend.gumbel(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 0, 9).shape == (
        0,
        9,
    )


def naive_attention(q, k, v, positions, window, causal, scale):
    """The textbook formula in float64. q [T, heads, D], k and v [keys, kv_heads, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("thd,khd->htk", q.double(), k) * scale
    keys = torch.arange(k.shape[0])
    seen = torch.ones(len(positions), k.shape[0], dtype=torch.bool)
    if causal:
        seen &= keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("htk,khd->thd", weights, v).flatten(1)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 80])
def test_attention_is_the_textbook_formula(exact, causal, window):
    from exactspec.backend.torch_ref.attention import paged_attention, request_slots

    spec = tiny_target(num_heads=6, num_kv_heads=2, windows=(window,) * 2).config.stack_spec()
    batch = make_batch([(100, [1] * 21), (0, [1] * 3), (64, [1])], causal=causal)
    slots = request_slots(batch)
    q = torch.randn(25, 6, 16)
    k, v = torch.randn(2, 300, 2, 16)
    found = paged_attention(q, k, v, batch, slots, spec, window, exact)
    starts = batch.q_start.tolist()
    for r, own in enumerate(slots):
        rows = slice(starts[r], starts[r + 1])
        expected = naive_attention(q[rows], k[own], v[own], batch.positions[rows], window, causal, 0.25)
        assert (found[rows] - expected).abs().max() < 1e-5


def test_a_block_draft_sees_the_whole_block_and_the_context_that_was_written():
    """causal=False: all keys. write_context fills the pool as a forward's K/V projections would."""
    model = tiny_model(qk_norm=True)
    stack, pool = model.stack, model.make_pool(40)
    context = torch.randn(20, 32)
    batch = make_batch([(20, TOKENS[:5])], pages=[list(range(10))], causal=False)
    stack.write_context(context, torch.arange(20), torch.arange(20), pool)
    pieces = model.make_pool(40)
    for start, end in ((0, 1), (1, 8), (8, 20)):
        span = torch.arange(start, end)
        stack.write_context(context[start:end], span, span, pieces)
    assert torch.equal(pool.k, pieces.k)
    assert torch.equal(pool.v, pieces.v)
    first, _ = model.forward(batch, pool)
    other = make_batch([(20, [*TOKENS[:4], 9])], pages=[list(range(10))], causal=False)
    second, _ = model.forward(other, pool)
    assert not torch.equal(first[0], second[0])  # the last row's token reaches the first row


def test_fast_numerics_agree_closely():
    exact, fast = (TargetModel(TorchBackend("cpu", n), tiny_target()) for n in ("exact", "fast"))
    assert (full_logits(exact, TOKENS) - full_logits(fast, TOKENS)).abs().max() < 1e-4


def test_philox_reference_vectors():
    """Known answers of Random123's kat_vectors for philox4x32-10."""

    def run(counter, key):
        words = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
        return [int(w) for w in words]

    assert run([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert run([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert run(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_gumbel_depends_on_seed_position_stream_and_id_alone():
    backend = TorchBackend()

    def noise(seeds, positions, stream=0, size=50):
        return backend.gumbel(torch.tensor(seeds), torch.tensor(positions), stream, size)

    one = noise([5], [3])
    assert torch.equal(noise([1, 5, 2], [9, 3, 3])[1], one[0])
    assert torch.equal(noise([5], [3], size=33)[0], one[0, :33])
    others = [noise([6], [3]), noise([5], [4]), noise([5], [3], 1), noise([5 + 2**32], [3]), noise([-5], [3])]
    assert all((other != one).all() for other in others)
    assert noise([-(2**63), 2**63 - 1], [0, 2**31]).isfinite().all()


def test_gumbel_has_its_distribution():
    """Kolmogorov-Smirnov against exp(-exp(-x)): sqrt(n) * D > 2.23 has odds of 1e-4 for right noise."""
    values = TorchBackend().gumbel(torch.tensor([1, 2]), torch.tensor([0, 7]), 0, 100_000).double().sort(-1).values
    expected = torch.exp(-torch.exp(-values))
    steps = torch.arange(1, 100_001) / 100_000
    assert ((expected - steps).abs().amax(-1) * 100_000**0.5).max() < 2.23
    uniform = uniform_row(torch.tensor(1), torch.tensor(0), 0, 1000)
    assert uniform.min() > 0
    assert uniform.max() < 1


def test_selection(monkeypatch):
    monkeypatch.setenv("EXACTSPEC_BACKEND", "torch")
    assert select_backend("cpu").name == "torch"
    assert select_backend("cpu", numerics="fast").numerics == "fast"
    monkeypatch.delenv("EXACTSPEC_BACKEND")
    assert select_backend("cpu", torch.float16).name == "torch"
    with pytest.raises(ConfigError, match="device must be auto, cpu or cuda, got 'tpu'"):
        select_backend("tpu")
    with pytest.raises(ConfigError, match="numerics"):
        select_backend("cpu", numerics="quick")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="sees no CUDA device"):
        select_backend("cuda")


def test_a_stack_with_a_layer_too_few():
    target = tiny_target()
    with pytest.raises(CheckpointError, match="1 layers given, expected 2"):
        TorchBackend().make_stack(target.config.stack_spec(), target.weights.layers[:1], target.config.rope_tables())
