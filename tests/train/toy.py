"""A target that is easy to predict but not by copying, and engines around it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from fakes import EOS_ID, tiny_target

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.draft.factory import make_drafter
from exactspec.engine.config import EngineConfig
from exactspec.engine.engine import Engine
from exactspec.engine.llm import LLM
from exactspec.engine.verify_policy import VerifyAll
from exactspec.model.target import TargetModel
from exactspec.model.weights import LoadedTarget
from exactspec.train.options import TrainOptions, make_options

NUM_PAGES, PAGE_SIZE = 256, 4


def chain_target(sharpness: float = 0.45) -> LoadedTarget:
    """Mostly a Markov chain: a byte is followed by its image under a fixed permutation of the bytes, which is one
    long cycle, so that text hardly repeats and prompt lookup finds nothing. Never ends by itself."""
    loaded = tiny_target(seed=3, std=0.02, num_layers=4)
    order = list(range(256))
    random.Random(1).shuffle(order)
    weights = loaded.weights
    head = torch.zeros_like(weights.lm_head)
    for here, after in zip(order, order[1:] + order[:1], strict=True):
        head[after] = weights.embed[here] * sharpness
    head[EOS_ID] = -weights.embed[:256].mean(0)
    weights.lm_head = head
    return loaded


def toy_options(folder: Path, algorithm: str, **changes: object) -> TrainOptions:
    """Seconds of training on prompts of random bytes."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(0)
        words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(4)) for _ in range(200)]
        lines = [json.dumps({"prompt": " ".join(rng.choices(words, k=5))}) for _ in range(64)]
        prompts.write_text("\n".join(lines))
    settings: dict[str, object] = {
        "prompts": prompts, "max_answer": 40, "slots": 64, "slot_tokens": 96, "memory_tokens": 20_000,
        "num_layers": 1, "gamma": 4, "batch_sequences": 12, "num_anchors": 12, "steps": 80, "warmup_steps": 5,
        "adam_lr": 1e-2, "log_every": 10, "heldout_every": 1000, "checkpoint_every": 1000, "heldout_share": 0.1,
        "device": "cpu", "data_folder": folder / "data",
    }  # fmt: skip
    if algorithm == "dspark":
        settings["markov_rank"] = 16
    out = changes.pop("out", folder / algorithm)
    return make_options("toy", algorithm, out, **{**settings, **changes})


def toy_llm(loaded: LoadedTarget, draft: str | None, acceptance: str = "coupled") -> LLM:
    """The product's LLM around a target that is in memory."""
    target = TargetModel(TorchBackend("cpu"), loaded)
    drafter = make_drafter(draft, target, num_slots=NUM_PAGES * PAGE_SIZE, gamma=None, backend=target.backend)
    config = EngineConfig("toy", draft=draft, acceptance=acceptance, page_size=PAGE_SIZE, prefill_chunk=64)
    return LLM.around(Engine(config, target, drafter, NUM_PAGES, VerifyAll(acceptance)))
