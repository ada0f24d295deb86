"""Schemathesis makes requests out of the server's own OpenAPI schema, good and bad ones: none ends in a 5xx."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Running, running_server

pytestmark = [
    pytest.mark.model,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("schemathesis") is None,
        reason="schemathesis is not installed: pip install 'exactspec[harness]'",
    ),
]
EXAMPLES = int(os.environ.get("EXACTSPEC_FUZZ_EXAMPLES", "60"))  # of each route


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A short context: many requests ask for all that it holds."""
    flags = ["--context-length", "160", "--max-body-mb", "1", "--enable-return-hidden-states"]
    with running_server("--draft", "ngram", *flags) as running:
        yield running


def fuzz(server: Running, folder: Path, *choice: str) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json",
        "--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES),
        "--seed", "1", "--continue-on-failure", "--request-timeout", "120", "--generation-database", "none", *choice,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    generated, passed = map(int, re.findall(r"(\d+) generated, (\d+) passed", done.stdout)[-1])
    assert generated == passed > EXAMPLES


def test_no_route_answers_with_a_server_error(server: Running, tmp_path: Path) -> None:
    """All but the pause, during which nothing would be answered."""
    fuzz(server, tmp_path, "--exclude-path", "/pause_generation")
    assert server.http.get("/health").status_code == 200


def test_pauses_neither(server: Running, tmp_path: Path) -> None:
    fuzz(server, tmp_path, "--include-path", "/pause_generation", "--include-path", "/continue_generation")
    assert server.http.post("/continue_generation", json={}).status_code == 200
    assert server.post("/generate", text="The capital of France is", sampling_params={"max_new_tokens": 3})["text"]
