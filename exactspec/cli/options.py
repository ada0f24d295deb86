"""Options that several commands share, as annotated types."""

from __future__ import annotations

from typing import Annotated

import typer

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
Gamma = Annotated[int | None, typer.Option("--gamma", help="Most draft tokens a round [default: the draft's own].")]
ContextLength = Annotated[int | None, typer.Option("--context-length", help="Tokens [default: the model's own].")]
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
    int | None, typer.Option("--kv-tokens", help="K/V pool size in tokens [default: from free memory].")
]
