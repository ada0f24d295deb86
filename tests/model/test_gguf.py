"""GGUF files, written here with the gguf library and read back: families, quantisations, split files, faults."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from fakes import CHAT_TEMPLATE, byte_tokenizer, full_logits
from gguf_writing import tensors_of, write_gguf
from tiny_checkpoints import ROPES, hf_logits, hf_model, load

from exactspec.errors import CheckpointError, UnsupportedModelError
from exactspec.model.gguf_file import GGUFFile
from exactspec.model.loader import load_config, load_target

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


GEMMA = FAMILIES["gemma3"][1]


@pytest.mark.parametrize(
    ("pattern", "local"),
    [
        (lambda w: w.add_sliding_window_pattern(2), [True, False, True, False, True, False, True]),
        (lambda w: w.add_sliding_window_pattern([False, *[True] * 6]), [False, *[True] * 6]),
    ],
)
def test_the_pattern_of_local_layers_is_that_of_the_file(pattern, local, tmp_path):
    kinds = ["sliding_attention" if is_local else "full_attention" for is_local in local]
    model = hf_model("gemma3_text", **SIZES, **GEMMA, layer_types=kinds)
    target = load(write_gguf(model, tmp_path / "m.gguf", "gemma3", extra=pattern))
    expected = hf_logits(model, TOKENS)
    assert (full_logits(target, TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_yarn_has_the_betas_of_the_file(tmp_path):
    rope = ROPES["yarn"] | {"original_max_position_embeddings": 1024, "beta_fast": 4.0, "beta_slow": 2.0}
    model = hf_model("llama", **SIZES, rope_parameters=rope)

    def betas(writer):
        writer.add_rope_scaling_yarn_beta_fast(4.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
        writer.add_float32("llama.rope.scaling.yarn_ext_factor", 1.0)
        writer.add_float32("llama.rope.scaling.yarn_attn_factor", 1.0)

    expected = hf_logits(model, TOKENS)
    found = full_logits(load(write_gguf(model, tmp_path / "m.gguf", extra=betas)), TOKENS)
    plain = full_logits(load(write_gguf(model, tmp_path / "n.gguf")), TOKENS)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()  # they matter


def test_a_scaling_of_kind_none_scales_nothing(tmp_path):
    model = hf_model("llama", **SIZES)

    def unused(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(4.0)

    assert load_config(str(write_gguf(model, tmp_path / "m.gguf", extra=unused))).rope_type == "default"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("attention.scale", 0.5),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("logit_scale", 0.5),
        ("rope.dimension_count", 8),
        ("rope.scaling.attn_factor", 2.0),
        ("rope.scaling.yarn_attn_factor", 1.2),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("something.new", 1),
        ("something.new", "x"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_key_that_would_change_the_numbers_is_refused(family, key, value, tmp_path):
    model_type, changes = FAMILIES[family]
    model = hf_model(model_type, **SIZES, **changes)
    path = write_gguf(model, tmp_path / "m.gguf", family, extra=lambda w: add(w, f"{family}.{key}", value))
    with pytest.raises(UnsupportedModelError, match=rf"metadata {family}\.{key}=.* is not supported"):
        load_config(str(path))


def test_a_window_of_a_family_that_has_none_is_refused_where_it_hides_something(tmp_path):
    path = write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf", extra=lambda w: w.add_sliding_window(8))
    with pytest.raises(UnsupportedModelError, match=r"metadata llama\.attention\.sliding_window=8 is not supported"):
        load_config(str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.25),
        ("attention.causal", True),
        ("attention.sliding_window", 160),
        ("attention.clamp_kqv", 0.0),
        ("logit_scale", 1.0),
        ("final_logit_softcapping", 0.0),
        ("rope.dimension_count", 16),
        ("rope.scaling.attn_factor", 1.0),
        ("rope.scaling.yarn_ext_factor", -1.0),
        ("rope.scaling.finetuned", True),
        ("expert_count", 0),
        ("vocab_size", 263),
        ("pooling_type", 3),
        ("tensor_data_layout", "Meta AI original pth"),
    ],
)
def test_a_key_that_says_what_is_done_anyway_is_not(key, value, tmp_path):
    model = hf_model("llama", **SIZES)
    plain = load_config(str(write_gguf(model, tmp_path / "m.gguf")))
    path = write_gguf(model, tmp_path / "n.gguf", extra=lambda w: add(w, f"llama.{key}", value))
    assert load_config(str(path)) == plain


def add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[type(value)](key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.factor", "x"),
        ("rope.freq_base", -1.0),
        ("rope.scaling.yarn_beta_fast", 0.0),
    ],
)
def test_faulty_numbers_of_the_rope(key, value, tmp_path):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.kv_data[0].pop(f"llama.{key}", None)
        add(writer, f"llama.{key}", value)

    path = write_gguf(hf_model("llama", **SIZES), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=rf"llama\.{key}: must be a positive number, got"):
        load_config(str(path))


def header(key, kind, value):
    """A file of one metadata field and no tensor."""
    field = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("general.alignment", 4, struct.pack("<I", 0)), "general.alignment: must be an integer >= 1, got 0"),
        (header("general.alignment", 8, struct.pack("<Q", 1) + b"x"), "general.alignment: must be .* got 'x'"),
        (header("x", 9, struct.pack("<IQ", 9, 1) * 3000), "arrays nested more than 8 deep"),
        (header("x", 9, struct.pack("<IQ", 4, 2**61)), "damaged or cut off"),
        (header("general.architecture", 4, struct.pack("<I", 7)), "general.architecture: must be a string, got 7"),
    ],
)
def test_faulty_headers(content, message, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")
