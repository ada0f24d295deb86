"""The objective (arXiv 2607.05147, section 3.3): cross-entropy, L1 distance and confidence; and tau from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from exactspec.draft.block_model import BlockModel
from exactspec.train.blocks import BlockBatch, block_attend, block_input_ids, context_positions
from exactspec.train.draft_ops import draft_operators
from exactspec.train.frozen import FrozenTarget
from exactspec.train.fused import can_fuse, fused_forward
from exactspec.train.ops import Coupling, operators
from exactspec.train.options import Recipe

_LOGIT_BUDGET = 2**30  # logits (elements) held at a time, draft and target each


@dataclass
class Outcome:
    """What a batch gave. Row tensors [N] are detached float32: ce, l1, accept (1 - l1 / 2, the chance that rejection
    sampling at T=1 accepts), match (same argmax), confidence (logit) or None, agree (draws with common noise at T=1
    gave the same token) or None where the recipe has no coupled term."""

    loss: Tensor
    ce: Tensor
    l1: Tensor
    accept: Tensor
    match: Tensor
    confidence: Tensor | None
    agree: Tensor | None = None


def evaluate(model: BlockModel, target: FrozenTarget, blocks: BlockBatch, recipe: Recipe) -> Outcome:
    """Target forward, draft forward and loss of one batch. Gradients flow into `model` alone."""
    with torch.autocast(target.device.type, enabled=False):
        features, target_hidden = target.forward(blocks.token_ids, model.config.target_layer_ids)
    hidden = draft_hidden(model, target, blocks, features)
    return compute_loss(model, target, blocks, hidden, target_hidden.flatten(0, 1), recipe)


def draft_hidden(model: BlockModel, target: FrozenTarget, blocks: BlockBatch, features: Tensor) -> Tensor:
    """Draft states of the rows that predict, [N, H] in the order of the batch's rows."""
    config = model.config
    rows = config.block_size
    embeddings = target.embed_rows(block_input_ids(blocks, config.mask_token_id, rows))
    ops = _fused_operators(target.device)
    if ops is not None and can_fuse(model):
        hidden = fused_forward(model, features, embeddings, blocks.anchors, ops)
    else:
        attend = block_attend(blocks, rows, target.dtype)
        hidden = model(features, embeddings, context_positions(blocks), blocks.anchors, attend)
    first = 0 if config.sample_from_anchor else 1
    return hidden.flatten(0, 2).index_select(0, blocks.block * rows + blocks.step + first)


def _fused_operators(device: torch.device) -> SimpleNamespace | None:
    """The plain network is as fast on a CPU."""
    return draft_operators(device) if device.type == "cuda" else None


def compute_loss(
    model: BlockModel, target: FrozenTarget, blocks: BlockBatch, hidden: Tensor, target_hidden: Tensor, recipe: Recipe
) -> Outcome:
    """hidden [N, H] draft states; target_hidden [B * L, H] after the final norm."""
    head = model.markov_head
    previous = latent = w2 = None
    if head is not None:
        previous = head.embed(blocks.previous)
        latent, w2 = head.latents(previous.unsqueeze(1), hidden.unsqueeze(1)).squeeze(1), head.markov_w2.weight
    coupling = None
    if recipe.coupled_weight > 0:
        coupling = Coupling(recipe.coupled_weight, recipe.coupled_temperature, blocks.noise_seed)
    settings = (recipe.ce_weight, recipe.l1_weight, coupling, target)
    loss, ce, l1, match, agree = _LinearDistance.apply(
        hidden, latent, w2, target_hidden, blocks.target_row, blocks.label, blocks.weight, settings
    )
    accept = (1.0 - 0.5 * l1).clamp(0.0, 1.0)
    confidence = None
    if model.confidence_head is not None:
        confidence = model.confidence_head(hidden, previous).float()
        bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
        loss = loss + recipe.confidence_weight * (bce * blocks.weight).sum()
        confidence = confidence.detach()
    return Outcome(loss, ce, l1, accept, match, confidence, agree)


class _LinearDistance(torch.autograd.Function):
    """LM head (plus Markov bias), loss and gradient in one go, a chunk of rows at a time.

    The logits of a chunk turn into their own gradient in place, so that no more than two chunks of logits are held.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        target_hidden: Tensor,
        target_row: Tensor,
        label: Tensor,
        weight: Tensor,
        settings: tuple[float, float, Coupling | None, FrozenTarget],
    ) -> tuple[Tensor | None, ...]:
        ce_weight, l1_weight, coupling, target = settings
        dtype, width = target.lm_head.dtype, hidden.shape[1]
        x = hidden.to(dtype) if latent is None else torch.cat([hidden.to(dtype), latent.to(dtype)], dim=1)
        matrix = target.lm_head if w2 is None else torch.cat([target.lm_head, w2.to(dtype)], dim=1)
        grad_x = torch.empty_like(x)
        grad_w2 = None if w2 is None else torch.zeros(w2.shape, dtype=torch.float32, device=w2.device)
        rows = max(1, _LOGIT_BUDGET // matrix.shape[0])
        measures: list[tuple[Any, ...]] = []
        for start in range(0, x.shape[0], rows):
            part = slice(start, start + rows)
            logits = F.linear(x[part], matrix)
            wanted = F.linear(target_hidden[target_row[part]], target.lm_head)
            noise = None if coupling is None else replace(coupling, first_row=start)
            given = (logits, wanted, label[part], weight[part], ce_weight, l1_weight, noise)
            measures.append(operators(x.device).distance_loss_(*given))
            torch.mm(logits, matrix, out=grad_x[part])
            if grad_w2 is not None:
                grad_w2 += logits.t() @ x[part, width:]
        ce, l1, match = (torch.cat([one[i] for one in measures]) for i in range(3))
        coupled, agree = (None if coupling is None else torch.cat([one[i] for one in measures]) for i in (3, 4))
        ctx.width, ctx.has_latent = width, latent is not None
        ctx.hidden_dtype = hidden.dtype
        ctx.save_for_backward(grad_x, grad_w2)
        each = ce_weight * ce + l1_weight * l1
        if coupling is not None and coupled is not None:
            each = each + coupling.weight * coupled
        ctx.mark_non_differentiable(*(t for t in (ce, l1, match, agree) if t is not None))
        return (weight * each).sum(), ce, l1, match, agree

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w2 = ctx.saved_tensors
        grad_hidden = (grad_x[:, : ctx.width] * grad).to(ctx.hidden_dtype)
        if not ctx.has_latent:
            return grad_hidden, None, None, None, None, None, None, None
        return grad_hidden, grad_x[:, ctx.width :] * grad, grad_w2 * grad, None, None, None, None, None


def tau_of(blocks: BlockBatch, row_chance: Tensor, gamma: int) -> Tensor:
    """Mean accept length, bonus included: 1 + sum over k of the product of the first k chances, a mean over the
    blocks that predict all gamma tokens. A scalar (nan where there is no such block)."""
    chances = torch.zeros(blocks.num_blocks, gamma, device=row_chance.device)
    chances[blocks.block, blocks.step] = row_chance
    whole = (
        torch.zeros(blocks.num_blocks, device=row_chance.device).index_add_(
            0, blocks.block, torch.ones_like(row_chance)
        )
        == gamma
    )
    return (1.0 + chances.cumprod(1).sum(1))[whole].mean()


def acceptance_by_position(blocks: BlockBatch, row_chance: Tensor, gamma: int) -> tuple[Tensor, Tensor]:
    """(sums, counts) [gamma] of the rows' acceptance, conditional on a right prefix (teacher forcing)."""
    sums = torch.zeros(gamma, device=row_chance.device).index_add_(0, blocks.step, row_chance)
    return sums, torch.bincount(blocks.step, minlength=gamma).float()
