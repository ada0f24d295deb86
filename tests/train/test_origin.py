"""Data of other settings never passes for one's own, what must stay unseen does, and files of other weights go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import chain_target, toy_options

from exactspec.cli.train import read_setting
from exactspec.draft.block_model import BlockModel
from exactspec.draft.config import parse_draft_config
from exactspec.errors import CheckpointError, ConfigError
from exactspec.model.weights import LoadedTarget
from exactspec.train.data import describe
from exactspec.train.options import make_options
from exactspec.train.origin import target_fingerprint
from exactspec.train.run import train


def quiet(metrics: dict[str, Any]) -> None:
    """No report."""


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chain_target()


@pytest.fixture(scope="module")
def made(target: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    train(toy_options(folder, "dspark", steps=2), target, report=quiet)
    return folder


@pytest.mark.parametrize(
    ("changes", "setting"), [({"max_answer": 30}, "max_answer"), ({"temperatures": ((1.0, 0.5),)}, "temperatures")]
)
def test_data_made_with_other_settings_are_refused_by_the_setting(
    made: Path, target: LoadedTarget, changes: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: .* holds data made before, and {setting} was"):
        train(toy_options(made, "dspark", steps=2, out=made / "other", **changes), target, report=quiet)


def test_prompts_are_never_excluded_too_late(made: Path, target: LoadedTarget) -> None:
    """The second run names the very file that the first one was trained on."""
    late = toy_options(made, "dspark", steps=2, out=made / "late", exclude=(made / "prompts.jsonl",))
    with pytest.raises(ConfigError, match="exclude names files that were not excluded when it was made"):
        train(late, target, report=quiet)


def test_data_of_another_target_or_of_unknown_origin(made: Path, target: LoadedTarget, tmp_path: Path) -> None:
    other = chain_target(sharpness=0.4)
    other.weights.layers[0].o.mul_(1.5)
    assert target_fingerprint(other) != target_fingerprint(target) == target_fingerprint(chain_target())
    with pytest.raises(ConfigError, match="target was"):
        train(toy_options(made, "dspark", steps=2, out=tmp_path / "a"), other, report=quiet)
    facts = made / "data" / "sequences-0-of-1.json"
    kept = facts.read_text()
    try:
        facts.write_text(json.dumps({k: v for k, v in json.loads(kept).items() if k != "made_with"}))
        train(toy_options(made, "dspark", steps=2, out=tmp_path / "b"), target, report=quiet)
        late = toy_options(made, "dspark", steps=2, out=tmp_path / "c", exclude=(made / "prompts.jsonl",))
        with pytest.raises(ConfigError, match="exclude is not known to have been applied"):
            train(late, target, report=quiet)
        facts.write_text("{")
        with pytest.raises(CheckpointError, match=r"sequences-0-of-1.json: cannot be read"):
            describe(made / "data", 1)
    finally:
        facts.write_text(kept)


def test_a_run_of_another_recipe_and_seed_shares_the_data(made: Path, target: LoadedTarget) -> None:
    train(toy_options(made, "dflash", steps=2, seed=5), target, report=quiet)
    assert len(list((made / "data").glob("*.safetensors"))) == 1


def test_a_resume_with_another_heldout_share_is_refused(made: Path, target: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match="heldout_share: the run in"):
        train(toy_options(made, "dspark", steps=2, heldout_share=0.4), target, report=quiet)


def test_what_was_measured_of_other_weights_goes_with_them(made: Path, target: LoadedTarget, tmp_path: Path) -> None:
    out = tmp_path / "again"
    train(toy_options(made, "dspark", steps=2, out=out), target, report=quiet)
    for name in ("calibration.json", "draft_vocab.json"):
        (out / name).write_text("{}")
    train(toy_options(made, "dspark", steps=2, out=out), target, report=quiet)  # nothing left to do: the same weights
    assert (out / "calibration.json").exists()
    train(toy_options(made, "dspark", steps=2, out=out, seed=3, resume=False), target, report=quiet)
    assert not (out / "calibration.json").exists()
    assert not (out / "draft_vocab.json").exists()


def test_lists_of_one() -> None:
    assert read_setting("1:0.7") == ((1, 0.7),)
    assert read_setting("0.6:1.0,0.4:0") == ((0.6, 1.0), (0.4, 0))
    assert read_setting("3") == 3
    assert make_options("m", "dspark", "o", target_layer_ids=3).recipe.target_layer_ids == (3,)
    assert make_options("m", "dspark", "o", exclude="a.jsonl").data.exclude == (Path("a.jsonl"),)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_drafts_scaled_rope_is_read_in_both_spellings(key: str) -> None:
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 4, "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 256, "num_target_layers": 4,
        "mask_token_id": 1, "target_layer_ids": [1], "markov_rank": 4, "markov_head_type": "vanilla",
        "rope_scaling": {key: "linear", "factor": 2.0},
    }  # fmt: skip
    scaled = BlockModel(parse_draft_config(config)).rope_table(8)
    plain = BlockModel(parse_draft_config({**config, "rope_scaling": None})).rope_table(8)
    assert not torch.equal(scaled.cos, plain.cos)
