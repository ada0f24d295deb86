"""Peers of a bench compute what we think they compute."""

from __future__ import annotations

import pytest
import torch

from exactspec.bench.peers import as_transformers_draft
from exactspec.draft.block_model import BlockModel, block_attention_mask
from exactspec.draft.config import parse_draft_config

pytest.importorskip("transformers.models.muse_glimmer_assistant")
CONFIG = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 5, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 99, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128,
    "num_target_layers": 6, "dflash_config": {"mask_token_id": 98, "target_layer_ids": [1, 3, 4]},
}  # fmt: skip


def test_a_dflash_draft_means_the_same_to_transformers() -> None:
    """Hidden states of one block: theirs is a second implementation of the network that serving and training use."""
    torch.manual_seed(0)
    ours = BlockModel(parse_draft_config(CONFIG)).eval()
    for weight in ours.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    features, block = torch.randn(1, 9, 96), torch.randn(1, 1, 5, 32)
    anchor, context = torch.tensor([[9]]), torch.arange(9)
    mask = block_attention_mask(anchor[0], context, 5)
    with torch.no_grad():
        expected = ours(features, block, context[None], anchor, mask)[0, 0]
        found = as_transformers_draft(ours)(noise_embeds=block[0], context_hidden_states=features).last_hidden_state[0]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
