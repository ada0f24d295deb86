"""`exactspec train`: a draft for a model of your own, from the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exactspec.cli import options as opt
from exactspec.errors import ConfigError


def train(
    target: Annotated[str, typer.Option(help="Model to draft for: alias, folder, GGUF file or hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; an interrupted run there is continued.")],
    algorithm: Annotated[str, typer.Option(help="dspark or dflash.")] = "dspark",
    prompts: Annotated[
        Path | None, typer.Option(help="JSON-lines prompts (default: the target writes its own).")
    ] = None,
    exclude: Annotated[list[Path] | None, typer.Option(help="Prompt file never to train on; may be repeated.")] = None,
    data_folder: Annotated[Path | None, typer.Option(help="Generated answers; several runs may share it.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Same seed, same run.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default: the recipe's).")] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="End after this time, with the rate brought to zero.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any recipe or data setting, as name=value.")
    ] = None,
) -> None:
    """Train a block draft: prompts and answers come from the target itself, the target runs frozen beside the draft.

    Progress, metrics (JSON lines), a plot and the provenance are kept in the folder; Ctrl-C leaves a whole checkpoint.
    """
    from exactspec.train.options import make_options
    from exactspec.train.run import log_report
    from exactspec.train.run import train as run

    settings: dict[str, Any] = {"prompts": prompts, "exclude": tuple(exclude or ()), "data_folder": data_folder}
    settings.update(device=device, seed=seed, max_seconds=max_seconds)
    if steps is not None:
        settings["steps"] = steps
    for pair in setting or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: expected name=value")
        settings[name] = read_setting(value)
    opt.show_progress()
    run(make_options(target, algorithm, out, **settings), report=log_report)


def read_setting(value: str) -> Any:
    """A number, true, false, or text; several of them with commas between. Numbers with colons between (shares and
    temperatures) are a list of such, be it of one."""
    parts = [_read_part(part) for part in value.split(",") if part]
    return tuple(parts) if "," in value or (len(parts) == 1 and isinstance(parts[0], tuple)) else _read_part(value)


def _read_part(value: str) -> Any:
    if ":" in value:
        numbers = tuple(_read_part(part) for part in value.split(":"))
        return value if any(isinstance(number, str) for number in numbers) else numbers
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
