"""Counter-based Gumbel noise: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
in int64 torch operators, so that it runs on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four uint32 words (in int64) for each 128-bit counter and 64-bit key, given as uint32 words in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps like uint64
        high0, low0 = (product0 >> 32) & _MASK, product0 & _MASK
        high1, low1 = (product1 >> 32) & _MASK, product1 & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform_row(seed: Tensor, position: Tensor, stream: int, size: int) -> Tensor:
    """float64 [size] strictly inside (0, 1), multiples of 2**-32 plus 2**-33.

    Entry i depends on (seed, position, stream, i) alone, not on `size`.
    """
    block = torch.arange(-(-size // 4), device=seed.device)
    words = philox4x32(
        (block, (position & _MASK).expand_as(block), ((position >> 32) & _MASK).expand_as(block),
         torch.full_like(block, stream & _MASK)),
        (seed & _MASK, (seed >> 32) & _MASK),
    )  # fmt: skip
    return (torch.stack(words, dim=1).flatten()[:size].double() + 0.5) * 2.0**-32


def gumbel(seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
    """float32 [N, V]. Row by row, so that a row's bits do not depend on N; -log(-log(1 - u)) in float64, because
    float32 would be coarse in the upper tail, which decides between unlikely tokens."""
    rows = [
        -torch.log(-torch.log1p(-uniform_row(seed, position, stream, vocab_size)))
        for seed, position in zip(seeds, positions.to(seeds.dtype), strict=True)
    ]
    if not rows:
        return torch.zeros((0, vocab_size), device=seeds.device)
    return torch.stack(rows).float()
