"""The draft network as the trainer uses it, against the slow reference: every layout and layer style."""

from __future__ import annotations

import pytest
import torch
from draft_fakes import draft_config, draft_tensors, flat, reference_chain, reference_hidden, write_draft

from exactspec.draft.block_model import block_attention_mask
from exactspec.draft.checkpoint import load_block_model

STYLES = {
    "dspark llama": draft_config(),
    "dflash llama": draft_config(
        architectures=["LlamaDFlashModel"], anchor_is_first_prediction=False, markov_rank=0,
        enable_confidence_head=False, confidence_head_with_markov=False,
    ),
    "qwen3 norms, bias, own head_dim": draft_config(
        model_type="qwen3", attention_bias=True, head_dim=32, architectures=["Qwen3DSparkModel"],
        anchor_is_first_prediction=..., markov_head_type="gated",
    ),
    "rnn head, confidence without Markov": draft_config(markov_head_type="rnn", confidence_head_with_markov=False),
    "z-lab": draft_config(
        architectures=["DFlashDraftModel"], model_type="qwen3", anchor_is_first_prediction=..., mask_token_id=...,
        target_layer_ids=..., markov_rank=..., markov_head_type=..., enable_confidence_head=...,
        confidence_head_with_markov=..., dflash_config={"mask_token_id": 259, "target_layer_ids": [0, 1]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_many_packed_blocks_equal_each_block_alone(style, tmp_path):
    """Two sequences in one pack; each block must see its own sequence up to its anchor, and itself, nothing else."""
    config = STYLES[style]
    weights = draft_tensors(config)
    model = load_block_model(write_draft(tmp_path, config, weights))
    generator = torch.Generator().manual_seed(1)
    num_rows = config["block_size"]
    lengths, anchors = (9, 6), ((0, 4), (0, 9), (1, 3), (1, 6))
    width = len(flat(config, "target_layer_ids")) * config["hidden_size"]
    features = [torch.randn(length, width, generator=generator) for length in lengths]
    blocks = torch.randn(len(anchors), num_rows, config["hidden_size"], generator=generator)
    context_positions = torch.cat([torch.arange(length) for length in lengths])
    context_sequences = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    anchor_positions = torch.tensor([position for _, position in anchors])
    mask = block_attention_mask(
        anchor_positions, context_positions, num_rows, torch.tensor([s for s, _ in anchors]), context_sequences
    )
    assert mask.shape == (len(anchors) * num_rows, sum(lengths) + len(anchors) * num_rows)
    hidden = model(torch.cat(features), blocks, context_positions, anchor_positions, mask)
    for row, (sequence, position) in enumerate(anchors):
        alone = reference_hidden(weights, config, features[sequence][:position], blocks[row], position)
        torch.testing.assert_close(hidden[row], alone, rtol=1e-4, atol=1e-4)


def test_leading_dimensions_are_batches(tmp_path):
    config = STYLES["dspark llama"]
    model = load_block_model(write_draft(tmp_path, config))
    generator = torch.Generator().manual_seed(2)
    features, blocks = torch.randn(3, 8, 64, generator=generator), torch.randn(3, 2, 5, 32, generator=generator)
    context = torch.arange(8).expand(3, 8)
    anchors = torch.tensor([[2, 8], [1, 5], [0, 7]])
    mask = block_attention_mask(anchors, context, 5)
    together = model(features, blocks, context, anchors, mask)
    for i in range(3):
        alone = model(features[i], blocks[i], context[i], anchors[i], mask[i])
        torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_known_blocks_at_once_equal_step_by_step(kind, tmp_path):
    """Training sees whole blocks, serving one position at a time: the same latents, the same logits."""
    config = draft_config(markov_head_type=kind)
    weights = draft_tensors(config)
    model = load_block_model(write_draft(tmp_path, config, weights))
    head = model.markov_head
    generator = torch.Generator().manual_seed(3)
    hidden, base = torch.randn(5, 32, generator=generator), torch.randn(5, 262, generator=generator)
    tokens, confidences = reference_chain(weights, config, hidden, base, anchor=17)
    previous = head.embed(torch.tensor([17, *tokens[:-1]]))
    logits = base + head.bias(head.latents(previous, hidden))
    assert logits.argmax(-1).tolist() == tokens
    predicted = torch.sigmoid(model.confidence_head(hidden, previous))
    torch.testing.assert_close(predicted, torch.tensor(confidences), rtol=0, atol=1e-5)


def test_gradients_reach_every_parameter(tmp_path):
    config = STYLES["dspark llama"]
    model = load_block_model(write_draft(tmp_path, config)).requires_grad_(True).train()
    features, blocks = torch.randn(4, 64), torch.randn(1, 5, 32)
    context, anchors = torch.arange(4), torch.tensor([4])
    hidden = model(features, blocks, context, anchors, block_attention_mask(anchors, context, 5))
    previous = model.markov_head.embed(torch.tensor([[1, 2, 3, 4, 5]]))
    loss = model.markov_head.bias(model.markov_head.latents(previous, hidden)).square().mean()
    loss = loss + model.confidence_head(hidden, previous).square().mean() + hidden.square().mean()
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
