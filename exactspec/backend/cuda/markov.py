"""One step of the sequential draw for few requests: a matrix-vector product over W2 [V, r], draw included.

With one request a step does nothing but read W2, as many times a block as it has positions. Products, noise and
sums stay in registers; nothing of the size of the vocabulary is written.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.sampling import to_gumbel
from exactspec.backend.cuda.tiles import next_power_of_2

FEW = 4  # requests up to which this is faster than a product of tiles (decode.draw_step)
TOKENS_PER_PROGRAM = 64
NUM_WARPS = 8


@triton.jit
def _token_noise(seed, position, STREAM: tl.constexpr, chunk, BLOCK_V: tl.constexpr):
    """Gumbel noise of a chunk's tokens, as sampling.gumbel gives it."""
    group = (chunk * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)).to(tl.uint32)
    zero = group * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, zero + STREAM)
    return to_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _score_kernel(
    base, base_stride, latent, w2, temperatures, seeds, positions, step, part_score, part_id, VALID, CHUNKS,
    R: tl.constexpr, RANK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STREAM: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Program (chunk of tokens): best of (base + w2 @ latent) / T + noise in the chunk, for each of R requests."""
    chunk = tl.program_id(0)
    chunk = tl.where(step % 2 == 0, chunk, CHUNKS - 1 - chunk)  # back and forth: what was read last is in the L2 cache
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    ok, k_ok = token < VALID, k < RANK
    rows = w2 + token.to(tl.int64)[:, None] * RANK + k[None, :]
    w = tl.load(rows, mask=ok[:, None] & k_ok[None, :], other=0.0)
    for r in tl.static_range(R):
        u = tl.load(latent + r * RANK + k, mask=k_ok, other=0.0)
        score = tl.load(base + r * base_stride + token, mask=ok, other=float("-inf"))
        if not GREEDY:  # before the product: while the weights are on their way
            noise = _token_noise(tl.load(seeds + r), tl.load(positions + r) + step, STREAM, chunk, BLOCK_V)
        score += tl.sum(w.to(tl.float32) * u[None, :], 1)
        if not GREEDY:
            temperature = tl.load(temperatures + r)
            hot = tl.where(temperature > 0.0, temperature, 1.0)
            score = tl.where(temperature > 0.0, score / hot + noise, score)
        top = tl.max(score, 0)
        tl.store(part_score + r * CHUNKS + chunk, top)
        tl.store(part_id + r * CHUNKS + chunk, tl.min(tl.where(score == top, token, 2147483647), 0))


@triton.jit
def winner_kernel(
    part_score, part_id, ids, id_stride, table, latent, CHUNKS, V, RANK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: the winner of the chunks, and its row of `table` for the next step."""
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    score = tl.load(part_score + r * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    token = tl.load(part_id + r * CHUNKS + c, mask=c < CHUNKS, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score, 0), token, 2147483647), 0)
    winner = tl.minimum(winner, V - 1)
    tl.store(ids + r * id_stride, winner.to(tl.int64))
    row = tl.load(table + winner.to(tl.int64) * RANK + k, mask=k < RANK, other=0.0)
    tl.store(latent + r * RANK + k, row.to(tl.float32), mask=k < RANK)


def draw_step_few(
    base: Tensor,
    latent: Tensor,
    w2: Tensor,
    w1: Tensor,
    step: int,
    ids: Tensor,
    previous: Tensor,
    sampled: tuple[Tensor, Tensor, Tensor] | None,
    stream: int,
    valid_vocab: int,
) -> None:
    """decode.draw_step for at most FEW requests."""
    count, rank = latent.shape
    chunks = triton.cdiv(valid_vocab, TOKENS_PER_PROGRAM)
    score = torch.empty((count, chunks), dtype=torch.float32, device=base.device)
    token = torch.empty((count, chunks), dtype=torch.int32, device=base.device)
    temperatures, seeds, positions = sampled or (latent, ids, ids)
    block_k = max(16, next_power_of_2(rank))
    _score_kernel[(chunks,)](
        base, base.stride(0), latent, w2, temperatures, seeds, positions, step, score, token, valid_vocab, chunks,
        R=count, RANK=rank, BLOCK_K=block_k, BLOCK_V=TOKENS_PER_PROGRAM, STREAM=stream, GREEDY=sampled is None,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    winner_kernel[(count,)](
        score, token, ids, ids.stride(0), w1, previous, chunks, w1.shape[0], RANK=rank, BLOCK_K=block_k,
        BLOCK=next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
