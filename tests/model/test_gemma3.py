"""The real Gemma 3 270M (a GGUF in four wheels) against transformers' own loading of the same file."""

from __future__ import annotations

import pytest
import torch
from fakes import full_logits

from exactspec.backend.torch_ref.backend import TorchBackend
from exactspec.model.hub import resolve_model
from exactspec.model.loader import load_target
from exactspec.model.target import TargetModel

pytestmark = [pytest.mark.model, pytest.mark.long]
TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"


@pytest.fixture(scope="module")
def target():
    return TargetModel(TorchBackend("cpu"), load_target("gemma3-270m", dtype="float32"))


def test_logits_agree_with_transformers(target):
    """Local and global layers over more tokens than the local window."""
    from transformers import AutoModelForCausalLM

    path = resolve_model("gemma3-270m")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    ids = (target.tokenizer.encode(TEXT) * 27)[:540]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -60:], -1)
    found = torch.log_softmax(full_logits(target, ids)[-60:], -1)
    assert (found - expected).abs().max() < 2e-4


def test_it_continues_sensibly(target):
    ids = target.tokenizer.encode(TEXT)
    assert ids[0] == target.tokenizer.bos_id
    assert target.tokenizer.decode([int(full_logits(target, ids)[-1].argmax())]) == " Tokyo"


def test_the_tokenizer_round_trips(target):
    text = "Hello   wörld 😀\n\n\t<end_of_turn> 12,345"
    ids = target.tokenizer.encode(text)
    assert b"".join(map(target.tokenizer.token_bytes, ids[1:])) == text.encode()
    assert target.tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert "▁▁▁" in target.tokenizer.hf.convert_ids_to_tokens(ids)
