"""GGUF export: what another reader finds in the file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from train_fakes import small_draft, small_recipe, small_target

from exactspec.draft.checkpoint import save_block_model
from exactspec.errors import CheckpointError, ConfigError
from exactspec.train.export import export_gguf
from exactspec.train.new_draft import draft_config

gguf = pytest.importorskip("gguf")


@pytest.fixture
def target_file(tmp_path):
    """A GGUF with a tokenizer and nothing else that matters here."""
    path = tmp_path / "target.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(262)])
    writer.add_token_types([1] * 262)
    writer.add_eos_token_id(258)
    writer.add_tensor("x", np.zeros((2, 2), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def saved_draft(folder, algorithm):
    loaded, recipe = small_target(), small_recipe(algorithm)
    model = small_draft(loaded, recipe)
    save_block_model(model, folder, draft_config(loaded, recipe), torch.float32)
    return model


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_fields_and_tensors(algorithm, tmp_path, target_file):
    model = saved_draft(tmp_path / "draft", algorithm)
    reader = gguf.GGUFReader(export_gguf(tmp_path / "draft", str(target_file), tmp_path / "d.gguf", "f32"))
    config = model.config

    def value(name):
        return reader.fields[name].contents()

    assert value("general.architecture") == "dflash"
    assert value("dflash.block_size") == config.block_size
    assert list(value("dflash.target_layers")) == [layer + 1 for layer in config.target_layer_ids]
    assert value("dflash.sample_from_anchor") == config.sample_from_anchor
    assert value("dflash.attention.causal") is False
    assert value("tokenizer.ggml.mask_token_id") == config.mask_token_id
    assert value("tokenizer.ggml.tokens")[:2] == ["t0", "t1"]
    assert value("tokenizer.ggml.eos_token_id") == 258
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert np.array_equal(tensors["fc.weight"], model.fc.weight.numpy(force=True))
    assert np.array_equal(tensors["enc.output_norm.weight"], model.hidden_norm.weight.numpy(force=True))
    key = model.layers[1].self_attn.k_proj.weight.numpy(force=True)
    assert np.array_equal(tensors["blk.1.attn_k.weight"], key)
    assert ("markov_w1.weight" in tensors) == (config.markov_rank > 0)
    assert ("conf_proj.bias" in tensors) == config.has_confidence_head
    assert len(tensors) == len(model.state_dict())


def test_smaller_types_are_near(tmp_path, target_file):
    model = saved_draft(tmp_path / "draft", "dspark")
    wanted = model.layers[0].mlp.gate_proj.weight.numpy(force=True)
    for kind, bound in (("f16", 1e-3), ("q8_0", 2e-2)):
        reader = gguf.GGUFReader(export_gguf(tmp_path / "draft", str(target_file), tmp_path / f"{kind}.gguf", kind))
        found = next(t for t in reader.tensors if t.name == "blk.0.ffn_gate.weight")
        data = gguf.quants.dequantize(found.data, found.tensor_type)
        assert np.abs(data.reshape(wanted.shape) - wanted).max() < bound * np.abs(wanted).max()


def test_what_the_reader_would_not_understand_is_refused(tmp_path, target_file):
    saved_draft(tmp_path / "draft", "dspark")
    with pytest.raises(ConfigError, match="weight_type: must be one of"):
        export_gguf(tmp_path / "draft", str(target_file), tmp_path / "d.gguf", "q4")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="rope_scaling: scaled RoPE is not exported"):
        export_gguf(tmp_path / "draft", str(target_file), tmp_path / "d.gguf")
    assert not (tmp_path / "d.gguf").exists()


def test_a_target_of_another_shape_and_files_that_cannot_be_read_or_written(tmp_path, target_file):
    saved_draft(tmp_path / "draft", "dspark")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((300, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"has an embedding of \[300, 32\], .* made for one of \[262, 32\]"):
        export_gguf(tmp_path / "draft", str(tmp_path / "other.gguf"), tmp_path / "d.gguf")
    (tmp_path / "cut.gguf").write_bytes(target_file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"cut.gguf: truncated, damaged or not a GGUF file"):
        export_gguf(tmp_path / "draft", str(tmp_path / "cut.gguf"), tmp_path / "d.gguf")
    with pytest.raises(ConfigError, match=r"d.gguf: cannot be written"):
        export_gguf(tmp_path / "draft", str(target_file), tmp_path / "nowhere" / "d.gguf")
    assert not list(tmp_path.rglob("*.part"))
