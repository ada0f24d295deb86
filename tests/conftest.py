"""Shared fixtures. Helpers to import are in tests/fakes.py (`from fakes import tiny_target`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # so that every room's tests can import fakes

from fakes import byte_tokenizer, tiny_model, tiny_target

from exactspec.model.target import TargetModel
from exactspec.model.weights import LoadedTarget
from exactspec.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"

# In CI the same examples every time, so that a red run is about the change; elsewhere new ones, so that more is found.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tests share the machine; and a spinning second thread makes tiny models slower, not faster."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> LoadedTarget:
    """A random two-layer float32 target with a byte-level tokenizer. Read-only: copy before changing."""
    return tiny_target()


@pytest.fixture(scope="session")
def tiny_target_model() -> TargetModel:
    """`tiny` on the plain-torch CPU backend."""
    return tiny_model()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The byte-level tokenizer of `tiny`."""
    return byte_tokenizer()


@pytest.fixture(scope="session")
def smollm2() -> LoadedTarget:
    """SmolLM2-135M-Instruct, bfloat16. Use under `pytest.mark.model`."""
    from exactspec.model.loader import load_target

    return load_target("smollm2-135m", dtype="bfloat16")
