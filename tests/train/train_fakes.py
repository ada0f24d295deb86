"""A tiny predictable target and small data for the training tests."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import torch
from fakes import tiny_target

from exactspec.draft.block_model import BlockModel
from exactspec.model.weights import LoadedTarget
from exactspec.train.blocks import BlockBatch, make_blocks
from exactspec.train.data import Batch
from exactspec.train.frozen import FrozenTarget
from exactspec.train.new_draft import draft_config, new_block_model
from exactspec.train.options import Recipe, recipe_for

CPU = torch.device("cpu")


def run_cases(code: str, **environment: str) -> None:
    """Runs `code` in a process of its own, which must print "all equal"."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env=os.environ | environment,
        check=False,
    )  # fmt: skip
    assert "all equal" in done.stdout, done.stderr[-3000:]


def run_in_interpreter(code: str) -> None:
    """`run_cases` with Triton's kernels interpreted on the CPU."""
    run_cases(code, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def run_on_device(code: str) -> None:
    """`run_cases` with every tensor on the CUDA device."""
    run_cases("import torch; torch.set_default_device('cuda')\n" + code)


def small_recipe(algorithm: str, **changes: object) -> Recipe:
    sizes: dict[str, object] = {"num_layers": 2, "gamma": 4, "num_anchors": 6, "batch_sequences": 8}
    if algorithm == "dspark":
        sizes["markov_rank"] = 8
    return recipe_for(algorithm, **{**sizes, **changes})


def small_target(**changes: object) -> LoadedTarget:
    return tiny_target(num_layers=4, **changes)


def small_draft(loaded: LoadedTarget, recipe: Recipe, seed: int = 0) -> BlockModel:
    """A draft with every weight away from its special first value, so that no term of the loss hides."""
    model = new_block_model(draft_config(loaded, recipe), loaded.weights.embed, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model


def random_batch(lengths: list[int], prompt_len: list[int], vocab: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    token_ids = torch.zeros(len(lengths), 64, dtype=torch.int64)
    for row, length in enumerate(lengths):
        token_ids[row, :length] = torch.from_numpy(rng.integers(0, vocab, length))
    return Batch(token_ids, torch.tensor(lengths), torch.tensor(prompt_len))


def blocks_of(batch: Batch, recipe: Recipe, seed: int = 0) -> BlockBatch:
    return make_blocks(batch, recipe.num_anchors, recipe.gamma, recipe.loss_decay, np.random.default_rng(seed))


def frozen(loaded: LoadedTarget) -> FrozenTarget:
    return FrozenTarget(loaded, CPU, torch.float32)
