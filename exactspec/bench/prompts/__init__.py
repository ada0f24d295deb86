"""The prompt set that ships with the project."""

from __future__ import annotations

from pathlib import Path

from exactspec.text.prompt_file import read_prompt_file

BUILT_IN = Path(__file__).parent / "mixed.jsonl"


def read_prompts(path: Path | None = None) -> list[str]:
    """First user turns of a prompt file, or of the built-in set."""
    return read_prompt_file(path or BUILT_IN)
