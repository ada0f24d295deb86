"""The packed, chunked, hand-derived objective against one block at a time and autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from train_fakes import blocks_of, frozen, random_batch, small_draft, small_recipe, small_target

from exactspec.train import objective
from exactspec.train.blocks import block_input_ids
from exactspec.train.objective import evaluate, tau_of

ALGORITHMS = ("dspark", "dflash")


def one_block_at_a_time(model, target, blocks, recipe):
    """Each anchor alone: the network sees the context before the anchor and nothing else, so no mask is needed."""
    features, hidden = target.forward(blocks.token_ids, model.config.target_layer_ids)
    logits_of = torch.cat([hidden.flatten(0, 1) @ target.lm_head.t()])
    rows = model.config.block_size
    inputs = block_input_ids(blocks, model.config.mask_token_id, rows)
    loss, accepts = 0.0, []
    num_anchors = blocks.anchors.shape[1]
    for n in range(blocks.label.shape[0]):
        sequence, slot = divmod(int(blocks.block[n]), num_anchors)
        anchor, k = int(blocks.anchors[sequence, slot]), int(blocks.step[n])
        everything = torch.ones(rows, anchor + rows, dtype=torch.bool)
        states = model(
            features[sequence, :anchor],
            F.embedding(inputs[sequence, slot], target.embed)[None],
            torch.arange(anchor),
            torch.tensor([anchor]),
            everything,
        )[0]
        state = states[k if model.config.sample_from_anchor else k + 1]
        logits = target.lm_head @ state
        previous = blocks.token_ids[sequence, anchor + k]
        if model.markov_head is not None:
            logits = logits + model.markov_head.markov_w2.weight @ model.markov_head.markov_w1.weight[previous]
        p = logits_of[int(blocks.target_row[n])].softmax(-1)
        q = logits.softmax(-1)
        distance = (p - q).abs().sum()
        ce = F.cross_entropy(logits, blocks.token_ids[sequence, anchor + k + 1])
        loss = loss + blocks.weight[n] * (recipe.ce_weight * ce + recipe.l1_weight * distance)
        accept = 1 - distance.detach() / 2
        accepts.append(float(torch.minimum(p, q).sum().detach()))
        if model.confidence_head is not None:
            seen = torch.cat([state, model.markov_head.markov_w1.weight[previous]])
            logit = (model.confidence_head.proj.weight[0] @ seen) + model.confidence_head.proj.bias[0]
            bce = F.binary_cross_entropy_with_logits(logit, accept)
            loss = loss + recipe.confidence_weight * blocks.weight[n] * bce
    return loss, torch.tensor(accepts)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_and_gradients_equal_the_slow_reference(algorithm, monkeypatch):
    monkeypatch.setattr(objective, "_LOGIT_BUDGET", 262 * 7)  # several chunks, the last one short
    loaded = small_target()
    recipe = small_recipe(algorithm)
    model, target = small_draft(loaded, recipe), frozen(loaded)
    blocks = blocks_of(random_batch([30, 17, 9], [5, 12, 6], 256), recipe)
    outcome = evaluate(model, target, blocks, recipe)
    outcome.loss.backward()
    fast = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss, accepts = one_block_at_a_time(model, target, blocks, recipe)
    loss.backward()
    torch.testing.assert_close(outcome.loss, loss)
    torch.testing.assert_close(outcome.accept, accepts, atol=1e-5, rtol=1e-4)
    for name, param in model.named_parameters():
        torch.testing.assert_close(fast[name], param.grad, atol=2e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_block_sees_context_before_its_anchor_and_its_own_block_only(algorithm):
    """Changing the anchor's successors, or where other anchors stand, changes nothing in a block."""
    loaded = small_target()
    recipe = small_recipe(algorithm)
    model, target = small_draft(loaded, recipe), frozen(loaded)
    batch = random_batch([40], [4], 256)
    blocks = blocks_of(batch, recipe)
    features, _ = target.forward(blocks.token_ids, model.config.target_layer_ids)
    anchor = int(blocks.anchors[0, 0])
    mine = (blocks.block == 0).nonzero()[:, 0]
    with torch.no_grad():
        before = objective.draft_hidden(model, target, blocks, features)[mine]
        changed = features.clone()
        changed[0, anchor:] = torch.randn_like(changed[0, anchor:])
        blocks.anchors[0, 1:] = torch.where(blocks.anchors[0, 1:] > 10, 7, 20)
        after = objective.draft_hidden(model, target, blocks, changed)[mine]
        changed[0, anchor - 1] += 1.0
        moved = objective.draft_hidden(model, target, blocks, changed)[mine]
    torch.testing.assert_close(after, before)
    assert (moved - before).abs().max() > 1e-3  # the position just before the anchor does count


def test_anchors_are_answer_tokens_with_a_successor_and_rows_stop_at_the_end():
    recipe = small_recipe("dspark", num_anchors=50)
    batch = random_batch([12, 20], [8, 3], 256)
    blocks = blocks_of(batch, recipe)
    rows = []
    for n in range(blocks.label.shape[0]):
        sequence, slot = divmod(int(blocks.block[n]), blocks.anchors.shape[1])
        anchor, goal = int(blocks.anchors[sequence, slot]), int(blocks.anchors[sequence, slot] + blocks.step[n] + 1)
        rows.append((sequence, anchor, goal))
        assert blocks.label[n] == batch.token_ids[sequence, goal]
        assert blocks.previous[n] == batch.token_ids[sequence, goal - 1]
        assert blocks.target_row[n] == sequence * batch.token_ids.shape[1] + goal - 1
    wanted = [
        (s, a, a + k)
        for s, (length, prompt) in enumerate([(12, 8), (20, 3)])
        for a in range(prompt, length - 1)
        for k in range(1, recipe.gamma + 1)
        if a + k < length
    ]
    assert sorted(rows) == sorted(wanted)
    assert blocks.weight.sum() == pytest.approx(1.0)
    decay = blocks.weight[blocks.step == 1][0] / blocks.weight[blocks.step == 0][0]
    assert decay == pytest.approx(torch.tensor(-1 / 4.0).exp().item())


def test_tau_is_one_plus_the_products_of_prefixes():
    recipe = small_recipe("dspark", gamma=3)
    blocks = blocks_of(random_batch([30], [5], 256), recipe)
    chance = torch.rand(blocks.label.shape[0])
    whole = []
    for block in range(blocks.num_blocks):
        mine = (blocks.block == block).nonzero()[:, 0]
        if len(mine) == 3:
            a, b, c = chance[mine[blocks.step[mine].argsort()]].tolist()
            whole.append(1 + a + a * b + a * b * c)
    assert tau_of(blocks, chance, 3).item() == pytest.approx(sum(whole) / len(whole), rel=1e-5)
