"""`exactspec bench`: speed of plain, n-gram, DFlash and DSpark decoding and of peers, in one run, against the
machine's floor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from exactspec.bench.compare import Line
    from exactspec.bench.contenders import Contender
    from exactspec.model.target import TargetModel

CONTENDERS = "plain,ngram,dflash,dspark,transformers,llama.cpp,llama.cpp-ngram"


def bench_serve(context: typer.Context) -> None:
    """Load on running servers: clients at once or requests a second; first token, time between tokens, throughput.

    Also of llama.cpp's server. `exactspec bench serve --help` lists the options.
    """
    from exactspec.bench.serving import main

    raise typer.Exit(main(context.args))


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Alias, folder, GGUF file or hub id.")] = "smollm2-135m",
    prompts: Annotated[
        list[Path] | None, typer.Option(help="JSON-lines prompt file; may be given several times.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts of each file.")] = 8,
    contenders: Annotated[
        str, typer.Option(help="Who runs; draft folders too; +confidence schedules, +logprobs adds top 5.")
    ] = CONTENDERS,
    new_tokens: Annotated[int, typer.Option(help="Output tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option(help="Prompts at once; llama.cpp takes part at 1.")] = 1,
    logprobs: Annotated[int | None, typer.Option(help="Our contenders also return this many top logprobs.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 700,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = Path("results/bench.json"),
    plot: Annotated[Path | None, typer.Option(help="Write a plot here (extra: plot).")] = Path("results/bench.png"),
    figures: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: draw the plot of figures written before.")
    ] = None,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Also time single steps by number of rows.")] = True,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    numerics: opt.Numerics = "exact",
    acceptance: opt.Acceptance = "coupled",
    random_weights: opt.RandomWeights = None,
    prefill_chunk: Annotated[
        int,
        typer.Option(help="Prompt rows of a step, of our contenders: a large batch starts together if it is large."),
    ] = 512,
) -> None:
    """Compare decoders on the same prompts, prompt by prompt in turns.

    Accept length includes the bonus token; ratios are to the first contender, with quartiles over prompts; the time to
    the first token is the median over prompts.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from exactspec.backend.select import select_backend
    from exactspec.bench.compare import read_json, write_json, write_plot
    from exactspec.bench.contenders import parse_name
    from exactspec.bench.peers import PEERS
    from exactspec.bench.prompts import BUILT_IN, read_prompts
    from exactspec.model.loader import load_target
    from exactspec.model.target import TargetModel

    if figures is not None:
        return write_plot(plot or Path("results/bench.png"), *read_json(figures))
    _check(batch, limit, new_tokens, plot)
    console = Console()
    names = contenders.split(",")
    for name in names:
        if name not in PEERS:
            parse_name(name)  # refused here, before anything is timed
    texts = {path: read_prompts(path) for path in prompts or [BUILT_IN]}
    model = model if random_weights is None else f"random:{random_weights}"
    backend = select_backend(device, dtype, numerics)
    target = TargetModel(backend, load_target(model, dtype=dtype, device=backend.device))
    groups = {path: _groups(path, texts[path], target, limit, batch, max_prompt_tokens) for path in texts}
    facts = _floor(target, console) if steps else {}
    facts.update(model=model, dtype=str(target.dtype), backend=backend.name, temperature=temperature, batch=batch)
    settings = {"batch": batch, "logprobs": logprobs, "acceptance": acceptance, "prefill_chunk": prefill_chunk}
    taking_part = _contenders(names, target, model, settings, console)
    lines = _compare(taking_part, groups, target, new_tokens, temperature, console)
    if json_out is not None:
        write_json(json_out, lines, facts)
        console.print(f"figures in {json_out}")
    if plot is not None:
        try:
            write_plot(plot, lines, facts)
            console.print(f"plot in {plot}")
        except ConfigError as reason:  # no matplotlib: the figures are what matters
            console.print(str(reason), markup=False)


def _check(batch: int, limit: int, new_tokens: int, plot: Path | None) -> None:
    """What would go wrong after the models are loaded, or after everything has run."""
    # the first token comes with the prompt: what is timed are those after it
    for name, value, least in (("batch", batch, 1), ("limit", limit, 1), ("new_tokens", new_tokens, 2)):
        if value < least:
            raise ConfigError(f"{name}: must be at least {least}, got {value}")
    if plot is not None and plot.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"plot: must end in .svg, .png or .pdf, got {plot}")


def _compare(
    contenders: Sequence[Contender],
    groups: Mapping[Path, Sequence[Sequence[Sequence[int]]]],
    target: TargetModel,
    new_tokens: int,
    temperature: float,
    console: Console,
) -> list[Line]:
    """Runs and prints file by file."""
    from exactspec.bench.compare import compare, table

    lines: list[Line] = []
    # as long as the real run where rounds are captured: the batches that shrink at its end are graphs too
    warm_up = new_tokens if target.backend.device.type == "cuda" else 16
    for path in groups:
        with console.status(path.stem) as status:
            standings = compare(
                contenders,
                groups[path],
                new_tokens=new_tokens,
                temperature=temperature,
                warm_up=warm_up,
                on_run=lambda name, stem=path.stem: status.update(f"{stem}: {name}"),  # type: ignore[misc]
            )
        lines.extend(table(path.stem, standings, contenders[0].name))
        _print_table(console, [line for line in lines if line.prompts == path.stem])
    return lines


def _groups(
    path: Path, texts: Sequence[str], target: TargetModel, limit: int, batch: int, max_prompt_tokens: int
) -> list[list[list[int]]]:
    """Token ids of the first `limit` prompts that are short enough, `batch` at a time."""
    ids = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    ids = [prompt for prompt in ids if len(prompt) <= max_prompt_tokens][:limit]
    groups = [ids[i : i + batch] for i in range(0, len(ids) - batch + 1, batch)]
    if not groups:
        found = f"{len(ids)} prompts of at most {max_prompt_tokens} tokens (limit {limit})"
        raise ConfigError(f"{path}: {found}, a batch takes {batch}")
    return groups


def _floor(target: TargetModel, console: Console) -> dict[str, Any]:
    from exactspec.bench.floor import measure_step, read_bandwidth, weight_bytes

    num_bytes = weight_bytes(target)
    bandwidth = read_bandwidth(target, num_bytes)
    floor_ms = num_bytes / bandwidth * 1e3
    console.print(
        f"weights {num_bytes / 1e6:.0f} MB read at {bandwidth / 1e9:.1f} GB/s: floor of a step {floor_ms:.2f} ms"
    )
    pool = target.make_pool(2048)
    times = [measure_step(target, pool, rows, 256) for rows in (1, 2, 4, 8, 16, 32, 64)]
    plain = times[0].milliseconds
    for step in times:
        console.print(
            f"  step of {step.rows:3d} rows: {step.milliseconds:7.2f} ms = {step.milliseconds / floor_ms:.2f} floors, "
            f"{step.milliseconds / plain:.2f} plain steps"
        )
    return {
        "weight_bytes": num_bytes,
        "bandwidth_bytes_per_second": bandwidth,
        "floor_ms": floor_ms,
        "step_ms": {step.rows: step.milliseconds for step in times},
    }


def _contenders(
    names: Sequence[str], target: TargetModel, model: str, settings: dict[str, Any], console: Console
) -> list[Contender]:
    """Ours first: a name that is no draft ends the command before a peer is loaded."""
    from exactspec.bench.contenders import EngineContender
    from exactspec.bench.peers import PEERS, LeftOutError, make_peer

    found: dict[str, Contender] = {n: EngineContender(n, target, **settings) for n in names if n not in PEERS}
    for name in names:
        if name in PEERS:
            try:
                found[name] = make_peer(name, model, target, settings["batch"])
            except LeftOutError as reason:
                console.print(str(reason), markup=False)
    if not found:
        raise ConfigError(f"contenders: nobody takes part of {', '.join(names)}")
    return [found[name] for name in names if name in found]


def _print_table(console: Console, lines: Sequence[Line]) -> None:
    from rich.table import Column, Table

    ratio = f"ratio to {lines[0].contender}"
    shown = Table(
        "prompts",
        Column("contender", no_wrap=True),
        "tokens/s",
        "accept length (incl. bonus)",
        ratio,
        "quartiles",
        "first token",
    )
    for line in lines:
        shown.add_row(
            line.prompts,
            line.contender,
            f"{line.tokens_per_second:.1f}",
            f"{line.accept_length:.2f}" if line.accept_length else "-",
            f"{line.ratio:.2f}",
            f"{line.ratio_low:.2f} - {line.ratio_high:.2f}",
            f"{line.first_token_ms:.0f} ms",
        )
    console.print(shown)
    sys.stdout.flush()
