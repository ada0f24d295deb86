"""Counter-based noise and the fused draw: one pass over the logits gives the sampled token and its raw logprob.

The noise has the integers of the torch reference (torch_ref.noise): Philox 4x32-10 (Salmon et al., SC 2011), key seed,
counter = (token id // 4, position low, position high, stream), word = token id % 4; then Gumbel by the inverse of its
distribution function, in float32. Twins: torch_ref.noise.gumbel, twins.draw.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import torch
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.tiles import next_power_of_2

GROUPS = 1024  # Philox counters of a program; four tokens each
CHUNK = 4 * GROUPS


@triton.jit
def to_gumbel(bits):
    """uint32 -> -log(-log(u)), u = 1 - v, v = (bits + 0.5) / 2^32; u and v each keep full relative precision."""
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = 0.14285714 + v * 0.125
    series = 0.16666667 + v * series
    series = 0.2 + v * series
    series = 0.25 + v * series
    series = 0.33333334 + v * series
    series = 0.5 + v * series
    series = v * (1.0 + v * series)
    exponential = tl.where(v < 0.0625, series, -tl.log(u))
    return -tl.log(exponential)


@triton.jit
def _noise(seed, position, STREAM: tl.constexpr, chunk, GROUPS: tl.constexpr):
    """Gumbel noise of tokens chunk * 4 * GROUPS ... in order."""
    group = (chunk * GROUPS + tl.arange(0, GROUPS)).to(tl.uint32)
    zero = group * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, group, low, high, zero + STREAM)
    return to_gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _gumbel_kernel(seeds, positions, out, V, STREAM: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * 4 * GROUPS + tl.arange(0, 4 * GROUPS)
    noise = _noise(tl.load(seeds + row), tl.load(positions + row), STREAM, chunk, GROUPS)
    tl.store(out + row * V + token, noise, mask=token < V)


@triton.jit
def _draw_kernel(
    logits, stride, temperatures, seeds, positions, part_score, part_id, part_max, part_sum, VALID, CHUNKS,
    STREAM: tl.constexpr, GREEDY: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): best score and its token, maximum and sum of exponentials of the raw logits."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * 4 * GROUPS + tl.arange(0, 4 * GROUPS)
    raw = tl.load(logits + row * stride + token, mask=token < VALID, other=float("-inf"))
    score = raw
    if not GREEDY:
        temperature = tl.load(temperatures + row)
        if temperature > 0.0:
            noise = _noise(tl.load(seeds + row), tl.load(positions + row), STREAM, chunk, GROUPS)
            score = tl.div_rn(raw, tl.zeros_like(raw) + temperature) + noise
    top = tl.max(score, 0)
    high = tl.max(raw, 0)
    use = tl.where(high == float("-inf"), 0.0, high)
    at = row * CHUNKS + chunk
    tl.store(part_score + at, top)
    tl.store(part_id + at, tl.min(tl.where(score == top, token, 2147483647), 0))
    tl.store(part_max + at, high)
    tl.store(part_sum + at, tl.sum(tl.exp(raw - use), 0))


@triton.jit
def _finish_kernel(
    logits, stride, part_score, part_id, part_max, part_sum, ids, logprobs, greatest, lse, VALID, CHUNKS,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program per row: the winner of the chunks, the sum of their sums, the winner's logprob."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok = c < CHUNKS
    score = tl.load(part_score + row * CHUNKS + c, mask=ok, other=float("-inf"))
    token = tl.load(part_id + row * CHUNKS + c, mask=ok, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score, 0), token, 2147483647), 0)
    winner = tl.minimum(winner, VALID - 1)  # rows of NaN (padding) have no winner
    high = tl.load(part_max + row * CHUNKS + c, mask=ok, other=float("-inf"))
    top = tl.max(high, 0)
    total = tl.sum(tl.load(part_sum + row * CHUNKS + c, mask=ok, other=0.0) * tl.exp(high - top), 0)
    log_total = top + tl.log(total)
    tl.store(ids + row, winner.to(tl.int64))
    tl.store(greatest + row, top)
    tl.store(lse + row, log_total)
    tl.store(logprobs + row, tl.load(logits + row * stride + winner) - log_total)


def gumbel(seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
    """seeds [N] int64, positions [N] int64 -> float32 [N, V]."""
    out = torch.empty((seeds.shape[0], vocab_size), dtype=torch.float32, device=seeds.device)
    if out.numel():
        grid = (seeds.shape[0], triton.cdiv(vocab_size, CHUNK))
        _gumbel_kernel[grid](  # no fused multiply-add: the draw makes the same bits in another kernel
            seeds, positions, out, vocab_size, STREAM=stream, GROUPS=GROUPS, num_warps=8, enable_fp_fusion=False
        )
    return out


def draw(
    logits: Tensor,
    temperatures: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    stream: int = 0,
    valid_vocab: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """argmax(logits / T + gumbel) per row, ties to the lowest id; the argmax where T = 0 or temperatures is None.

    logits [N, V] float32 (rows may be strided), of which the first valid_vocab columns count; temperatures [N] float32,
    seeds and positions [N] int64 -> ids [N] int64, their raw logprobs [N] float32, logsumexp of the raw logits [N].
    """
    ids, logprobs, _, lse = _draw_rows(logits, temperatures, seeds, positions, stream, valid_vocab)
    return ids, logprobs, lse


def _draw_rows(
    logits: Tensor,
    temperatures: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    stream: int,
    valid_vocab: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    valid = vocab if valid_vocab is None else valid_vocab
    chunks = triton.cdiv(valid, CHUNK)
    device = logits.device
    score, high, total = torch.empty((3, rows, chunks), dtype=torch.float32, device=device).unbind(0)
    token = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, greatest, lse = torch.empty((3, rows), dtype=torch.float32, device=device).unbind(0)
    greedy = temperatures is None
    if rows:
        _draw_kernel[(rows, chunks)](
            logits, logits.stride(0), logits if greedy else temperatures, logits if greedy else seeds,
            logits if greedy else positions, score, token, high, total, valid, chunks,
            STREAM=stream, GREEDY=greedy, GROUPS=GROUPS, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        _finish_kernel[(rows,)](
            logits, logits.stride(0), score, token, high, total, ids, logprobs, greatest, lse, valid, chunks,
            BLOCK=max(16, next_power_of_2(chunks)), num_warps=1,
        )  # fmt: skip
    return ids, logprobs, greatest, lse
