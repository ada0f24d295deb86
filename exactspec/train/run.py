"""`exactspec train`: from a target alone to a draft checkpoint that serving loads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import exactspec
from exactspec.draft.block_model import BlockModel
from exactspec.draft.calibration import CALIBRATION_FILE
from exactspec.draft.checkpoint import TargetFacts, check_fit, load_block_model, save_block_model
from exactspec.draft.compact import WEIGHTS_FILE
from exactspec.draft.config import parse_draft_config
from exactspec.draft.vocabulary import VOCAB_FILE, frequent_tokens, write_draft_vocab
from exactspec.errors import ConfigError, DeviceError
from exactspec.model.weights import LoadedTarget
from exactspec.train.data import build_shard, describe, load_shards, split_heldout, with_anchors
from exactspec.train.frozen import FrozenTarget
from exactspec.train.new_draft import draft_config, new_block_model
from exactspec.train.options import TrainOptions
from exactspec.train.origin import check_origin, origin_of, target_fingerprint
from exactspec.train.ranks import Ranks, join_ranks
from exactspec.train.saving import write_json
from exactspec.train.trainer import Report, Trainer

log = logging.getLogger(__name__)


def train(options: TrainOptions, loaded: LoadedTarget | None = None, report: Report | None = None) -> dict[str, Any]:
    """Makes the data (unless it is there), trains (or resumes) and writes the checkpoint to options.out.

    Returns the last metrics, with "interrupted" true after Ctrl-C (run again to go on). `loaded` skips loading;
    `report` is called with each metrics line. Raises ConfigError, CheckpointError or TrainingError.
    """
    device = pick_device(options.device)
    ranks = join_ranks(device)
    options.out.mkdir(parents=True, exist_ok=True)
    if loaded is None:
        from exactspec.model.loader import load_target

        loaded = load_target(options.target, device="cpu")
    fingerprint = target_fingerprint(loaded)
    origin = origin_of(options.data, fingerprint)
    target = FrozenTarget(loaded, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = draft_config(loaded, options.recipe, options.mask_token_id)
    _check_config(config, loaded)
    if options.draft_vocab_size > loaded.config.vocab_size:
        raise ConfigError(f"draft_vocab_size: must be at most {loaded.config.vocab_size}, the target's vocabulary")
    if options.init_from is not None:  # before the data, which takes far longer than reading it
        check_fit(load_block_model(options.init_from).config, _target_facts(loaded), str(options.init_from))
    num_shards = complete_shards(options.data_path)
    if not num_shards:
        num_shards = ranks.world_size
        shard = (options.data_path, ranks.rank, num_shards)
        build_shard(loaded, target, options.data, options.seed, *shard, origin)
    ranks.barrier()
    shards = describe(options.data_path, num_shards)
    check_origin(options.data_path, shards, origin)
    sequences = load_shards(options.data_path, num_shards)
    data_hash = sequences.digest()
    if len(sequences) and int(sequences.tokens.max()) >= loaded.config.vocab_size:
        raise ConfigError(
            f"data_folder: {options.data_path} holds token {int(sequences.tokens.max())}, but the target's vocabulary "
            f"has {loaded.config.vocab_size} rows: it was made with another target"
        )
    sequences = with_anchors(sequences, options.recipe.max_sequence)
    training, heldout = split_heldout(len(sequences), options.data.heldout_share, options.seed)
    model = new_block_model(config, loaded.weights.embed, options.seed)
    if options.init_from is not None:
        start_from(model, options.init_from, loaded)
    facts = run_facts(options, config, data_hash, ranks, fingerprint)
    trainer = Trainer(
        options,
        target,
        model,
        sequences.subset(training),
        sequences.subset(heldout),
        ranks,
        facts,
        report or log_report,
    )
    log.info("training on %d sequences, %d answer tokens", len(training), sequences.num_answer_tokens)
    metrics = trainer.run()
    if ranks.is_first:
        _publish(options, trainer, config, facts, shards, metrics)
        if options.draft_vocab_size:
            counts = sequences.answer_counts(loaded.config.vocab_size)
            write_draft_vocab(options.out, frequent_tokens(counts, options.draft_vocab_size))
    ranks.barrier()
    return {**metrics, "interrupted": trainer.interrupted}


def complete_shards(folder: Path) -> int:
    """How many shards the data folder is made of; 0 where some or all are missing."""
    counts = Counter(int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("sequences-*-of-*.safetensors"))
    return max((total for total, present in counts.items() if present == total), default=0)


def pick_device(name: str) -> torch.device:
    """ "auto": CUDA where there is one. On CUDA the local rank picks the card."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: must be auto, cpu or cuda, got {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError("device: cuda is asked for, but torch sees no CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device(name)


_SAME_FOR_BOTH = (
    "target_layer_ids", "mask_token_id", "block_size", "sample_from_anchor", "rope_theta", "rope_scaling", "rms_eps",
    "activation",
)  # fmt: skip


def start_from(model: BlockModel, folder: Path, loaded: LoadedTarget) -> None:
    """Takes over the weights of another draft. It may have fewer layers: the last ones then begin as layers that add
    nothing. Raises CheckpointError where it was made for another target, ConfigError where its shape is another."""
    other = load_block_model(folder)
    check_fit(other.config, _target_facts(loaded), str(folder))
    weights = {**_idle_layers(model, other.config.num_layers), **other.state_dict()}
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    theirs = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"init_from: {folder}: tensor {name} is {theirs.get(name)}, this run needs {ours.get(name)}"
            )
    for key in _SAME_FOR_BOTH:
        if getattr(other.config, key) != getattr(model.config, key):
            raise ConfigError(
                f"init_from: {folder}: {key} is {getattr(other.config, key)!r}, this run has "
                f"{getattr(model.config, key)!r}"
            )
    model.load_state_dict(weights)


def _idle_layers(model: BlockModel, first: int) -> dict[str, Tensor]:
    """Weights of the layers from `first` on as they were drawn, but for the projections out of them, which are zero."""
    weights = {}
    for index, layer in enumerate(model.layers[first:], first):
        for name, value in layer.state_dict().items():
            is_output = name.startswith(("self_attn.o_proj", "mlp.down_proj"))
            weights[f"layers.{index}.{name}"] = torch.zeros_like(value) if is_output else value
    return weights


def _target_facts(loaded: LoadedTarget) -> TargetFacts:
    config = loaded.config
    return TargetFacts(config.hidden_size, config.num_layers, config.vocab_size, loaded.eos_ids)


def _check_config(config: dict[str, Any], loaded: LoadedTarget) -> None:
    if loaded.tokenizer.vocab_size > loaded.config.vocab_size:
        raise ConfigError(
            f"target: the tokenizer knows {loaded.tokenizer.vocab_size} tokens, the embedding has "
            f"{loaded.config.vocab_size} rows: they do not belong together"
        )
    where = "the new draft's config"
    check_fit(parse_draft_config(config, where), _target_facts(loaded), where)


def run_facts(
    options: TrainOptions, config: dict[str, Any], data_hash: str, ranks: Ranks, fingerprint: str
) -> dict[str, Any]:
    """What decides the result of a run; a resume needs it unchanged. The time limit may change: so much is wanted."""
    return {
        "recipe": json.loads(json.dumps(dataclasses.asdict(options.recipe))),
        "config": json.loads(json.dumps(config)),
        "seed": options.seed,
        "data_sha256": data_hash,
        "heldout_share": options.data.heldout_share,
        "target_sha256": fingerprint,
        "world_size": ranks.world_size,
        "init_from": str(options.init_from) if options.init_from else None,
    }


def _publish(
    options: TrainOptions,
    trainer: Trainer,
    config: dict[str, Any],
    facts: dict[str, Any],
    data: list[dict[str, Any]],
    metrics: dict[str, Any],
) -> None:
    """The served checkpoint, its provenance and the plot."""
    try:
        before = _content(options.out / WEIGHTS_FILE)
        save_block_model(trainer.model, options.out, config, torch.bfloat16)
        if _content(options.out / WEIGHTS_FILE) != before:  # what was measured of other weights is not true of these
            for name in (CALIBRATION_FILE, VOCAB_FILE):
                (options.out / name).unlink(missing_ok=True)
    except ConfigError as error:
        raise ConfigError(f"{error}; so is the training state: the same command goes on from it") from error
    write_json(
        options.out / "provenance.json",
        {
            "command": sys.argv,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "exactspec": getattr(exactspec, "__version__", "unknown"),
            "commit": _commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor(),
            "target": options.target,
            "algorithm": options.algorithm,
            "data": data,
            "data_options": json.loads(json.dumps(dataclasses.asdict(options.data), default=str)),
            "step": trainer.progress.step,
            "seconds": round(trainer.progress.seconds, 1),
            "metrics": metrics,
            **facts,
        },
    )
    from exactspec.train.plot import plot_metrics

    plot_metrics(options.out / "metrics.jsonl", options.out / "training.png")


def _content(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def log_report(metrics: dict[str, Any]) -> None:
    """The default report: one line of log."""
    if "loss" not in metrics:
        log.info("step %d  %s", metrics["step"], {k: v for k, v in metrics.items() if k != "step"})
        return
    log.info(
        "step %d  loss %.4f  tau %.2f (T=1) %.2f (T=0)  %.0f tokens/s  %.0f s left",
        metrics["step"], metrics["loss"], metrics["tau_t1"], metrics["tau_t0"], metrics["tokens_per_second"],
        metrics["seconds_left"],
    )  # fmt: skip
