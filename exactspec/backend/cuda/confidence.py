"""A draft block's confidence as one kernel: the head's logit of every draft, calibrated, and the survival of prefixes.

The same numbers as `ConfidenceHead`, `scale_logits` and a running product, up to rounding: they decide what is
verified, never a token. As separate operators they are a dozen launches of a few microseconds in every round.
Notation: R requests, G draft tokens, H hidden size, r rank of the sequential head.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.tiles import next_power_of_2

HIDDEN_AT_ONCE = 1024


@triton.jit
def _confidence_kernel(
    hidden, anchors, drafts, draft_stride, w1, weight, bias, scales, temperatures, confidence, survival,
    H: tl.constexpr, RANK: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program r: the block of request r."""
    r = tl.program_id(0)
    k = tl.arange(0, BLOCK_G)
    is_draft = k < G
    logits = tl.zeros((BLOCK_G,), tl.float32) + tl.load(bias).to(tl.float32)
    for start in tl.static_range(0, H, BLOCK_H):
        at = start + tl.arange(0, BLOCK_H)
        row = (r * G + k)[:, None] * H + at[None, :]
        x = tl.load(hidden + row, mask=is_draft[:, None] & (at < H)[None, :], other=0.0)
        logits += tl.sum(x * tl.load(weight + at, mask=at < H, other=0.0).to(tl.float32)[None, :], 1)
    if RANK:
        lane = tl.arange(0, BLOCK_K)
        before = tl.load(drafts + r * draft_stride + k - 1, mask=is_draft & (k > 0), other=0)
        before = tl.where(k == 0, tl.load(anchors + r), before)
        ok = is_draft[:, None] & (lane < RANK)[None, :]
        x = tl.load(w1 + before[:, None] * RANK + lane[None, :], mask=ok, other=0.0).to(tl.float32)
        logits += tl.sum(x * tl.load(weight + H + lane, mask=lane < RANK, other=0.0).to(tl.float32)[None, :], 1)
    if SCALED:  # scales [2, 2, G]: greedy and temperature 1, each slope and offset
        share = tl.minimum(tl.maximum(tl.load(temperatures + r), 0.0), 1.0)
        slope = tl.load(scales + k, mask=is_draft, other=0.0)
        slope += share * (tl.load(scales + 2 * G + k, mask=is_draft, other=0.0) - slope)
        offset = tl.load(scales + G + k, mask=is_draft, other=0.0)
        offset += share * (tl.load(scales + 3 * G + k, mask=is_draft, other=0.0) - offset)
        logits = logits * slope + offset
    chance = 1.0 / (1.0 + tl.exp(-logits))
    tl.store(confidence + r * G + k, chance, mask=is_draft)
    chance = tl.where(is_draft & (chance == chance), chance, 0.0)  # not a number counts as no chance
    tl.store(survival + r * G + k, tl.cumprod(chance, 0), mask=is_draft)


def block_confidence(
    hidden: Tensor,
    anchors: Tensor,
    drafts: Tensor,
    w1: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    temperatures: Tensor,
    confidence: Tensor,
    survival: Tensor,
) -> None:
    """Fills confidence and survival [R, G] float32.

    hidden [R, G, H] float32, contiguous; anchors [R] and drafts [R, G] int64. weight [1, H] or [1, H + r] of the head,
    with w1 [V, r] in the second case (the token before a draft is looked up in it), bias [1]. scales: the calibration's
    table [2, 2, G]; temperatures [R], 0 for greedy.
    """
    count, gamma, width = hidden.shape
    rank = weight.shape[1] - width
    if rank and (w1 is None or w1.shape[1] != rank):
        raise ValueError(f"confidence head: its weight {tuple(weight.shape)} wants W1 rows of {rank}")
    _confidence_kernel[(count,)](
        hidden, anchors, drafts, drafts.stride(0), w1 if rank else weight, weight, bias,
        temperatures if scales is None else scales, temperatures, confidence, survival, H=width, RANK=rank, G=gamma,
        BLOCK_G=max(2, next_power_of_2(gamma)), BLOCK_H=min(HIDDEN_AT_ONCE, next_power_of_2(width)),
        BLOCK_K=max(2, next_power_of_2(rank)), SCALED=scales is not None, num_warps=4,
    )  # fmt: skip
