"""What ModelConfig takes over, and what it refuses by name."""

from __future__ import annotations

import pytest
from tiny_checkpoints import ROPES, SIZES
from transformers import CONFIG_MAPPING

from exactspec.errors import CheckpointError, ConfigError, UnsupportedModelError
from exactspec.model.config import from_hf_config


def config(model_type="llama", context_length=None, **changes):
    return from_hf_config(CONFIG_MAPPING[model_type](**{**SIZES, **changes}), context_length)


def test_gemma_has_local_and_global_layers_with_their_own_rope():
    found = config("gemma3_text", num_hidden_layers=7, head_dim=16, sliding_window=8, query_pre_attn_scalar=64)
    assert found.windows == (8, 8, 8, 8, 8, None, 8)
    assert found.ropes[found.rope_index[0]].inv_freq[1] == pytest.approx(1e4 ** (-2 / 16))
    assert found.ropes[found.rope_index[5]].inv_freq[1] == pytest.approx(1e6 ** (-2 / 16))
    assert (found.attention_scale, found.activation, found.embed_scale) == (0.125, "gelu_tanh", pytest.approx(48**0.5))
    assert found.norm_offset
    assert found.post_norms
    assert found.qk_norm
    assert found.tied


def test_mistral_slides_everywhere_and_qwen2_where_it_says():
    assert config("mistral", sliding_window=7).windows == (7, 7, 7)
    assert config("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=2).windows == (None, None, 9)
    assert config("qwen2", sliding_window=9).windows == (None, None, None)


def test_rope_tables_reach_past_the_context():
    tables = config(context_length=100).rope_tables()
    assert len(tables) == 1
    assert tables[0].cos.shape == (164, 6)
    assert tables[0].cos[0].tolist() == [1.0] * 6


def test_yarn_stretches_the_context_and_a_shorter_one_may_be_asked_for():
    assert config(rope_parameters=ROPES["yarn"]).context_length == 160
    stretched = config(rope_parameters=ROPES["yarn"], max_position_embeddings=40)
    assert (stretched.max_context, stretched.context_length) == (160, 160)
    assert config(context_length=33).context_length == 33


@pytest.mark.parametrize("length", [0, -1, True, 2.5, 161])
def test_a_context_that_cannot_be_had(length):
    with pytest.raises(ConfigError, match="context_length"):
        config(context_length=length)


def test_dynamic_rope_is_exact_up_to_the_original_length_only():
    assert config(rope_parameters=ROPES["dynamic"]).context_length == 160
    with pytest.raises(ConfigError, match=r"context_length 200 .* 160: dynamic RoPE .* cannot be served exactly"):
        config(rope_parameters=ROPES["dynamic"], context_length=200)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, r"gpt2 is not supported; supported: LlamaForCausalLM .*Gemma3ForCausalLM"),
        ("mixtral", {}, "mixtral is not supported"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8: mixtures of experts"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
    ],
)
def test_what_no_code_honours_is_refused(model_type, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config(model_type, **changes)


def test_longrope_is_refused_by_name():
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=r"rope_type 'longrope' .* default, linear, dynamic, llama3, yarn"):
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})


def test_heads_that_do_not_divide():
    with pytest.raises(CheckpointError, match="num_key_value_heads 3 does not divide num_attention_heads 4"):
        config(num_key_value_heads=3)


def test_llama_has_no_windows_whatever_its_layer_types_say():
    assert config("llama", layer_types=["sliding_attention"] * 3, sliding_window=5).windows == (None, None, None)


def test_each_family_reads_its_own_field_of_the_activation():
    changes = {"num_hidden_layers": 3, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}
    assert config("gemma3_text", hidden_activation="silu", **changes).activation == "silu"
    assert config("llama", hidden_act="silu", hidden_activation="gelu_pytorch_tanh").activation == "silu"
    with pytest.raises(UnsupportedModelError, match="hidden_activation 'relu'"):
        config("gemma3_text", hidden_activation="relu", **changes)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_holds_nothing(window):
    with pytest.raises(CheckpointError, match=rf"sliding_window: must be an integer >= 1 or null, got {window}"):
        config("mistral", sliding_window=window)


def test_a_negative_window_of_some_layers():
    with pytest.raises(CheckpointError, match="sliding_window: must be an integer >= 1 or null, got -2"):
        config("qwen3", use_sliding_window=True, sliding_window=-2, max_window_layers=1)
