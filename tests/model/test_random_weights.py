"""Random targets have the published shape and run; what they say is noise."""

from __future__ import annotations

import pytest
import torch
from fakes import make_batch

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.draft.random_weights import random_draft
from exactspec.errors import ConfigError
from exactspec.model.random_weights import SHAPES, random_target, shape_config
from exactspec.model.target import TargetModel

PARAMETERS = {"qwen3-8b": 8.19e9, "qwen3-4b": 4.02e9, "llama-3.1-8b": 8.03e9, "smollm2-135m": 134.5e6}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_have_the_published_parameter_counts(name: str) -> None:
    c = shape_config(name)
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    count = c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
    count += c.vocab_size * c.hidden_size * (1 if c.tied else 2)
    assert count == pytest.approx(PARAMETERS[name], rel=0.005)


def test_a_shortened_random_target_runs_and_repeats() -> None:
    loaded = [random_target("smollm2-135m", num_layers=2, context_length=64) for _ in range(2)]
    assert torch.equal(loaded[0].weights.layers[1].down, loaded[1].weights.layers[1].down)
    target = TargetModel(TorchBackend("cpu"), loaded[0])
    hidden, _ = target.forward(make_batch([(0, [1, 2, 3])]), target.make_pool(8))
    logits = target.logits(hidden)
    assert logits.shape == (3, 49152)
    assert logits.isfinite().all()
    assert 0.1 < float(logits.std()) < 10


def test_every_logit_of_a_random_target_is_a_token_that_can_be_drawn() -> None:
    tokenizer = random_target("smollm2-135m", num_layers=1, context_length=64).tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode([*tokenizer.encode("naïve"), 49151]) == "naïve<49151>"
    assert max(tokenizer.encode("<300> naïve")) < 256


def test_a_random_draft_fits_its_target() -> None:
    config = shape_config("smollm2-135m")
    draft = random_draft(config, gamma=7, markov_rank=16).config
    assert draft.gamma == 7
    assert max(draft.target_layer_ids) < config.num_layers - 1
    assert draft.target_layer_ids == (1, 7, 14, 21, 28) or len(draft.target_layer_ids) == 5


def test_unknown_shapes_are_named() -> None:
    with pytest.raises(ConfigError, match="qwen3-8b"):
        shape_config("qwen9")


def test_a_model_name_with_the_prefix_makes_one():
    from exactspec.draft.factory import make_drafter
    from exactspec.model.loader import load_target, load_tokenizer

    loaded = load_target("random:smollm2-135m", context_length=256)
    target = TargetModel(TorchBackend("cpu"), loaded)
    drafter = make_drafter("random", target, num_slots=64, gamma=None, backend=target.backend)
    assert (target.spec.num_layers, drafter.gamma) == (30, 7)
    assert load_tokenizer("random:smollm2-135m").apply_chat_template([{"role": "user", "content": "ab"}])
