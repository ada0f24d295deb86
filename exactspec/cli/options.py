"""Options that several commands share, as annotated types."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from exactspec.errors import ConfigError

N = TypeVar("N", int, float)
Model = Annotated[str, typer.Argument(help="Alias (smollm2-135m, gemma3-270m), folder, GGUF file or hub id.")]
Draft = Annotated[
    str, typer.Option("--draft", help="none, ngram, dflash, dspark (shipped drafts), or a draft checkpoint folder.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
Numerics = Annotated[str, typer.Option("--numerics", help="exact (bits never depend on the batch) or fast.")]
Acceptance = Annotated[
    str, typer.Option("--acceptance", help="coupled (exact) or rejection (lossless in distribution).")
]
Gamma = Annotated[int | None, typer.Option("--gamma", help="Most draft tokens a round (default: the draft's own).")]
ContextLength = Annotated[int | None, typer.Option("--context-length", help="Tokens (default: the model's own).")]
RandomWeights = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        help="Instead of a model: random weights in the shape of qwen3-8b, qwen3-4b, llama-3.1-8b, smollm2-135m or of "
        "a config.json (file or folder). For speed measurements; --draft random goes with it.",
    ),
]
TpSize = Annotated[
    int,
    typer.Option(
        "--tp-size", "--tp", "--tensor-parallel-size", help="Processes (on CUDA, devices) that share the layers."
    ),
]
KvTokens = Annotated[
    int | None, typer.Option("--kv-tokens", help="K/V pool size in tokens (default: from free memory).")
]


def numbers(text: str, name: str, kind: Callable[[str], N]) -> list[N]:
    """The numbers of an option with commas between."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name}: expected numbers with commas between, got {text!r}") from None


def show_progress() -> None:
    """Lines of log on stderr, for commands that take long."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
