"""Drafts with random weights for targets with random weights (model/random_weights.py): for speed, not for sense."""

from __future__ import annotations

import torch

from exactspec.draft.block_model import BlockModel
from exactspec.draft.config import BlockDraftConfig
from exactspec.model.config import ModelConfig


def random_draft(
    target: ModelConfig,
    gamma: int = 7,
    num_layers: int = 3,
    markov_rank: int = 256,
    seed: int = 0,
    sample_from_anchor: bool = True,
) -> BlockModel:
    """A DSpark draft (DFlash with markov_rank 0) for a target of this shape: five evenly spread target layers."""
    last = target.num_layers - 2
    config = BlockDraftConfig(
        algorithm="dspark" if markov_rank else "dflash",
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        rms_eps=target.rms_eps,
        target_layer_ids=tuple(sorted({max(0, 1 + (last - 1) * i // 4) for i in range(5)})),
        mask_token_id=5,
        block_size=gamma if sample_from_anchor else gamma + 1,
        sample_from_anchor=sample_from_anchor,
        use_qk_norm=target.qk_norm,
        num_target_layers=target.num_layers,
        markov_rank=markov_rank,
        has_confidence_head=markov_rank > 0,
        confidence_with_markov=markov_rank > 0,
        target_model=f"random weights of {target.architecture}",
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = BlockModel(config).eval()
    torch.random.set_rng_state(state)
    return model
