"""Prompt files: JSON lines, of which bench, evaluation and training read the first user turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exactspec.errors import ConfigError

FORMS = '{"turns": [text, ...]}, {"prompt": text}, {"text": text} or {"messages": [...]}'


def read_prompt_file(path: Path, option: str = "prompts") -> list[str]:
    """The first user turn of every line that is not blank. Raises ConfigError naming file and line, after the option
    that the file was given for."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: texts may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error})") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_first_turn(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
                raise ConfigError(f"{option}: {path}, line {number}: expected {FORMS} ({error})") from error
    if not prompts:
        raise ConfigError(f"{option}: {path} holds no prompt")
    return prompts


def _first_turn(record: Any) -> str:
    if "turns" in record:
        text = record["turns"][0]
    elif "messages" in record:
        text = next(message["content"] for message in record["messages"] if message["role"] == "user")
    else:
        text = record["prompt"] if "prompt" in record else record["text"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the prompt is not a text")
    return text
