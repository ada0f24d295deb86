"""`exactspec check`: runs the exactness matrix and prints the greatest difference, which must be 0.0."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError

if TYPE_CHECKING:
    from exactspec.bench.exactness import CellResult

COLUMNS = (
    "drafts", "batch", "cache", "chunk", "retracted", "overlapped", "accept length", "cached",
    "tokens differ", "decode", "rescore",
)  # fmt: skip


def check(
    model: opt.Model = "smollm2-135m",
    drafts: Annotated[
        str, typer.Option(help="Drafts to check, commas between; +confidence and +turns vary what is verified.")
    ] = "none,ngram,dflash,dspark",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,5,32",
    chunks: Annotated[str, typer.Option(help="Prefill chunk sizes.")] = "4,512",
    new_tokens: Annotated[int, typer.Option(help="Output tokens per request.")] = 24,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    json_out: Annotated[Path | None, typer.Option("--json", help="Write every cell here.")] = None,
) -> None:
    """Decode the same requests in every way and compare tokens and logprobs with ==, then rescore them as prompts.

    The truth is plain decoding, alone, cold. Temperatures 0, 0.7 and 1.0 are in every cell. On CUDA every cell runs
    with the overlap of rounds and without.
    """
    from rich.console import Console
    from rich.table import Table

    from exactspec.backend.select import select_backend
    from exactspec.bench.exactness import ExactnessCheck
    from exactspec.bench.prompts import read_prompts
    from exactspec.model.loader import load_target
    from exactspec.model.target import TargetModel

    if new_tokens < 1:
        raise ConfigError(f"new_tokens: must be at least 1, got {new_tokens}")
    batch_sizes, chunk_sizes = opt.numbers(batches, "batches", int), opt.numbers(chunks, "chunks", int)
    console = Console()
    backend = select_backend(device, dtype, "exact")
    target = TargetModel(backend, load_target(model, dtype=dtype, device=backend.device))
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in read_prompts()]
    checker = ExactnessCheck(target, prompts, new_tokens=new_tokens)
    table = Table(*COLUMNS)
    results: list[CellResult] = []
    with console.status("the truth: plain decoding, alone, cold") as status:
        for result in checker.run(drafts.split(","), batch_sizes, chunk_sizes):
            results.append(result)
            status.update(f"{len(results)} cells done, last: {result.cell}")
            table.add_row(*_row(result), style=None if result.exact else "bold red")
    console.print(table)
    if json_out is not None:
        json_out.write_text(
            json.dumps([{**asdict(result), "exact": result.exact} for result in results], indent=1) + "\n"
        )
    worst = max(result.largest_difference for result in results)
    differ = sum(sum(result.tokens_differ.values()) for result in results)
    console.print(
        f"{len(results)} cells x 3 temperatures on {target.name}, {target.dtype}, backend {backend.name}: "
        f"greatest difference {worst} nat, {differ} tokens differ"
    )
    if not all(result.exact for result in results):
        raise typer.Exit(1)


def _row(result: CellResult) -> list[str]:
    cell = result.cell
    return [
        cell.draft,
        str(cell.batch),
        "cached" if cell.cached else "cold",
        str(cell.chunk),
        str(result.num_retracted),
        str(result.num_overlapped) if cell.overlap else "off",
        f"{result.accept_length:.2f}" if result.accept_length else "-",
        str(result.cached_tokens),
        str(sum(result.tokens_differ.values())),
        str(max(result.decode_difference.values())),
        str(max(result.rescore_difference.values())),
    ]
