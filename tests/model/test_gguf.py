"""GGUF files, written here with the gguf library and read back: families, quantisations, split files, faults."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from fakes import CHAT_TEMPLATE, byte_tokenizer, full_logits
from gguf_writing import tensors_of, write_gguf
from tiny_checkpoints import ROPES, hf_logits, hf_model, load

from exactspec.errors import CheckpointError, UnsupportedModelError
from exactspec.model.gguf_file import GGUFFile
from exactspec.model.loader import load_target

TOKENS = [(i * 89 + i * i) % 256 for i in range(60)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 263}
FAMILIES = {
    "llama": ("llama", {}),
    "llama tied, bias": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
}


def dequantisable():
    """Every type that the gguf library can dequantise."""
    return [kind.name for kind in gguf.quants._type_traits] + ["F32", "F16"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_transformers_logits(family, tmp_path):
    model_type, changes = FAMILIES[family]
    model = hf_model(model_type, **SIZES, **changes)
    target = load(write_gguf(model, tmp_path / "m.gguf", model_type.removesuffix("_text")))
    expected = hf_logits(model, TOKENS)
    assert (full_logits(target, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_rope_scaling_of_the_metadata(rope, tmp_path):
    model = hf_model("llama", **SIZES, rope_parameters=ROPES[rope])
    target = load(write_gguf(model, tmp_path / "m.gguf"))
    expected = hf_logits(model, TOKENS)
    assert (full_logits(target, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_llama3_scaling_comes_as_a_tensor_of_factors(tmp_path):
    model = hf_model("llama", **SIZES, rope_parameters=ROPES["llama3"])
    plain = 1.0 / (ROPES["llama3"]["rope_theta"] ** (np.arange(0, 16, 2) / 16))
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 2
    path = write_gguf(model, tmp_path / "m.gguf", change=lambda t: t.update({"rope_freqs.weight": factors}))
    expected = hf_logits(model, TOKENS)
    assert (full_logits(load(path), TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    path = write_gguf(model, tmp_path / "n.gguf", change=lambda t: t.update({"rope_freqs.weight": factors[:5]}))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has 5 entries, expected 8"):
        load(path)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_a_quantised_file_is_the_model_of_its_dequantised_weights(quant, tmp_path):
    model = hf_model("qwen2", **SIZES)
    loaded = load_target(str(write_gguf(model, tmp_path / "m.gguf", "qwen2", quant)))
    assert loaded.dtype == torch.bfloat16
    kind = gguf.GGMLQuantizationType[quant]
    array = tensors_of(model, "qwen2")["blk.1.ffn_down.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)).bfloat16()
    assert torch.equal(loaded.weights.layers[1].down, expected)


@pytest.mark.parametrize(("quant", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_files_keep_their_dtype(quant, dtype, tmp_path):
    model = hf_model("llama", **SIZES)
    assert load_target(str(write_gguf(model, tmp_path / "m.gguf", quant=quant))).dtype == dtype


@pytest.mark.parametrize("quant", dequantisable())
def test_every_type_of_the_library_can_be_read(quant, tmp_path):
    kind = gguf.GGMLQuantizationType[quant]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * size), dtype=np.uint8)  # small bytes: finite scales
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "t.gguf")
    assert (file.tensors["x"].shape, file.type_name("x")) == ((3, 2 * block), quant)
    expected = np.asarray(gguf.quants.dequantize(raw, kind), dtype=np.float32)
    assert np.array_equal(file.read("x").numpy(), expected.reshape(3, 2 * block), equal_nan=True)


def test_a_split_file_is_loaded_from_any_part_and_needs_all(tmp_path):
    model = hf_model("llama", **SIZES)
    whole = load(write_gguf(model, tmp_path / "whole.gguf"))
    (tmp_path / "parts").mkdir()
    write_gguf(model, tmp_path / "parts" / "m.gguf", split_max_tensors=9)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) == 4
    expected = full_logits(whole, TOKENS)
    for name in (parts[0], parts[2], tmp_path / "parts"):
        assert torch.equal(full_logits(load(name), TOKENS), expected)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"missing: m-00003-of-00004.gguf"):
        load(parts[0])


def test_the_tokenizer_and_template_come_along(tmp_path):
    loaded = load_target(str(write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf")))
    truth = byte_tokenizer()
    text = "<user>Grüße 12 😀\n  indented<eos>"
    assert loaded.tokenizer.encode(text) == truth.encode(text)
    assert loaded.tokenizer.hf.chat_template == CHAT_TEMPLATE
    assert loaded.eos_ids == {258}
    assert all(loaded.tokenizer.is_special(i) == truth.is_special(i) for i in range(262))
    assert loaded.tokenizer.all_token_bytes == [*truth.all_token_bytes, b" t"]
    assert loaded.tokenizer.encode("a to") == [*truth.encode("a"), 262, *truth.encode("o")]


def test_merges_that_lead_nowhere(tmp_path):
    path = write_gguf(
        hf_model("llama", **SIZES),
        tmp_path / "m.gguf",
        extra=lambda w: w.kv_data[0].pop("tokenizer.ggml.merges") and w.add_array("tokenizer.ggml.merges", ["a b"]),
    )
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.merges do not fit its tokens: .*`ab` out of vocabulary"):
        load(path)


@pytest.mark.parametrize("keep", [0, 10, 30, 700, 5000, -1, -4000])
def test_a_truncated_file(keep, tmp_path):
    path = write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"too few|cut off|needs bytes"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("blk.1.attn_v.weight"),
            r"1 tensors missing: model.layers.1.self_attn.v_proj.weight \[32, 64\]",
        ),
        (
            lambda t: t.update({"blk.0.ffn_gate_exps.weight": np.ones((2, 32), np.float32)}),
            "unexpected .*ffn_gate_exps",
        ),
        (
            lambda t: t.update({"blk.0.attn_q.weight": np.ones((32, 64), np.float32)}),
            r"q_proj.weight has shape \[32, 64\]",
        ),
        (lambda t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
    ],
)
def test_faulty_tensors(change, message, tmp_path):
    path = write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf", change=change)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_other_architectures_and_no_gguf(tmp_path):
    model = hf_model("llama", **SIZES)
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'mamba' is not supported; supported: llama, mistral"
    ):
        load(write_gguf(model, tmp_path / "m.gguf", "mamba"))
    experts = write_gguf(model, tmp_path / "e.gguf", extra=lambda w: w.add_expert_count(8))
    with pytest.raises(UnsupportedModelError, match="mixtures of experts"):
        load(experts)
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(tmp_path / "x.gguf")


def test_unknown_text_splitting_is_refused(tmp_path):
    """Another pre-tokenizer would give other ids: better no answer than a wrong one."""
    path = write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf", extra=lambda w: w.add_tokenizer_pre("viking"))
    with pytest.raises(UnsupportedModelError, match=r"tokenizer.ggml.pre 'viking' is not supported"):
        load(path)


@pytest.mark.parametrize("family", ["llama tied, bias", "gemma3"])
def test_the_transformers_peer_of_a_bench_has_the_weights_of_the_file(family, tmp_path):
    """Whatever transformers does with GGUF files: norms, RoPE order and a tied head come out as they went in."""
    from exactspec.bench.peers import TransformersContender, load_transformers

    model_type, changes = FAMILIES[family]
    model = hf_model(model_type, **SIZES, **changes)
    path = write_gguf(model, tmp_path / "m.gguf", model_type.removesuffix("_text"))
    theirs = load_transformers(str(path), torch.float32, torch.device("cpu"))
    expected = hf_logits(model, TOKENS)
    assert (hf_logits(theirs, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    run = TransformersContender("transformers", theirs, 1, {}).run([TOKENS, TOKENS[:7]], 5, 0.0, 0)
    assert run.num_tokens == 2 * 4
