"""The real SmolLM2-135M against transformers' own GGUF loading and rollouts of an independent implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import full_logits

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.model.hub import resolve_model
from exactspec.model.target import TargetModel
from exactspec.model.weights import LoadedTarget

pytestmark = pytest.mark.model
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "smollm2_greedy.json").read_text())["rollouts"]


@pytest.fixture(scope="module")
def rounded(smollm2):
    """The bfloat16 weights, computed with in float32."""
    weights = smollm2.weights
    embed = weights.embed.float()
    layers = [
        type(layer)(**{name: None if t is None else t.float() for name, t in vars(layer).items()})
        for layer in weights.layers
    ]
    wide = type(weights)(embed, layers, weights.final_norm, embed)
    loaded = LoadedTarget("smollm2", smollm2.config, wide, smollm2.tokenizer, smollm2.eos_ids)
    return TargetModel(TorchBackend("cpu"), loaded)


@pytest.mark.parametrize("rollout", GOLDEN, ids=lambda r: r["prompt"][:20])
def test_greedy_rollouts_of_an_independent_implementation(rollout, rounded):
    prompt, output = rollout["prompt_ids"], rollout["output_ids"]
    assert rounded.tokenizer.apply_chat_template([{"role": "user", "content": rollout["prompt"]}]) == prompt
    logits = full_logits(rounded, prompt + output)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == output
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(output)), torch.tensor(output)]
    assert (logprobs - torch.tensor(rollout["output_logprobs"])).abs().max() < 2e-5


def test_float32_agrees_with_transformers_to_a_ten_thousandth_nat():
    """Same file, loaded by two implementations."""
    from transformers import AutoModelForCausalLM

    from exactspec.model.loader import load_target

    path = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    target = TargetModel(TorchBackend("cpu"), load_target("smollm2-135m", dtype="float32"))
    ids = GOLDEN[1]["prompt_ids"] + GOLDEN[1]["output_ids"]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    assert (torch.log_softmax(full_logits(target, ids), -1) - expected).abs().max() < 1e-4


def test_the_tokenizer_splits_as_the_original_does(smollm2):
    """Digits stand alone, so the spaces before a digit are one token; ids follow the original tokenizer.json."""
    tokens = smollm2.tokenizer.hf.convert_ids_to_tokens(smollm2.tokenizer.encode("  5 and 1234"))
    assert tokens == ["ĠĠ", "5", "Ġand", "Ġ", "1", "2", "3", "4"]
    text = "naïve 😀 \t\n<|im_start|>user\nxyz<|im_end|>"
    ids = smollm2.tokenizer.encode(text)
    assert b"".join(map(smollm2.tokenizer.token_bytes, ids)) == text.encode()
    assert smollm2.eos_ids == {2}
