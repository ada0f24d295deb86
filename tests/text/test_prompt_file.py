"""Prompt files as people write them, and what is said about a faulty line."""

from __future__ import annotations

import json

import pytest

from exactspec.errors import ConfigError
from exactspec.text.prompt_file import read_prompt_file


def test_every_form_gives_its_first_user_turn(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [
        {"turns": ["one\u2028line", "second turn"]},
        {"prompt": "two"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"text": "four", "id": 4},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    assert read_prompt_file(path) == ["one\u2028line", "two", "three", "four"]


@pytest.mark.parametrize(
    "line",
    ['{"question": "?"}', "not JSON", "3", '"turns"', "[]", '{"prompt": " "}', '{"turns": []}', '{"messages": []}'],
)
def test_a_faulty_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["ok"]}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: expected .*turns"):
        read_prompt_file(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompt_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompt_file(tmp_path / "none.jsonl")
