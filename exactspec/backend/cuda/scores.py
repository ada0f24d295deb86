"""What the logprob processor reads of rows of logits, in two launches and no copy: normaliser, the token's own value,
the most likely tokens.

A row is cut into chunks of fixed width whose sums are combined in order, so a row's bits depend on that row alone; and
one compiled kernel serves every caller (a plain row has the divisor 1), so they do not depend on the caller either.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.tiles import next_power_of_2

CHUNK = 4096
BLOCK = 64  # entries whose maximum stands for them in the first look for the most likely
MOST_TOP = 32  # most likely tokens that a program picks one after the other
ALIGNED = 16  # entries: the compiler's vector width, and with it the order of a sum, depends on a row's alignment
FLOOR = torch.finfo(torch.float32).min  # as logprobs.processor.LOGPROB_FLOOR


@triton.jit
def _chunk_kernel(
    logits, stride, divisors, part_max, part_sum, block_max, V, VALID, CHUNKS, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (row, chunk): maximum, sum of exponentials, and the maximum of each block of BLOCK valid entries."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    divisor = tl.load(divisors + row)
    if divisor != 0.0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        raw = tl.load(logits + row * stride + token, mask=token < V, other=float("-inf"))
        value = tl.div_rn(raw, tl.zeros_like(raw) + divisor)
        high = tl.max(value, 0)
        use = tl.where(high == float("-inf"), 0.0, high)
        tl.store(part_max + row * CHUNKS + chunk, high)
        tl.store(part_sum + row * CHUNKS + chunk, tl.sum(tl.exp(value - use), 0))
        shown = tl.where(token < VALID, value, float("-inf"))
        block = chunk * (CHUNK // BLOCK) + tl.arange(0, CHUNK // BLOCK)
        best = tl.max(tl.reshape(shown, (CHUNK // BLOCK, BLOCK)), 1)
        tl.store(block_max + row * CHUNKS * (CHUNK // BLOCK) + block, best)


@triton.jit
def _finish_kernel(
    logits, stride, divisors, ids, part_max, part_sum, block_max, greatest, lse, packed, packed_stride, VALID, CHUNKS,
    TOP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Program per row: logsumexp; in packed the bits of the values of ids[row] and of the TOP most likely, then their
    ids. The k greatest entries lie in the k blocks with the greatest maxima, ties to the earlier block."""
    row = tl.program_id(0).to(tl.int64)
    divisor = tl.load(divisors + row)
    if divisor != 0.0:
        c = tl.arange(0, BLOCK_C)
        high = tl.load(part_max + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
        top = tl.max(high, 0)
        sums = tl.load(part_sum + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
        total = top + tl.log(tl.sum(sums * tl.exp(high - top), 0))
        tl.store(greatest + row, top)
        tl.store(lse + row, total)
        out = packed + row * packed_stride
        own = tl.div_rn(tl.load(logits + row * stride + tl.load(ids + row)), divisor) - total
        tl.store(out, tl.where(own < FLOOR, FLOOR, own).to(tl.int32, bitcast=True))
        if TOP > 0:
            k = tl.arange(0, BLOCK_K)
            b = tl.arange(0, BLOCK_B)
            known = b * BLOCK < VALID
            order = tl.where(known, b, 2147483647)
            best = tl.load(block_max + row * CHUNKS * (CHUNK // BLOCK) + b, mask=known, other=float("-inf"))
            chosen = tl.zeros((BLOCK_K,), tl.int32) + 2147483647
            for i in range(TOP):
                first = tl.min(tl.where(best == tl.max(best, 0), order, 2147483647), 0)
                chosen = tl.where(k == i, first, chosen)
                best = tl.where(order == first, float("-inf"), best)
                order = tl.where(order == first, 2147483647, order)
            block = tl.where(chosen == 2147483647, VALID, chosen * BLOCK)[:, None]
            token = block + tl.arange(0, BLOCK)[None, :]
            ok = token < VALID
            value = tl.load(logits + row * stride + token, mask=ok, other=float("-inf"))
            value = tl.where(ok, tl.div_rn(value, tl.zeros_like(value) + divisor), float("-inf"))
            order = tl.where(ok, token, 2147483647)
            for i in range(TOP):
                most = tl.max(tl.max(value, 1), 0)
                first = tl.min(tl.min(tl.where(value == most, order, 2147483647), 1), 0)
                logprob = most - total
                tl.store(out + 1 + i, tl.where(logprob < FLOOR, FLOOR, logprob).to(tl.int32, bitcast=True))
                tl.store(out + 1 + TOP + i, tl.minimum(first, VALID - 1))
                value = tl.where(order == first, float("-inf"), value)
                order = tl.where(order == first, 2147483647, order)


def score_rows(
    logits: Tensor,
    token_ids: Tensor,
    k: int,
    valid_vocab: int,
    divisors: Tensor | None = None,
    packed: Tensor | None = None,
) -> Tensor:
    """logits [N, V] float32, token_ids [N] int64 -> packed [N, 1 + 2k] int32.

    A row holds the float32 bits of the logprobs of its token and of the k most likely tokens (k at most MOST_TOP, ids
    below valid_vocab, falling, ties by rising id), then the ids of those. The logprob of x is
    x / d - logsumexp(row / d) with d = divisors[row] (None: 1), never below FLOOR; rows with d = 0 are left out, their
    place unwritten.
    """
    return _score(logits, token_ids, k, valid_vocab, divisors, packed)[0]


def logsumexp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] float32 -> (row maximum [N], logsumexp [N]): the normaliser of score_rows."""
    ids = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return _score(logits, ids, 0, logits.shape[1], None, None)[1:]


def _score(
    logits: Tensor, token_ids: Tensor, k: int, valid_vocab: int, divisors: Tensor | None, packed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if k > MOST_TOP:
        raise ValueError(f"k: at most {MOST_TOP}, got {k}")
    rows, vocab = logits.shape
    device = logits.device
    if logits.stride(1) != 1 or logits.stride(0) % ALIGNED or logits.data_ptr() % 64:
        logits = F.pad(logits, (0, -vocab % ALIGNED))
    chunks = triton.cdiv(vocab, CHUNK)
    part_max, part_sum = torch.empty((2, rows, chunks), dtype=torch.float32, device=device).unbind(0)
    block_max = torch.empty((rows, chunks * (CHUNK // BLOCK)), dtype=torch.float32, device=device)
    greatest, lse = torch.empty((2, rows), dtype=torch.float32, device=device).unbind(0)
    if packed is None:
        packed = torch.empty((rows, 1 + 2 * k), dtype=torch.int32, device=device)
    if divisors is None:
        divisors = torch.ones(rows, dtype=torch.float32, device=device)
    if rows:
        _chunk_kernel[(rows, chunks)](
            logits, logits.stride(0), divisors, part_max, part_sum, block_max, vocab, valid_vocab, chunks,
            CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        _finish_kernel[(rows,)](
            logits, logits.stride(0), divisors, token_ids, part_max, part_sum, block_max, greatest, lse, packed,
            packed.stride(0), valid_vocab, chunks, TOP=k, CHUNK=CHUNK, BLOCK=BLOCK,
            BLOCK_C=max(16, next_power_of_2(chunks)), BLOCK_B=next_power_of_2(chunks * (CHUNK // BLOCK)),
            BLOCK_K=next_power_of_2(max(k, 1)), FLOOR=FLOOR, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return packed, greatest, lse
