"""Checkpoints that are damaged, incomplete or made for another target are refused by name, before anything runs."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from draft_fakes import draft_config, draft_tensors, write_draft
from fakes import EOS_ID, tiny_model

from exactspec.draft.block import BlockDrafter
from exactspec.draft.calibration import Calibration, PositionScales, read_calibration
from exactspec.draft.checkpoint import load_block_model, save_block_model
from exactspec.draft.factory import make_drafter
from exactspec.draft.ngram import NgramDrafter
from exactspec.draft.none import NoDrafter
from exactspec.draft.vocabulary import frequent_tokens, read_draft_vocab, write_draft_vocab
from exactspec.errors import CheckpointError, ConfigError
from exactspec.model.target import TargetModel


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_model(num_layers=3)


def make(draft, target, **arguments):
    arguments = {"num_slots": 64, "gamma": None, "backend": target.backend, **arguments}
    return make_drafter(draft, target, **arguments)


def test_missing_tensor(tmp_path):
    weights = draft_tensors(draft_config())
    del weights["layers.1.self_attn.k_proj.weight"]
    folder = write_draft(tmp_path, draft_config(), weights)
    with pytest.raises(CheckpointError, match=r"missing tensors: layers.1.self_attn.k_proj.weight \[32, 32\]"):
        load_block_model(folder)


def test_unexpected_tensor(tmp_path):
    weights = {**draft_tensors(draft_config()), "layers.2.mlp.up_proj.weight": torch.ones(48, 32)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors: layers.2.mlp.up_proj.weight"):
        load_block_model(write_draft(tmp_path, draft_config(), weights))


def test_wrong_shape(tmp_path):
    weights = {**draft_tensors(draft_config()), "fc.weight": torch.ones(32, 65)}
    with pytest.raises(CheckpointError, match=r"tensor fc.weight: expected shape \[32, 64\], got \[32, 65\]"):
        load_block_model(write_draft(tmp_path, draft_config(), weights))


def test_wrong_type(tmp_path):
    weights = draft_tensors(draft_config())
    folder = write_draft(tmp_path, draft_config(), weights, torch.int32)
    with pytest.raises(CheckpointError, match=r"expected float32, bfloat16 or float16, got torch.int32"):
        load_block_model(folder)


def test_not_finite(tmp_path):
    weights = draft_tensors(draft_config())
    weights["norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"tensor norm.weight: holds NaN"):
        load_block_model(write_draft(tmp_path, draft_config(), weights))


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file(keep, tmp_path):
    path = write_draft(tmp_path, draft_config()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated, damaged or not a safetensors file"):
        load_block_model(tmp_path)


def test_other_formats_and_missing_shards(tmp_path):
    path = write_draft(tmp_path, draft_config()) / "model.safetensors"
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model.safetensors \(only safetensors are read\)"):
        load_block_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "part-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"part-1.safetensors: no such file"):
        load_block_model(tmp_path)
    for name in ("../part-1.safetensors", "/etc/hostname", 5, ""):
        index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        with pytest.raises(CheckpointError, match=r"tensor fc.weight: .* is not the name of a file in this folder"):
            load_block_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_block_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 300}, "vocab_size: 300, but the target has 262: this is a draft for another target"),
        ({"hidden_size": 64}, "hidden_size: 64, but the target has 32"),
        ({"num_target_layers": 30}, "num_target_layers: 30, but the target has 3: .*made for Other-1B"),
        ({"target_layer_ids": [0, 2]}, "target_layer_ids: 2 is the target's last layer"),
        ({"target_layer_ids": [0, 7]}, "target_layer_ids: 7 is out of range; must be from 0 to 1"),
    ],
)
def test_a_draft_for_another_target(changes, says, target, tmp_path):
    config = draft_config(target_model="Other-1B", **changes)
    with pytest.raises(CheckpointError, match=says):
        make(str(write_draft(tmp_path, config)), target)


def test_mask_ids_in_padded_rows_work_and_end_ids_warn(target, tmp_path, caplog):
    """Ids beyond the tokenizer's but inside the embedding are valid; EOS as mask works and is reported."""
    padded = tiny_model(num_layers=3, vocab_size=320)
    folder = write_draft(tmp_path / "padded", draft_config(vocab_size=320, mask_token_id=319))
    assert make(str(folder), padded, end_ids=[EOS_ID]).gamma == 5
    folder = write_draft(tmp_path / "eos", draft_config(mask_token_id=EOS_ID))
    with caplog.at_level(logging.WARNING):
        assert make(str(folder), target, end_ids=[EOS_ID]).gamma == 5
    assert f"mask_token_id {EOS_ID} is also an end or padding token" in caplog.text


def test_names_and_folders(target, tmp_path):
    assert isinstance(make(None, target), NoDrafter)
    assert isinstance(make("none", target), NoDrafter)
    ngram = make("ngram", target, gamma=4)
    assert isinstance(ngram, NgramDrafter)
    assert ngram.gamma == 4
    drafter = make(str(write_draft(tmp_path, draft_config())), target, gamma=3)
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.gamma, drafter.capture_layers) == (3, (0, 1))
    with pytest.raises(ConfigError, match=r"neither one of none, ngram, dflash, dspark nor a checkpoint folder"):
        make("dsprak", target)
    with pytest.raises(ConfigError, match=r"no dspark draft for this target is shipped"):
        make("dspark", target)


def write_calibration(folder, content) -> None:
    (folder / "calibration.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_calibration_is_found_and_checked(target, tmp_path):
    folder = write_draft(tmp_path, draft_config())
    assert read_calibration(folder, 5) is None
    write_calibration(folder, {"temperatures": [1, 1.5, 0.5, 2.0, 1.25], "ece": 0.01})
    plain = PositionScales((1.0, 1.5, 0.5, 2.0, 1.25), (0.0,) * 5)
    assert read_calibration(folder, 5) == Calibration(plain, plain)
    both = Calibration(plain, PositionScales((2.0,) * 5, (-0.5, 0.0, 0.5, 1.0, 2.0)))
    write_calibration(folder, {**both.to_json(), "ece": 0.01})
    assert read_calibration(folder, 5) == both
    assert make(str(folder), target).gamma == 5
    for content, says in (
        ({"temperatures": [1.0]}, "expected 5 numbers"),
        ({"temperatures": [1.0, 1.0, 0.0, 1.0, 1.0]}, "must be positive finite numbers, got 0.0"),
        ({"temperatures": [1.0, 1.0, "x", 1.0, 1.0]}, "must be positive finite numbers, got 'x'"),
        ({}, "expected an object with 'temperatures'"),
        ("{", "expected an object with 'temperatures'"),
        ({**both.to_json(), "sampled": {"temperatures": [1.0] * 5}}, "expected an object with 'temperatures'"),
        ({**both.to_json(), "sampled": {"temperatures": [1.0] * 5, "offsets": [1.0]}}, "offsets: expected 5 numbers"),
    ):
        write_calibration(folder, content)
        with pytest.raises(CheckpointError, match=says):
            make(str(folder), target)


def test_short_vocabularies_are_found_and_checked(target, tmp_path):
    folder = write_draft(tmp_path, draft_config())
    assert read_draft_vocab(folder, 262) is None
    counts = torch.zeros(262, dtype=torch.int64)
    counts[[7, 200, 5]] = torch.tensor([3, 9, 3])
    wanted = frequent_tokens(counts, 5)
    assert wanted == [0, 1, 5, 7, 200]
    write_draft_vocab(folder, wanted)
    assert read_draft_vocab(folder, 262) == wanted
    assert make(str(folder), target).gamma == 5
    for content, says in (
        ({"token_ids": []}, "token_ids: expected a non-empty list"),
        ({"token_ids": [3, 3]}, "must be rising ids from 0 to 261, got 3"),
        ({"token_ids": [3, 262]}, "must be rising ids from 0 to 261, got 262"),
        ({"token_ids": [-1]}, "must be rising ids from 0 to 261, got -1"),
        ([], "expected an object with 'token_ids'"),
    ):
        (folder / "draft_vocab.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=says):
            make(str(folder), target)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    config = draft_config(markov_head_type="rnn")
    model = load_block_model(write_draft(tmp_path / "a", config))
    save_block_model(model, tmp_path / "b", config, torch.float32)
    again = load_block_model(tmp_path / "b")
    assert again.config == model.config
    for (name, one), (_, two) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(one, two), name
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]
