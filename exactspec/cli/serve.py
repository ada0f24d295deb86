"""`exactspec serve`: hands the command line to the server's own option table (SGLang's names work)."""

from __future__ import annotations

import typer

from exactspec.errors import ConfigError


def serve(context: typer.Context) -> None:
    """Serve over HTTP: SGLang's native API and the OpenAI API (extra: serve)."""
    try:
        from exactspec.server.launch import main
    except ImportError as error:
        raise ConfigError(f"serving needs the extra: pip install 'exactspec[serve]' ({error})") from None
    raise typer.Exit(main(context.args))
