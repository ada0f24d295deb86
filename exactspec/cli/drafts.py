"""`exactspec calibrate`, `draft-vocab`, `eval-draft` and `export-draft`: how sure a draft is of itself, which tokens it
proposes, how good it is, other formats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError


def calibrate(
    target: Annotated[str, typer.Option(help="Model the draft was trained for.")],
    draft: Annotated[Path, typer.Option(help="Draft checkpoint folder; calibration.json is written there.")],
    prompts: Annotated[Path | None, typer.Option(help="JSON lines, unseen in training (default: written now).")] = None,
    num_prompts: Annotated[int, typer.Option(help="Rollouts; a quarter of them measures the fit.")] = 240,
    seed: Annotated[int, typer.Option(help="Seed of prompts and rollouts.")] = 0,
    device: opt.Device = "auto",
) -> None:
    """Fit a temperature and an offset per draft position to the confidence head, left to right, on fresh rollouts."""
    from exactspec.train.calibrate import calibrate as run

    opt.show_progress()
    content = run(target, draft, prompts=prompts, num_prompts=num_prompts, device=device, seed=seed)
    typer.echo(json.dumps(content, indent=1))


def draft_vocab(
    target: Annotated[str, typer.Option(help="Model the draft was trained for.")],
    draft: Annotated[Path, typer.Option(help="Draft checkpoint folder; draft_vocab.json is written there.")],
    size: Annotated[int, typer.Option(help="Tokens that the draft may propose.")] = 16_384,
    num_tokens: Annotated[int, typer.Option(help="Answer tokens to count.")] = 500_000,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines (default: written now).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and answers.")] = 0,
    device: opt.Device = "auto",
) -> None:
    """Let a draft propose only the tokens that the target says most often: a shorter LM head to read on a CPU."""
    from exactspec.train.count_tokens import shorten_vocabulary

    opt.show_progress()
    facts = shorten_vocabulary(
        target, draft, size=size, num_tokens=num_tokens, prompts=prompts, device=device, seed=seed
    )
    typer.echo(json.dumps(facts, indent=1))


def eval_draft(
    target: Annotated[str, typer.Option(help="Model the draft was trained for.")],
    draft: Annotated[str, typer.Option(help="ngram, dflash, dspark or a checkpoint folder.")],
    prompts: Annotated[list[Path], typer.Option(help="JSON-lines prompt file; may be given several times.")],
    out: Annotated[Path | None, typer.Option(help="Folder for eval.json and the plots.")] = None,
    temperatures: Annotated[str, typer.Option(help="With commas between.")] = "0,1",
    acceptances: Annotated[str, typer.Option(help="coupled, rejection or both, with a comma between.")] = "coupled",
    num_prompts: Annotated[int, typer.Option(help="Prompts of each file, chosen by the seed.")] = 40,
    max_prompt: Annotated[int, typer.Option(help="Longer prompts (tokens) are left out.")] = 700,
    max_new_tokens: Annotated[int, typer.Option(help="Output tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Chooses prompts and draws.")] = 0,
    max_running_requests: Annotated[int, typer.Option(help="Rollouts at once.")] = 8,
    device: opt.Device = "auto",
) -> None:
    """Measure a draft in real speculative rollouts.

    Accept length (incl. bonus), acceptance by position, calibration of the confidence, cost by part.
    """
    from exactspec.bench.eval_draft import EvalOptions, format_report
    from exactspec.bench.eval_draft import eval_draft as run

    rules: Any = tuple(acceptances.split(","))
    if not set(rules) <= {"coupled", "rejection"}:
        raise ConfigError(f"acceptances: must be coupled or rejection, got {acceptances!r}")
    opt.show_progress()
    asked = EvalOptions(
        target=target,
        draft=draft,
        prompts=tuple(prompts),
        temperatures=tuple(opt.numbers(temperatures, "temperatures", float)),
        acceptances=rules,
        num_prompts=num_prompts,
        max_prompt=max_prompt,
        max_new_tokens=max_new_tokens,
        seed=seed,
        device=device,
        engine={"max_running_requests": max_running_requests},
    )
    typer.echo(format_report(run(asked, out)))


def export_draft(
    draft: Annotated[Path, typer.Option(help="Draft checkpoint folder.")],
    out: Annotated[Path, typer.Option(help="File to write; with compact, a new folder.")],
    target: Annotated[str | None, typer.Option(help="gguf: the draft's target, an alias or a GGUF file.")] = None,
    file_format: Annotated[
        str,
        typer.Option("--format", help="gguf (for llama.cpp) or compact (int8 rows, half the size)."),
    ] = "gguf",
    weight_type: Annotated[str, typer.Option(help="gguf: f16, f32 or q8_0.")] = "f16",
) -> None:
    """Write a draft as a GGUF file for llama.cpp, or as a checkpoint of half the size."""
    if file_format == "compact":
        from exactspec.draft.compact import compact_checkpoint

        compact_checkpoint(draft, out)
        typer.echo(f"wrote {out}")
        return
    if file_format != "gguf":
        raise ConfigError(f"format: must be gguf or compact, got {file_format!r}")
    if target is None:
        raise ConfigError("target: format gguf copies the target's tokenizer: name an alias or a GGUF file")
    from exactspec.train.export import export_gguf

    typer.echo(f"wrote {export_gguf(draft, target, out, weight_type)}")
