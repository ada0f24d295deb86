"""Our forward against transformers' on tiny random models: every family, every RoPE scaling, prefill and decode."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from fakes import full_logits, make_batch
from tiny_checkpoints import FAMILIES, ROPES, hf_logits, hf_model, load, save

TOKENS = [(i * 89 + i * i) % 256 for i in range(100)]
TOLERANCE = 1e-5  # float32: the same sums in another order; logits here are of size 1 to 10


def in_pieces(target, token_ids, sizes):
    """Logits of a sequence that enters the cache in pieces: prefill chunks, blocks and single rows."""
    pages = [list(range(-(-len(token_ids) // 4)))[::-1]]
    pool = target.make_pool(4 * len(pages[0]))
    rows, at = [], 0
    for size in sizes:
        hidden, _ = target.forward(make_batch([(at, token_ids[at : at + size])], pages=pages), pool)
        rows.append(target.logits(hidden))
        at += size
    return torch.cat(rows)


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_transformers_logits(family, tmp_path):
    model_type, changes = FAMILIES[family]
    model = hf_model(model_type, **changes)
    target = load(save(model, tmp_path))
    assert target.dtype == torch.float32
    expected = hf_logits(model, TOKENS)
    assert expected.std() > 0.5  # a model that says nothing would pass anything
    prefill = full_logits(target, TOKENS)
    assert relative(prefill, expected) < TOLERANCE
    assert torch.equal(in_pieces(target, TOKENS, (1, 30, 8, 1, 1, 1, 17, 8, 33)), prefill)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # the name that all our transformers know
@pytest.mark.parametrize("family", ["llama", "mistral window", "gemma3"])
def test_decode_with_transformers_own_cache(family, tmp_path):
    model_type, changes = FAMILIES[family]
    model = hf_model(model_type, **changes)
    target = load(save(model, tmp_path))
    ours = in_pieces(target, TOKENS[:40], (28, *[1] * 12))
    with torch.no_grad():
        first = model(torch.tensor([TOKENS[:28]]), use_cache=True)
        rows, cache = [first.logits[0]], first.past_key_values
        for token in TOKENS[28:40]:
            step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(step.logits[0])
            cache = step.past_key_values
    assert relative(ours, torch.cat(rows)) < TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_rope_scaling_gives_transformers_logits(rope, model_type, tmp_path):
    model = hf_model(model_type, rope_parameters=ROPES[rope], head_dim=16)
    target = load(save(model, tmp_path))
    assert relative(full_logits(target, TOKENS), hf_logits(model, TOKENS)) < TOLERANCE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "linear", "factor": 2.5}, "linear"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}, "yarn"),
    ],
)
def test_the_old_form_of_rope_scaling(old, new, tmp_path):
    """Configs written before transformers 5 have rope_theta and rope_scaling side by side."""
    model = hf_model("llama", rope_parameters=ROPES[new])
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = old
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative(full_logits(load(tmp_path), TOKENS), hf_logits(model, TOKENS)) < TOLERANCE


def test_captured_layers_are_transformers_hidden_states(tmp_path):
    """Layer i's output is entry i + 1 of transformers' list."""
    model = hf_model("llama")
    target = load(save(model, tmp_path))
    batch = make_batch([(0, TOKENS[:20])])
    _, captured = target.forward(batch, target.make_pool(20), capture=(1, 0))
    with torch.no_grad():
        states = model(torch.tensor([TOKENS[:20]]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[2][0], states[1][0]], dim=-1)
    assert relative(captured, expected) < TOLERANCE


def test_bfloat16_weights_are_rounded_once_and_computed_in_float32(tmp_path):
    model = hf_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    target = load(save(copy.deepcopy(model).bfloat16(), tmp_path))
    assert target.dtype == torch.bfloat16
    exact = hf_logits(model, TOKENS)
    found = full_logits(target, TOKENS)
    assert relative(found, exact) < 0.03  # activations are rounded to bfloat16 where they meet a weight
    assert relative(full_logits(load(tmp_path, dtype="float32"), TOKENS), exact) < TOLERANCE
