"""The command line: one typer app; each command is a thin file that imports its weight only when it runs."""

from __future__ import annotations

import sys

import typer

from exactspec.cli import bench, check, demo, generate, info, score, serve, train
from exactspec.errors import ExactSpecError

app = typer.Typer(
    name="exactspec",
    help="LLM inference whose speculation is exact: the same tokens and logprobs, bit for bit, only sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("score")(score.score)
app.command("bench")(bench.bench)
app.command("check")(check.check)
app.command("info")(info.info)
app.command("demo")(demo.demo)
app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(serve.serve)
app.command("train")(train.train)


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
