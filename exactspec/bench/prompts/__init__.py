"""The prompt set that ships with the project, and reading of prompt files."""

from __future__ import annotations

import json
from pathlib import Path

from exactspec.errors import ConfigError

BUILT_IN = Path(__file__).parent / "mixed.jsonl"


def read_prompts(path: Path | None = None, limit: int | None = None) -> list[str]:
    """First turns of a JSON-lines file: {"turns": [...]}, {"prompt": ...} or {"text": ...} a line."""
    path = path or BUILT_IN
    prompts: list[str] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    prompts.append(_first_turn(line, path, number))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    if not prompts:
        raise ConfigError(f"{path}: holds no prompts")
    return prompts[:limit]


def _first_turn(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
    if isinstance(record, str):
        return record
    if isinstance(record, dict):
        if isinstance(record.get("turns"), list) and record["turns"]:
            return str(record["turns"][0])
        for key in ("prompt", "text"):
            if isinstance(record.get(key), str):
                return str(record[key])
    raise ConfigError(f'{path}, line {number}: expected {{"turns": [...]}}, {{"prompt": ...}} or {{"text": ...}}')
