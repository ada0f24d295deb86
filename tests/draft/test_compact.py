"""Compact checkpoints: half the bytes, nearly the same numbers, loaded as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from draft_fakes import draft_config, draft_tensors, write_draft
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from exactspec.draft.checkpoint import load_block_model
from exactspec.draft.compact import compact_checkpoint, dequantise_rows, quantise_rows
from exactspec.errors import CheckpointError


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 1e4]))
def test_no_entry_is_off_by_more_than_half_a_step(rows, columns, seed, size):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    quantised, scale = quantise_rows(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((dequantise_rows(quantised, scale) - weight).abs() <= step * 0.5001).all())


def test_zero_rows_stay_zero():
    weight = torch.zeros(2, 3)
    assert torch.equal(dequantise_rows(*quantise_rows(weight)), weight)


def test_a_compact_copy_loads_like_the_original(tmp_path):
    config = draft_config()
    weights = draft_tensors(config)
    write_draft(tmp_path / "full", config, weights, torch.bfloat16)
    (tmp_path / "full" / "calibration.json").write_text('{"temperatures": [1, 1, 1, 1, 1]}')
    compact_checkpoint(tmp_path / "full", tmp_path / "compact")
    names = {path.name for path in (tmp_path / "compact").iterdir()}
    assert names == {"config.json", "model.safetensors", "calibration.json"}
    stored = load_file(tmp_path / "compact" / "model.safetensors")
    assert stored["fc.weight.q8"].dtype == torch.int8
    assert stored["norm.weight"].dtype == torch.bfloat16
    full, compact = load_block_model(tmp_path / "full"), load_block_model(tmp_path / "compact")
    assert full.config == compact.config
    for (name, one), (_, two) in zip(full.state_dict().items(), compact.state_dict().items(), strict=True):
        assert float((one - two).norm() / one.norm()) < 0.01, name
    with pytest.raises(CheckpointError, match="exists already"):
        compact_checkpoint(tmp_path / "full", tmp_path / "compact")


def test_halves_of_compact_tensors_are_refused(tmp_path):
    config = draft_config()
    compact_checkpoint(write_draft(tmp_path / "full", config), tmp_path / "compact")
    path = tmp_path / "compact" / "model.safetensors"
    stored = load_file(path)
    scale = stored.pop("fc.weight.scale")
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"missing tensor fc.weight.scale"):
        load_block_model(tmp_path / "compact")
    save_file({**stored, "fc.weight.scale": scale[1:].clone()}, path)
    with pytest.raises(CheckpointError, match=r"tensor fc.weight.q8: expected int8 rows with one scale each"):
        load_block_model(tmp_path / "compact")
    rest = {name: value for name, value in stored.items() if not name.startswith("fc.")}
    save_file({**rest, "fc.weight.scale": scale}, path)
    with pytest.raises(CheckpointError, match=r"missing tensors: fc.weight \[32, 64\]"):
        load_block_model(tmp_path / "compact")


def test_an_incomplete_source_is_not_copied(tmp_path):
    weights = draft_tensors(draft_config())
    del weights["norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: norm.weight"):
        compact_checkpoint(write_draft(tmp_path / "full", draft_config(), weights), tmp_path / "compact")
    assert not (tmp_path / "compact").exists()
