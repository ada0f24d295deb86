"""The published layouts mean different things by the same words; after reading, one meaning is left."""

from __future__ import annotations

import json

import pytest
import torch
from draft_fakes import draft_config, draft_tensors, write_draft
from safetensors.torch import save_file

from exactspec.draft.block_model import draft_rope
from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.config import parse_draft_config, read_draft_config
from exactspec.errors import CheckpointError, UnsupportedModelError

ABSENT = dict.fromkeys(
    ("anchor_is_first_prediction", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type",
     "enable_confidence_head", "confidence_head_with_markov"), ...,
)  # fmt: skip
DEEPSPEC_DSPARK = draft_config(
    architectures=["Qwen3DSparkModel"], model_type="qwen3", anchor_is_first_prediction=..., block_size=7,
    num_anchors=512, layer_types=["full_attention"] * 2, tie_word_embeddings=False, attention_dropout=0.0,
)  # fmt: skip
DEEPSPEC_DFLASH = draft_config(
    architectures=["Qwen3DSparkModel"], model_type="qwen3", anchor_is_first_prediction=..., block_size=7,
    markov_rank=0, markov_head_type=..., enable_confidence_head=False, confidence_head_with_markov=...,
)  # fmt: skip
ZLAB_DFLASH = draft_config(
    **ABSENT, architectures=["DFlashDraftModel"], model_type="qwen3", block_size=16,
    dflash_config={"mask_token_id": 259, "target_layer_ids": [0, 1]},
)  # fmt: skip
OWN_DFLASH = draft_config(
    architectures=["LlamaDFlashModel"], anchor_is_first_prediction=False, block_size=8, markov_rank=0,
    enable_confidence_head=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "gamma", "from_anchor", "qk_norm", "rank"),
    [
        (DEEPSPEC_DSPARK, 7, True, True, 6),
        (DEEPSPEC_DFLASH, 7, True, True, 0),
        (ZLAB_DFLASH, 15, False, True, 0),
        (OWN_DFLASH, 7, False, False, 0),
        (draft_config(), 5, True, False, 6),
    ],
)
def test_each_layout_loads_with_its_own_conventions(config, gamma, from_anchor, qk_norm, rank, tmp_path):
    model = load_block_model(write_draft(tmp_path, config))
    read = model.config
    assert (read.gamma, read.sample_from_anchor, read.use_qk_norm) == (gamma, from_anchor, qk_norm)
    assert (read.markov_rank, read.mask_token_id, read.target_layer_ids) == (rank, 259, (0, 1))
    assert (model.confidence_head is not None) == (rank > 0)
    assert (model.layers[0].self_attn.q_norm is not None) == qk_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_precisions(dtype, tmp_path):
    config = draft_config()
    weights = draft_tensors(config)
    model = load_block_model(write_draft(tmp_path, config, weights, dtype))
    assert torch.equal(model.fc.weight, weights["fc.weight"].to(dtype).float())
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_shards_wrapped_names_and_saved_angles(tmp_path):
    """An index over two files, names below `model.`, and inv_freq buffers that some trainers save."""
    config = draft_config()
    weights = {f"model.{name}": value for name, value in draft_tensors(config).items()}
    weights["model.rotary_emb.inv_freq"] = torch.ones(4)
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_block_model(tmp_path).fc.weight, weights["model.fc.weight"])


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_in_both_spellings(spelling):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    if spelling == "rope_parameters":
        config = parse_draft_config(draft_config(rope_theta=..., rope_parameters={**scaling, "rope_theta": 5e5}))
    else:
        config = parse_draft_config(draft_config(rope_theta=5e5, rope_scaling=scaling))
    assert config.rope_theta == 5e5
    plain = parse_draft_config(draft_config(rope_theta=5e5))
    scaled, unscaled = draft_rope(config).inv_freq, draft_rope(plain).inv_freq
    assert scaled[0] == unscaled[0]  # fast angles stay
    assert scaled[-1] == pytest.approx(unscaled[-1] / 8)  # slow ones are stretched


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask_token_id": ...}, "mask_token_id: absent; must be an integer from 0 to 261"),
        ({"mask_token_id": -1}, "mask_token_id: must be an integer from 0 to 261 .* got -1"),
        ({"mask_token_id": 262}, "mask_token_id: .* 0 to 261 .* got 262"),
        ({"mask_token_id": "5"}, "mask_token_id"),
        ({"block_size": 0}, "block_size: must be an integer from 1 to 1024, got 0"),
        ({"block_size": ...}, "block_size: absent"),
        ({"block_size": 1, "anchor_is_first_prediction": False}, "block_size: 1 leaves no row"),
        ({"target_layer_ids": []}, "target_layer_ids: must be a non-empty list"),
        ({"target_layer_ids": [-1, 1]}, "target_layer_ids: must hold decoder layers counted from 0, got -1"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids: must rise strictly"),
        ({"hidden_size": ...}, "hidden_size: absent"),
        ({"hidden_size": True}, "hidden_size: must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4"),
        ({"markov_head_type": "lstm"}, "markov_head_type: must be one of vanilla, gated, rnn, got 'lstm'"),
        ({"markov_rank": 0}, "confidence_head_with_markov: needs a Markov head"),
        ({"hidden_act": "relu"}, "hidden_act: must be one of"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: must be a positive number"),
        ({"use_qk_norm": 1}, "use_qk_norm: must be true or false"),
        ({"architectures": ["Mystery"], "anchor_is_first_prediction": ...}, "architectures: Mystery: cannot tell"),
        ({"dflash_config": 3}, "dflash_config: expected an object"),
        ({"model_type": ["llama"]}, r"model_type: \['llama'\] is not one of"),
        ({"hidden_act": {}}, "hidden_act: must be one of"),
        ({"markov_head_type": []}, "markov_head_type: must be one of"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be an integer from 1 to 1024"),
        ({"block_size": 10**20}, "block_size: must be an integer from 1 to 1024"),
        ({"hidden_size": 10**20}, "hidden_size: must be an integer from 1 to"),
        ({"head_dim": 7}, "head_dim: must be even for RoPE, got 7"),
        ({"layer_types": 5}, "layer_types: only full_attention is supported, got 5"),
        ({"rope_scaling": "yarn"}, "rope_scaling: must be an object, got 'yarn'"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters: rope_theta: must be a positive number, got 'x'"),
        ({"rope_theta": -1.0}, "rope_theta: must be a positive number, got -1.0"),
    ],
)
def test_faulty_values_are_named_with_their_file(changes, says, tmp_path):
    folder = write_draft(tmp_path, draft_config(**changes), {})
    with pytest.raises(CheckpointError, match=says) as caught:
        read_draft_config(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    "scaling",
    [{"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "linear", "factor": 0}],
)
def test_rope_scalings_that_give_no_frequencies_are_named(scaling):
    with pytest.raises(CheckpointError, match="rope_scaling: "):
        draft_rope(parse_draft_config(draft_config(rope_scaling=scaling)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_sliding_window": True}, "use_sliding_window: True"),
        ({"model_type": "gemma3_text"}, "model_type: 'gemma3_text' is not one of .* qwen3, llama"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types: only full_attention"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type: 'domino'"),
        ({"dflash_config": {"causal": True}}, "causal: True"),
        ({"is_causal_in_block": True}, "is_causal_in_block: True"),
        ({"output_multiplier": 0.5}, "output_multiplier: 0.5"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"dflash_config": {"selector_rank": 8}}, "selector_rank: 8"),
    ],
)
def test_options_that_change_the_numbers_are_refused(changes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        parse_draft_config(draft_config(**changes))


@pytest.mark.parametrize(("content", "says"), [("{", "not readable as JSON"), ("[1]", "expected a JSON object")])
def test_config_files_that_are_no_config(content, says, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        read_draft_config(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_draft_config(tmp_path / "missing")
