"""The command line: one typer app; each command is a thin file that imports its weight only when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from exactspec import __version__
from exactspec.cli import bench, check, demo, drafts, generate, info, score, serve, train
from exactspec.errors import ExactSpecError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # the command reads the rest of the line itself
app = typer.Typer(
    name="exactspec",
    help="LLM inference whose speculation is exact: the same tokens and logprobs, bit for bit, only sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(invoke_without_command=True)
bench_app.callback()(bench.bench)
bench_app.command("serve", context_settings=PASS_ON, add_help_option=False)(bench.bench_serve)
# in the order of --help
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("serve", context_settings=PASS_ON, add_help_option=False)(serve.serve)
app.command("check")(check.check)
app.add_typer(bench_app, name="bench")
app.command("train")(train.train)
app.command("calibrate")(drafts.calibrate)
app.command("draft-vocab")(drafts.draft_vocab)
app.command("eval-draft")(drafts.eval_draft)
app.command("export-draft")(drafts.export_draft)
app.command("info")(info.info)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"exactspec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command; errors meant for users end in one line on stderr and status 2, never in a traceback."""
    try:
        app()
    except ExactSpecError as error:
        print(f"exactspec: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("exactspec: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:  # a file that is not there or cannot be written
        print(f"exactspec: {error}", file=sys.stderr)
        sys.exit(2)
