"""Gumbel noise against a slow twin, and its statistics."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

from exactspec.backend.cpu.backend import CpuBackend
from exactspec.backend.cpu.native import library
from exactspec.errors import ConfigError

MASK = 0xFFFFFFFF


def philox(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """Philox 4x32 as the paper (Salmon et al. 2011) writes it, one block."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & MASK, (p0 >> 32) ^ c[3] ^ k[1], p0 & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def twin(seed: int, position: int, stream: int, token: int) -> float:
    """The noise of one token in double precision."""
    seed, position = seed % 2**64, position % 2**64
    counter = [token // 64 * 16 + token % 16, stream, position & MASK, position >> 32]
    word = philox(counter, [seed & MASK, seed >> 32])[token % 64 // 16]
    u, rest = (word + 0.5) / 2**32, (2**32 - 1 - word + 0.5) / 2**32
    return -math.log(-math.log1p(-rest) if u > 0.5 else -math.log(u))


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(2)


def noise(backend: CpuBackend, seeds: list[int], positions: list[int], stream: int, vocab: int) -> torch.Tensor:
    return backend.gumbel(torch.tensor(seeds), torch.tensor(positions), stream, vocab)


def test_random_words_are_philox() -> None:
    block = ctypes.c_uint32 * 4
    for counter, key in (([0] * 4, [0, 0]), ([MASK] * 4, [MASK, MASK]), ([1, 2, 3, 4], [5, 6])):
        out = block()
        library().es_philox(block(*counter), (ctypes.c_uint32 * 2)(*key), out)
        assert list(out) == philox(counter, key)


def test_each_element_is_the_twins(backend: CpuBackend) -> None:
    seeds, positions = [0, 1, -5, 2**62 + 7], [0, 1000, 3, 2**40]
    got = noise(backend, seeds, positions, 3, 200)
    for r, (s, p) in enumerate(zip(seeds, positions, strict=True)):
        expected = torch.tensor([twin(s, p, 3, t) for t in range(200)])
        # the coordinates 0 .. 23 in float32; near u = 1 the twin and the kernel share the distance to 1
        assert torch.allclose(got[r], expected, rtol=1e-5, atol=2e-6)


def test_a_rows_noise_knows_neither_vocabulary_nor_neighbours(backend: CpuBackend) -> None:
    whole = noise(backend, [7, 8, 9], [4, 5, 6], 0, 5000)
    for vocab in (1, 63, 64, 65, 1000, 4999):
        assert torch.equal(noise(backend, [8], [5], 0, vocab)[0], whole[1, :vocab])
    backend.set_num_threads(1)
    assert torch.equal(noise(backend, [9, 7], [6, 4], 0, 5000), whole[[2, 0]])
    backend.set_num_threads(2)


def test_seed_position_and_stream_all_matter(backend: CpuBackend) -> None:
    base = noise(backend, [1], [1], 0, 256)
    for s, p, stream in ((2, 1, 0), (1, 2, 0), (1, 1, 1), (1 + 2**32, 1, 0), (1, 1 + 2**32, 0), (-1, 1, 0)):
        assert (noise(backend, [s], [p], stream, 256) == base).float().mean() < 0.1


def test_distribution_is_gumbel(backend: CpuBackend) -> None:
    """Kolmogorov-Smirnov on 4 million draws: false alarm below 1e-6 (limit 2.7 / sqrt(n), P = 2 exp(-2 * 2.7^2))."""
    g = noise(backend, list(range(80)), [5] * 80, 1, 50000).numpy().ravel().astype(np.float64)
    assert np.isfinite(g).all()
    n = g.size
    u = np.sort(np.exp(-np.exp(-g)))
    grid = np.arange(n)
    distance = max(np.abs(u - grid / n).max(), np.abs(u - (grid + 1) / n).max())
    assert distance < 2.7 / math.sqrt(n)


def test_neighbouring_rows_are_uncorrelated(backend: CpuBackend) -> None:
    """Correlation of n = 200000 pairs is normal with deviation 1 / sqrt(n): 5.5 deviations, false alarm 4e-8 each."""
    vocab = 200_000
    g = noise(backend, [1, 1, 2, 1], [1, 2, 1, 1], 0, vocab)
    g[3] = noise(backend, [1], [1], 1, vocab)[0]
    c = torch.corrcoef(torch.cat([g, g[:1].roll(1, 1), g[:1].roll(16, 1)]))
    off = c - torch.eye(len(c))
    assert off.abs().max() < 5.5 / vocab**0.5


def test_gumbel_max_draws_the_softmax(backend: CpuBackend) -> None:
    """Chi-square over 6 tokens, 20000 positions of one seed: limit 45 at 5 degrees has false alarm 1.5e-8."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    n = 20000
    g = backend.gumbel(torch.full((n,), 11), torch.arange(n), 0, 6)
    counts = torch.bincount((logits + g).argmax(1), minlength=6).double()
    expected = logits.double().softmax(0) * n
    assert ((counts - expected) ** 2 / expected).sum() < 45


def test_a_stream_beyond_32_bits_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(ConfigError, match="stream"):
        noise(backend, [1], [1], 2**32, 4)
