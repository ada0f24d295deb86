"""The commands as a user runs them, on a tiny checkpoint folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from exactspec import __version__


def exactspec(*arguments: str, stdin: str | None = None, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "exactspec", *arguments], input=stdin, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stderr


def test_help_names_every_command():
    text = exactspec("--help")
    commands = (
        "generate", "score", "bench", "check", "info", "demo", "serve", "train", "calibrate", "eval-draft",
        "draft-vocab", "export-draft",
    )  # fmt: skip
    for command in commands:
        assert command in text


def test_version():
    assert exactspec("--version") == f"exactspec {__version__}\n"


@pytest.mark.parametrize(
    ("command", "defaults"),
    [
        ("generate", ["(default: the draft's own)", "(default: the model's own)", "(default: from free memory)"]),
        ("train", ["(default: the target writes its own)", "(default: the recipe's)"]),
    ],
)
def test_help_states_defaults_that_are_no_value(command, defaults):
    text = " ".join(exactspec(command, "--help").replace("│", " ").split())
    for default in defaults:
        assert default in text


def test_generate_json_holds_everything(tiny_folder):
    line = exactspec(
        "generate", str(tiny_folder), "hello", "--json", "--logprobs", "2", "--prompt-logprobs", "1",
        "--max-new-tokens", "6", "--temperature", "1", "--seed", "3", "--draft", "ngram",
    )  # fmt: skip
    record = json.loads(line)
    assert record["seed"] == 3
    assert len(record["token_ids"]) == len(record["logprobs"]) == len(record["tokens"]) == len(record["sources"])
    assert record["prompt_logprobs"][0]["logprob"] is None
    assert record["finish_reason"]["kind"] in ("length", "stop")
    again = exactspec(
        "generate", str(tiny_folder), "hello", "--json", "--logprobs", "2", "--max-new-tokens", "6",
        "--temperature", "1", "--seed", "3",
    )  # fmt: skip
    assert json.loads(again)["logprobs"] == record["logprobs"]


def test_generate_streams_text(tiny_folder):
    raw = ["generate", str(tiny_folder), "-", "--raw", "--max-new-tokens", "4"]
    assert exactspec(*raw, stdin="abc").endswith("\n")
    assert "plain" in exactspec(*raw, "--logprobs", "1", stdin="abc")


def test_score_texts_and_choices(tiny_folder, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "abc"}\nplain line\n{"prompt": "ab", "choices": ["c", "dd"]}\n')
    out = tmp_path / "out.jsonl"
    exactspec("score", str(tiny_folder), str(file), "--out", str(out), "--top", "1")
    first, second, third = (json.loads(line) for line in out.read_text().splitlines())
    assert first["logprobs"][0] is None
    assert len(first["logprobs"]) == 3
    assert math.isclose(first["sum"], sum(first["logprobs"][1:]))
    assert second["text"] == "plain line"
    assert [len(choice["token_ids"]) for choice in third["scores"]] == [1, 2]
    assert math.isclose(third["scores"][0]["sum"], first["logprobs"][2])  # "c" after "ab", both ways
    assert third["best"] in (0, 1)


def test_check_prints_zero(tiny_folder):
    text = exactspec(
        "check", str(tiny_folder), "--drafts", "none,ngram", "--batches", "1,3", "--chunks", "4", "--new-tokens", "8"
    )
    assert "greatest difference 0.0 nat, 0 tokens differ" in " ".join(text.split())


def test_bench_writes_figures(tiny_folder, tmp_path):
    out = tmp_path / "bench.json"
    exactspec(
        "bench", "--model", str(tiny_folder), "--contenders", "plain,ngram,transformers,transformers-ngram",
        "--limit", "2",
        "--new-tokens", "8", "--json", str(out), "--plot", str(tmp_path / "bench.png"),
    )  # fmt: skip
    record = json.loads(out.read_text())
    assert [line["contender"] for line in record["lines"]] == [
        "plain", "ngram", "transformers", "transformers-ngram"
    ]  # fmt: skip
    assert record["lines"][0]["ratio"] == 1.0
    assert all(line["tokens_per_second"] > 0 for line in record["lines"])
    assert (tmp_path / "bench.png").stat().st_size > 5000
    exactspec("bench", "--from", str(out), "--plot", str(tmp_path / "again.png"))  # drawn, not run
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "bench.png").read_bytes()
    assert "figures of a bench" in exactspec("bench", "--from", str(tmp_path / "again.png"), status=2)


def test_info(tiny_folder):
    text = exactspec("info", str(tiny_folder))
    assert "2 x 64" in text
    assert "262" in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "/nowhere/at/all", "x"], "/nowhere/at/all"),
        (["generate", "{tiny}", "x", "--temperature", "-1"], "temperature"),
        (["generate", "{tiny}", "x", "--draft", "/nowhere"], "/nowhere"),
        (["generate", "{tiny}", "x", "--draft", "dspark"], "dspark"),
        (["generate", "{tiny}", "x", "--dtype", "int3"], "dtype"),
        (["generate", "{tiny}", "x", "--max-new-tokens", "4000"], "max_new_tokens"),
        (["generate", "{tiny}", "x", "--kv-tokens", "100000000000"], "kv_tokens: a pool of 100000000000 tokens"),
        (["score", "{tiny}", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["check", "{tiny}", "--batches", "1,x"], "batches"),
        (["bench", "--model", "{tiny}", "--limit", "0"], "limit: must be at least 1"),
        (["bench", "--model", "{tiny}", "--batch", "0"], "batch: must be at least 1"),
        (["bench", "--model", "{tiny}", "--new-tokens", "1"], "new_tokens: must be at least 2"),
        (["bench", "--model", "{tiny}", "--plot", "x.foo"], "plot: must end in"),
        (["check", "{tiny}", "--new-tokens", "0"], "new_tokens: must be at least 1"),
        (["generate", "{tiny}", "hi", "--prompt-logprobs", "1"], "--json only"),
        (["bench", "--model", "{tiny}", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["bench", "--model", "/nowhere", "--contenders", "zz"], "contenders: 'zz'"),
        (["score", "/nowhere", "/nowhere.jsonl", "--top", "-1"], "top: "),
        (["score", "/nowhere", "/nowhere.jsonl", "--out", "/no/such/folder/x"], "out: /no/such/folder"),
        (["eval-draft", "--target", "/nowhere", "--draft", "ngram", "--prompts", "/x.jsonl"], "prompts: /x.jsonl"),
        (["generate", "{tiny}", "x", "--random-weights", "smollm2-135m"], "random_weights"),
        (["generate", "./nowhere", "x"], "./nowhere"),
        (
            ["eval-draft", "--target", "{tiny}", "--draft", "ngram", "--prompts", "/x", "--temperatures", "a"],
            "temperat",
        ),
    ],
)
def test_errors_are_one_line_that_names_the_fault(tiny_folder, arguments, word):
    message = exactspec(*(a.replace("{tiny}", str(tiny_folder)) for a in arguments), status=2)
    assert word in message
    assert len(message.strip().splitlines()) == 1


def test_a_bad_line_in_a_file_is_named(tiny_folder, tmp_path: Path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n{"nothing": 1}\n')
    assert "line 2" in exactspec("score", str(tiny_folder), str(file), status=2)
    file.write_text('{"text": "fine"}\n\n{"text": ""}\n')
    assert 'line 3: "text" is empty' in exactspec("score", str(tiny_folder), str(file), status=2)


def test_choices_that_cannot_be_compared_are_refused(tiny_folder, tmp_path: Path):
    """An empty choice would win with a sum of no logprobs; behind an empty prompt nothing predicts the first token."""
    file = tmp_path / "in.jsonl"
    for line, word in (
        ('{"prompt": "a", "choices": ["b", ""]}', "choices"),
        ('{"prompt": "", "choices": ["b", "cc"]}', "prompt"),
        ('{"prompt": "a", "choices": [5]}', "line 1"),
    ):
        file.write_text(line + "\n")
        assert word in exactspec("score", str(tiny_folder), str(file), status=2)


def test_random_weights_stand_instead_of_a_model(tiny_folder):
    """The shape of a folder's config, no weights read; the only word left is the prompt."""
    line = exactspec(
        "generate", "hello", "--random-weights", str(tiny_folder), "--draft", "random", "--json", "--raw",
        "--max-new-tokens", "4", "--device", "cpu",
    )  # fmt: skip
    assert len(json.loads(line)["token_ids"]) <= 4
    assert "random weights" in exactspec("generate", "hi", "--random-weights", "no-such-shape", status=2)


def test_a_draft_of_half_the_size(tmp_path):
    """A compact copy of what is compact already holds the same numbers; GGUF needs the target's tokenizer."""
    from safetensors.torch import load_file

    shipped = Path(__file__).parents[2] / "exactspec/drafts_data/dflash-smollm2-135m"
    out = tmp_path / "copy"
    assert str(out) in exactspec("export-draft", "--draft", str(shipped), "--out", str(out), "--format", "compact")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, shipped))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours if name.endswith(".q8"))
    refusal = exactspec("export-draft", "--draft", str(shipped), "--out", str(out), status=2)
    assert "target: format gguf copies the target's tokenizer" in refusal
    assert "format: must be gguf or compact" in exactspec(
        "export-draft", "--draft", str(shipped), "--out", str(out), "--format", "onnx", status=2
    )
