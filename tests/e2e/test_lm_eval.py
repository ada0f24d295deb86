"""lm-eval against a real server: every loglikelihood it saw equals a direct computation by transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, running_server

pytestmark = [
    pytest.mark.model,
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'exactspec[harness]'"
    ),
]

DOCS = [
    ("The capital of France is", ["Paris", "London", "a river in Germany"]),
    ("Water is made of hydrogen and", ["oxygen", "iron", "two sorts of sand"]),
    ("Two plus two equals", ["four", "seven"]),
    ("The opposite of hot is", ["cold", "blue", "a kind of bread", "lukewarm soup on Sundays"]),
    ("Question: Which of these is a fruit?\nAnswer:", ["an apple", "a chair", "the moon"]),
    ("def add(a, b):\n    return", ["a + b", "a - b", "None"]),
    ("Once upon a", ["time", "table", "café 😀"]),
    ("Monday, Tuesday, Wednesday,", ["Thursday", "Saturday", "January"]),
]
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 5, "Naïve cafés sell 😀 for € 3."]
CHOICES_TASK = """
task: small_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
ROLLING_TASK = """
task: small_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


@pytest.fixture(scope="module")
def exact() -> Iterator[Running]:
    with running_server("--draft", "dspark", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def gguf() -> Path:
    from exactspec.model.hub import resolve_model

    path = resolve_model("smollm2-135m")
    return path if path.is_file() else next(path.glob("*.gguf"))


def evaluate(folder: Path, server: Running, task: str) -> list[dict[str, Any]]:
    """Runs the lm-eval command; its samples in the order of the documents."""
    settings = {
        "base_url": server.url + "/v1/completions", "model": "default", "tokenizer": folder / "tokenizer",
        "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_length": 2048,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", task, "--include_path", str(folder),
        "--model_args", ",".join(f"{name}={value}" for name, value in settings.items()), "--batch_size", "4",
        "--output_path", str(folder / "out"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = (folder / "out").glob(f"**/samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


@pytest.fixture
def folder(tmp_path: Path, gguf: Path) -> Path:
    """Tasks and their documents on disk, and the tokenizer, so that nothing is fetched."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(tmp_path / "tokenizer")
    rows = [json.dumps({"question": question, "choices": choices}) for question, choices in DOCS]
    (tmp_path / "choices.jsonl").write_text("\n".join(rows))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (tmp_path / "choices.yaml").write_text(CHOICES_TASK.format(folder=tmp_path))
    (tmp_path / "texts.yaml").write_text(ROLLING_TASK.format(folder=tmp_path))
    return tmp_path


class Reference:
    """transformers in float32."""

    def __init__(self, gguf: Path, tokenizer: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        load = {"gguf_file": gguf.name, "dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(gguf.parent, **load).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def loglikelihood(self, context: list[int], ending: list[int]) -> tuple[float, bool]:
        """(sum of the ending's logprobs, whether each of its tokens is the likeliest)"""
        with torch.no_grad():
            rows = self.model(torch.tensor([context + ending])).logits[0].log_softmax(-1)
        rows, target = rows[len(context) - 1 : -1], torch.tensor(ending)
        return float(rows.gather(1, target[:, None]).sum()), bool((rows.argmax(1) == target).all())


def test_multiple_choice(exact: Running, folder: Path, gguf: Path) -> None:
    samples = evaluate(folder, exact, "small_choices")
    reference = Reference(gguf, folder / "tokenizer")
    assert len(samples) == len(DOCS)
    greedy = 0
    for sample, (question, choices) in zip(samples, DOCS, strict=True):
        context = reference.tokenizer.encode(question)
        for [answer], choice in zip(sample["resps"], choices, strict=True):
            whole = reference.tokenizer.encode(f"{question} {choice}")
            truth, is_greedy = reference.loglikelihood(context, whole[len(context) :])
            assert float(answer[0]) == pytest.approx(truth, abs=1e-3), (question, choice)
            assert (str(answer[1]) == "True") == is_greedy, (question, choice)
            greedy += is_greedy
    assert greedy > 0


def test_whole_texts(exact: Running, folder: Path, gguf: Path) -> None:
    samples = evaluate(folder, exact, "small_texts")
    reference = Reference(gguf, folder / "tokenizer")
    prefix = reference.tokenizer.bos_token_id or reference.tokenizer.eos_token_id
    for sample, text in zip(samples, TEXTS, strict=True):
        truth, _ = reference.loglikelihood([prefix], reference.tokenizer.encode(text))
        assert float(sample["resps"][0][0]) == pytest.approx(truth, abs=1e-3)
