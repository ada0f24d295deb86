"""Folders of safetensors: one file or shards, and every fault by its name."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import full_logits
from safetensors.torch import load_file, save_file
from tiny_checkpoints import hf_logits, hf_model, load, save

from exactspec.errors import CheckpointError, ConfigError, UnsupportedModelError
from exactspec.model.loader import load_target, load_tokenizer
from exactspec.model.target import TargetModel

TOKENS = list(b"The same weights, however they are stored.")


@pytest.fixture
def folder(tmp_path):
    return save(hf_model("llama"), tmp_path)


def edit(folder, change):
    """Apply `change` to the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_shards_and_one_file_are_the_same_model(tmp_path):
    model = hf_model("qwen3", head_dim=16)
    one = load(save(model, tmp_path / "one"))
    many_folder = save(model, tmp_path / "many", max_shard_size="40KB")
    assert len(list(many_folder.glob("*.safetensors"))) > 2
    assert torch.equal(full_logits(load(many_folder), TOKENS), full_logits(one, TOKENS))


def test_a_tied_head_is_one_tensor(tmp_path):
    loaded = load_target(str(save(hf_model("llama", tie_word_embeddings=True), tmp_path)))
    assert loaded.weights.lm_head is loaded.weights.embed


def test_end_tokens_are_the_union_of_all_configs(folder):
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 258], "temperature": 0.6, "top_k": 20})
    )
    edit_config(folder, eos_token_id=5)
    loaded = load_target(str(folder))
    assert loaded.eos_ids == loaded.tokenizer.eos_ids == load_tokenizer(str(folder)).eos_ids == {3, 5, 258}
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_dtypes(folder, name):
    loaded = load_target(str(folder), dtype=name)
    assert loaded.dtype == getattr(torch, name)
    assert loaded.weights.layers[0].qkv.dtype == loaded.dtype
    assert loaded.weights.layers[0].input_norm.dtype == loaded.weights.final_norm.dtype == torch.float32


def test_released_layers_cannot_be_used_again(folder):
    loaded = load_target(str(folder))
    backend = load(folder).backend
    TargetModel(backend, loaded)
    loaded.release_layers()
    with pytest.raises(CheckpointError, match="0 layers at hand, expected 3"):
        TargetModel(backend, loaded)


def test_a_missing_tensor(folder):
    edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors missing: model.layers.1.mlp.up_proj.weight \[80, 48\]"):
        load(folder)


def test_an_unexpected_tensor(folder):
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors .*model.layers.0.self_attn.q_norm.weight"):
        load(folder)


def test_a_wrong_shape(folder):
    edit(folder, lambda t: t.update({"model.layers.2.self_attn.k_proj.weight": torch.ones(25, 48)}))
    with pytest.raises(
        CheckpointError, match=r"model.layers.2.self_attn.k_proj.weight has shape \[25, 48\], expected \[24, 48\]"
    ):
        load(folder)


def test_another_vocabulary(folder):
    edit_config(folder, vocab_size=300)
    with pytest.raises(CheckpointError, match=r"has shape \[262, 48\], expected \[300, 48\] \(vocab_size 300\)"):
        load(folder)


def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    folder = save(hf_model("llama", vocab_size=200, bos_token_id=1, eos_token_id=2, pad_token_id=0), tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer has 256 ids, model.embed_tokens.weight only 200 rows"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_a_wrong_dtype(folder, dtype):
    name = "model.layers.0.mlp.down_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"tensor {name} has dtype \w+, expected one of F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors: not a complete safetensors file"):
        load(folder)


def test_a_missing_shard_and_a_wrong_index(tmp_path):
    folder = save(hf_model("llama"), tmp_path, max_shard_size="40KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"], kept = "model-00077-of-00009.safetensors", dict(index["weight_map"])
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names model-00077-of-00009.safetensors, which is missing"):
        load(folder)
    first, other = sorted(set(kept.values()))[:2]
    moved = next(name for name, file in kept.items() if file == other)
    index["weight_map"] = kept | {moved: first}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"tensor {moved} is missing, the index says it is here"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", 5, ""])
def test_an_index_cannot_name_files_elsewhere(tmp_path, name):
    folder = save(hf_model("llama"), tmp_path, max_shard_size="40KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model.norm.weight: .* is not the name of a file in this folder"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": 5}, "architecture 5 is not supported"),
        ({"vocab_size": "x"}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: must be an integer from 1 to 10000"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: must be an integer from 1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: must be a positive number, got inf"),
        ({"hidden_act": []}, "config"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}}, "gives infinite frequencies"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "config"),
        ({"quantization_config": 5}, "config.json"),
    ],
)
def test_faulty_values_of_a_config_are_refused(folder, changes, says):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=says):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "5"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [[1]]}'),
    ],
)
def test_other_files_that_are_not_what_they_should_be(folder, file, content):
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError):
        load(folder)


def test_weights_that_are_no_numbers(folder):
    """Also those that the dtype asked for cannot hold."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for value, dtype in ((float("nan"), "auto"), (float("-inf"), "auto"), (1e30, "float16")):
        tensors[name][3, 2] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=rf"tensor {name}: holds NaN or infinite values as float"):
            load_target(str(folder), dtype=dtype)


def test_pickled_weights_are_not_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model.bin, but pickled weights are not loaded"):
        load(folder)


def test_other_architectures_and_broken_configs(folder):
    edit_config(folder, architectures=["MixtralForCausalLM"], model_type="mixtral")
    with pytest.raises(UnsupportedModelError, match=r"MixtralForCausalLM is not supported; supported: Llama"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(folder)


def test_names_that_are_no_model(tmp_path):
    (tmp_path / "model.pt").touch()
    with pytest.raises(CheckpointError, match=r"expected a folder .* or a .gguf file"):
        load_target(str(tmp_path / "model.pt"))
    with pytest.raises(CheckpointError, match=r"'no such model' is no folder .*aliases: gemma3-270m, smollm2-135m"):
        load_target("no such model")
    with pytest.raises(ConfigError, match="dtype"):
        load_target(str(tmp_path), dtype="int8")


def test_logits_are_those_of_the_saved_model(folder):
    assert (full_logits(load(folder), TOKENS) - hf_logits(hf_model("llama"), TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_head_that_differs_from_the_embedding_is_served_though_the_config_says_tied(tmp_path, dtype):
    model = hf_model("llama")
    edit_config(save(model, tmp_path), tie_word_embeddings=True)
    loaded = load_target(str(tmp_path), dtype=dtype)
    assert not loaded.config.tied
    assert torch.equal(loaded.weights.lm_head, model.lm_head.weight.to(loaded.dtype))
    if dtype == "auto":
        assert (full_logits(load(tmp_path), TOKENS) - hf_logits(model, TOKENS)).abs().max() < 1e-4


def test_a_written_head_that_is_the_embedding_stays_one_tensor(tmp_path):
    folder = save(hf_model("llama", tie_word_embeddings=True), tmp_path)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = load_target(str(folder))
    assert loaded.config.tied
    assert loaded.weights.lm_head is loaded.weights.embed


def test_a_single_file_comes_before_an_index(tmp_path):
    """As in transformers: a folder may hold both."""
    from transformers import AutoModelForCausalLM

    folder = save(hf_model("llama", seed=0), tmp_path / "shards", max_shard_size="40KB")
    single = save(hf_model("llama", seed=1), tmp_path / "single") / "model.safetensors"
    (folder / "model.safetensors").write_bytes(single.read_bytes())
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
    assert torch.equal(load_target(str(folder)).weights.lm_head, theirs)


def test_no_end_token_that_nobody_wrote(folder):
    """LlamaConfig has one of its own: 2."""
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_target(str(folder)).eos_ids == load_tokenizer(str(folder)).eos_ids == {258}
    edit_config(folder, eos_token_id=None)
    assert load_target(str(folder)).eos_ids == {258}


def test_an_adapter_is_not_left_out_in_silence(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedModelError, match=r"adapter_config.json: adapters are not applied here"):
        load(folder)


def test_mistral_with_layer_types_is_another_architecture(tmp_path):
    folder = save(hf_model("mistral", sliding_window=7), tmp_path)
    edit_config(folder, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    says = r"reads this mistral config as 'ministral' because of its layer_types, which is not supported; supported: Ll"
    with pytest.raises(UnsupportedModelError, match=says):
        load(folder)


def test_a_base_vocabulary_with_a_hole_may_reach_past_the_embedding(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["A"] = 300
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer has 301 ids, model.embed_tokens.weight only 262 rows"):
        load(folder)
