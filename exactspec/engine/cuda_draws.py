"""How a captured round draws a block of drafts, and, under rejection acceptance, what becomes of them on the device.

Rejection is made of torch operators and the kernels that draw, so that the decision is the one of `verify.accept`; what
it needs of a draft, the distribution that each token was drawn from, never leaves the device. Greedy requests of a
batch have one-hot distributions, as there.

Notation: R requests of a bucket, G draft tokens, T rows of the verify batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from exactspec.backend.cuda import sampling
from exactspec.backend.cuda.decode import RoundInputs, draw_step
from exactspec.backend.cuda.linear import CudaLinear
from exactspec.draft.block import BlockDrafter
from exactspec.sampling.noise import NoiseStream, round_seeds
from exactspec.verify.accept import LARGEST_COIN, accepts, residual_weights

ROWS_AT_ONCE = 128  # rows of V probabilities that exist at a time while drafts are judged
Noise = tuple[Tensor, Tensor, Tensor]  # [R] temperatures (0: greedy), seeds, output positions of the first draw


def draw_block(
    drafter: BlockDrafter, hidden: Tensor, anchors: Tensor, noise: Noise | None, ids: Tensor, valid: int
) -> None:
    """hidden [R, G, H] and anchors [R] -> ids [R, G], drawn with the target's noise, left to right where there is a
    sequential head. noise: None where all are greedy. Ids are below `valid`."""
    count, gamma, _ = hidden.shape
    base = drafter.output.lm_head(hidden.flatten(0, 1)).view(count, gamma, -1)
    head, w1, stream = drafter.drawer.head, drafter.drawer.w1, int(NoiseStream.TARGET)
    if head is None or w1 is None:
        temperatures = seeds = positions = None
        if noise is not None:
            temperatures, seeds = (t[:, None].expand(count, gamma).reshape(-1) for t in noise[:2])
            positions = _along(noise[2], gamma).reshape(-1)
        drawn, _, _ = sampling.draw(base.flatten(0, 1), temperatures, seeds, positions, stream, valid)
        ids.copy_(drawn.view(count, gamma))
        return
    w2 = cast(CudaLinear, drafter.output.markov_w2).weight
    previous = w1[anchors].float()
    state = head.start(hidden[:, 0])
    for k in range(gamma):
        latent, state = head.step(previous, hidden[:, k], state)
        draw_step(base[:, k], latent, w2, w1, k, ids[:, k], previous, noise, stream, valid)


def draw_block_with_probs(
    drafter: BlockDrafter, hidden: Tensor, anchors: Tensor, noise: Noise, ids: Tensor, probs: Tensor, valid: int
) -> None:
    """The same with noise of the drafts' own stream; probs [R, G, V] gets the distributions that ids are drawn from."""
    count, gamma, _ = hidden.shape
    base = drafter.output.lm_head(hidden.flatten(0, 1)).view(count, gamma, -1)
    head, w1, w2 = drafter.drawer.head, drafter.drawer.w1, drafter.output.markov_w2
    temperatures, seeds, positions = noise
    seeds = round_seeds(seeds, positions)
    state = None if head is None else head.start(hidden[:, 0])
    previous = anchors
    for k in range(gamma):
        logits = base[:, k]
        if head is not None and w1 is not None and w2 is not None:
            latent, state = head.step(w1[previous].float(), hidden[:, k], state)
            logits = logits + w2(latent)
        previous, _, _ = sampling.draw(logits, temperatures, seeds, positions + k, int(NoiseStream.DRAFT), valid)
        ids[:, k] = previous
        probs[:, k] = distributions(logits, temperatures, previous, valid)


def distributions(logits: Tensor, temperatures: Tensor, drawn: Tensor, valid: int) -> Tensor:
    """What plain requests draw from, [N, V]: softmax(logits / T) of the valid tokens, or one-hot at `drawn` where T is
    0 (for greedy rows that is the argmax)."""
    hot = temperatures > 0
    scaled = logits / torch.where(hot, temperatures, 1.0)[:, None]
    if valid < scaled.shape[1]:
        scaled[:, valid:] = float("-inf")
    one_hot = torch.zeros_like(scaled).scatter_(1, drawn[:, None], 1.0)
    return torch.where(hot[:, None], scaled.softmax(dim=-1), one_hot)


@dataclass(slots=True)
class VerifiedRows:
    """The verify batch as rejection sees it. Request r's rows begin at starts[r]; lens[r] of its drafts have one."""

    logits: Tensor  # [T, V]
    drawn: Tensor  # [T] int64, with the target's own noise
    temperatures: Tensor  # [T]
    starts: Tensor  # [R] int64
    lens: Tensor  # [R] int64
    valid: int


def reject(rows: VerifiedRows, inputs: RoundInputs, drafts: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """`accept_rejection` for a bucket: drafts [R, G] with their distributions probs [R, G, V].

    Returns what makes `seats.judge` decide so: tokens [T] that equal the accepted drafts and go on with the draw after
    them (from the residual, or the target's own after the last draft), and drafts with -1 in the place of the first
    that is rejected.
    """
    gamma = drafts.shape[1]
    lane = torch.arange(gamma, device=drafts.device)
    verified = lane < rows.lens[:, None]
    at = (rows.starts[:, None] + lane).clamp(max=rows.drawn.shape[0] - 1)
    own = probs.gather(2, drafts[:, :, None])[:, :, 0]
    passed = accepts(_target_probs(rows, at, verified, drafts), own, _coins(inputs, gamma)) & verified
    count = passed.long().cumprod(1).sum(1)
    rejects = count < rows.lens
    first = rejects[:, None] & (lane == count[:, None])
    residual = _draw_residual(rows, inputs, probs, count)
    values = torch.where(first, residual[:, None], drafts)
    nobody = rows.drawn.shape[0]
    index = torch.where(verified & (lane <= count[:, None]), at, nobody)
    tokens = torch.cat([rows.drawn, rows.drawn.new_zeros(1)])
    tokens.scatter_(0, index.flatten(), values.flatten())
    return tokens[:nobody], drafts.masked_fill(first, -1)


def _target_probs(rows: VerifiedRows, at: Tensor, verified: Tensor, drafts: Tensor) -> Tensor:
    """p of each verified draft [R, G], from its row `at`; a few rows at a time."""
    num_rows = rows.drawn.shape[0]
    asked = rows.drawn.new_zeros(num_rows + 1)
    asked.scatter_(0, torch.where(verified, at, num_rows).flatten(), drafts.flatten())
    found = torch.empty(num_rows, dtype=torch.float32, device=at.device)
    for start in range(0, num_rows, ROWS_AT_ONCE):
        part = slice(start, min(start + ROWS_AT_ONCE, num_rows))
        target = distributions(rows.logits[part], rows.temperatures[part], rows.drawn[part], rows.valid)
        found[part] = target.gather(1, asked[part, None])[:, 0]
    return found[at]


def _coins(inputs: RoundInputs, gamma: int) -> Tensor:
    """One uniform number in [0, 1) for each draft, [R, G] float64, as `verify.accept` makes it."""
    positions = _along(inputs.output_positions, gamma)
    seeds = inputs.seeds[:, None].expand_as(positions)
    noise = sampling.gumbel(seeds.reshape(-1), positions.reshape(-1), int(NoiseStream.ACCEPT), 1)[:, 0].double()
    return torch.exp(-torch.exp(-noise)).clamp_(max=LARGEST_COIN).view_as(positions)


def _draw_residual(rows: VerifiedRows, inputs: RoundInputs, probs: Tensor, count: Tensor) -> Tensor:
    """[R]: the draw in the place of draft `count`, with noise of its own. Meaningless where there is no such draft."""
    gamma = probs.shape[1]
    at = (rows.starts + count).clamp(max=rows.drawn.shape[0] - 1)
    target = distributions(rows.logits[at], rows.temperatures[at], rows.drawn[at], rows.valid)
    draft = probs.gather(1, count.clamp(max=gamma - 1)[:, None, None].expand(-1, 1, probs.shape[2]))[:, 0]
    noise = sampling.gumbel(inputs.seeds, inputs.output_positions + count, int(NoiseStream.RESIDUAL), target.shape[1])
    return sampling.draw(residual_weights(target, draft).log() + noise, None, None, None)[0]


def _along(first: Tensor, gamma: int) -> Tensor:
    """[R] -> [R, G]: first and the numbers after it."""
    return first[:, None] + torch.arange(gamma, device=first.device)
