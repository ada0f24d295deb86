"""Against a real server on SmolLM2-135M: the guides' examples, scoring, rollouts, rescoring."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import Running, running_server

pytestmark = [pytest.mark.model, pytest.mark.long]

DOCS = Path(__file__).parent.parent.parent / "docs"
EXAMPLE = re.compile(r"<!-- example -->\n```(\w+)\n(.*?)```", re.DOTALL)
EXAMPLES = [
    (f"{name}-{number}", kind, code)
    for name in ("serving.md", "logprobs.md")
    for number, (kind, code) in enumerate(EXAMPLE.findall((DOCS / name).read_text()))
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server("--draft", "dspark") as running:
        yield running


@pytest.fixture(scope="module")
def exact() -> Iterator[Running]:
    """In float32, to compare with transformers."""
    with running_server("--draft", "dspark", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    from exactspec.model.hub import resolve_model

    path = resolve_model("smollm2-135m")
    file = path if path.is_file() else next(path.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def log_softmax(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(("kind", "code"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES])
def test_examples_of_the_guides(server: Running, kind: str, code: str) -> None:
    if kind == "sh":
        done = subprocess.run(
            ["bash", "-euc", code], env=os.environ | {"URL": server.url}, capture_output=True, check=True
        )
        text = done.stdout.decode()
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] or [text]
        assert all("error" not in json.loads(line) for line in lines)
    else:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, {"URL": server.url})


CHOICES = [
    ("The capital of France is", [" Paris", " London", " a river in Germany"]),
    ("Water is made of hydrogen and", [" oxygen", " iron", " two sorts of sand"]),
    ("Two plus two equals", [" four", " seven"]),
    ("The opposite of hot is", [" cold", " blue", " a kind of bread"]),
]


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_multiple_choice_scores_equal_transformers(exact: Running, reference: Any, max_tokens: int) -> None:
    """What evaluation harnesses do: echo, logprobs=1, token prompts in one batch; sums and is_greedy per choice."""
    prompts, starts = [], []
    for context, endings in CHOICES:
        for ending in endings:
            starts.append(len(exact.post("/tokenize", prompt=context)["tokens"]))
            prompts.append(exact.post("/tokenize", prompt=context + ending)["tokens"])
    answer = exact.post(
        "/v1/completions", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1234
    )
    for choice, ids, start in zip(answer["choices"], prompts, starts, strict=True):
        lists = choice["logprobs"]
        values = lists["token_logprobs"][start : len(ids)]
        tops = lists["top_logprobs"][start : len(ids)]
        rows = log_softmax(reference, ids)[start - 1 : len(ids) - 1]
        target = torch.tensor(ids[start:])
        assert sum(values) == pytest.approx(float(rows.gather(1, target[:, None]).sum()), abs=1e-3)
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert greedy == bool((rows.argmax(1) == target).all())


def test_rollouts_carry_the_probability_of_every_draw(exact: Running, reference: Any) -> None:
    """Reinforcement learning: n=8 at temperature 1, processed logprobs, recomputed by transformers."""
    rollouts = exact.post(
        "/generate", text="Question: name three animals.\nAnswer:", return_logprob=True, logprobs_kind="processed",
        sampling_params={"n": 8, "temperature": 1.0, "max_new_tokens": 32, "sampling_seed": 3},
        return_prompt_token_ids=True,
    )  # fmt: skip
    assert len({tuple(r["output_ids"]) for r in rollouts}) > 1
    for rollout in rollouts:
        prompt, output = rollout["prompt_token_ids"], rollout["output_ids"]
        rows = log_softmax(reference, prompt + output)[len(prompt) - 1 : -1]
        truth = rows.gather(1, torch.tensor(output)[:, None])[:, 0]
        reported = torch.tensor([t[0] for t in rollout["meta_info"]["output_token_logprobs"]])
        assert float((truth - reported).abs().max()) < 1e-4


def test_decode_and_rescore_give_the_same_floats(server: Running) -> None:
    """Through HTTP and JSON, in bfloat16, with a draft: `==`, not a tolerance."""
    for temperature, stop in ((0.0, None), (1.0, None), (1.0, ["e t", ". "])):
        answer = server.post(
            "/generate", text="I have a very good idea on how to", return_logprob=True, logprob_start_len=0,
            top_logprobs_num=5,
            sampling_params={"temperature": temperature, "max_new_tokens": 128, "ignore_eos": True, "stop": stop},
        )  # fmt: skip
        meta, n = answer["meta_info"], answer["meta_info"]["prompt_tokens"]
        ids = [t[1] for t in meta["input_token_logprobs"]] + answer["output_ids"]
        scored = server.post(
            "/generate", input_ids=ids, return_logprob=True, logprob_start_len=0, top_logprobs_num=5,
            sampling_params={"max_new_tokens": 0},
        )["meta_info"]  # fmt: skip
        assert scored["input_token_logprobs"][n:] == meta["output_token_logprobs"]
        assert scored["input_top_logprobs"][n:] == meta["output_top_logprobs"]
