"""The contract on the real model: a small part of `exactspec check`, and logprobs against transformers in float32."""

from __future__ import annotations

import pytest
import torch

from exactspec.backend.select import select_backend
from exactspec.bench.exactness import ExactnessCheck
from exactspec.bench.prompts import read_prompts
from exactspec.engine.llm import LLM
from exactspec.model.hub import resolve_model
from exactspec.model.loader import load_target
from exactspec.model.target import TargetModel
from exactspec.types import SamplingParams

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_way_gives_the_same_floats(dtype):
    target = TargetModel(select_backend("cpu", dtype), load_target(MODEL, dtype=dtype))
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in read_prompts()[:6]]
    checker = ExactnessCheck(target, prompts, new_tokens=10)
    drafts = ("none", "ngram", "dflash", "dspark", "dspark+turns") if dtype == "bfloat16" else ("dspark",)
    results = list(checker.run(drafts, batches=(6,), chunks=(16,)))
    assert [str(result.cell) for result in results if not result.exact] == []
    assert sum(result.num_retracted for result in results) > 0
    assert sum(result.cached_tokens for result in results) > 0
    accept_lengths = [result.accept_length for result in results if result.cell.draft == "dspark"]
    assert min(accept_lengths) > 1.3


def test_logprobs_equal_an_independent_float32_forward():
    """Our float32 engine, speculative, against transformers' forward over prompt + answer: at most 1e-4 nat."""
    from transformers import AutoModelForCausalLM

    path = resolve_model(MODEL)
    llm = LLM(MODEL, draft="dspark", dtype="float32", kv_tokens=2048)
    messages = [{"role": "user", "content": "Name three colours and say where each is found in nature."}]
    params = SamplingParams(max_new_tokens=32, temperature=1.0, seed=5, logprobs=3, prompt_logprobs=0)
    answer = llm.chat(messages, params)[0]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids = torch.tensor([answer.prompt_token_ids + answer.token_ids])
    with torch.inference_mode():
        rows = torch.log_softmax(reference(ids).logits[0].double(), dim=-1)
    for position, entry in enumerate([*answer.prompt_logprobs, *answer.logprobs]):
        if entry.logprob is None:
            assert position == 0
            continue
        assert abs(entry.logprob - rows[position - 1, entry.token_id].item()) <= 1e-4
        for token_id, value in entry.top:
            assert abs(value - rows[position - 1, token_id].item()) <= 1e-4


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, draft="dspark", kv_tokens=4096)


def test_the_python_api(llm):
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0, logprobs=2)
    texts = ["The capital of France is", "One, two, three,"]
    single, batch = llm.generate(texts[0], greedy), llm.generate(texts, greedy)
    assert single[0].token_ids == batch[0].token_ids
    assert single[0].logprobs == batch[0].logprobs
    assert llm.generate([list(batch[1].prompt_token_ids)], greedy)[0].token_ids == batch[1].token_ids
    assert "Paris" in batch[0].text
    scored = llm.score(texts[0])[0]
    assert [entry.token_id for entry in scored.prompt_logprobs] == scored.prompt_token_ids
    assert scored.token_ids == []


def test_samples_are_reproducible_from_the_reported_seed(llm):
    sampled = SamplingParams(max_new_tokens=12, temperature=1.0, n=3)
    first = llm.generate("Once upon a time", sampled)
    assert len({tuple(answer.token_ids) for answer in first}) == 3
    again = llm.generate("Once upon a time", SamplingParams(max_new_tokens=12, temperature=1.0, seed=first[1].seed))
    assert again[0].token_ids == first[1].token_ids


def test_stream_deltas_are_the_text(llm):
    params = SamplingParams(max_new_tokens=40, temperature=0.0, logprobs=0, stop=["\n\n"])
    ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Say hello in three languages."}])
    chunks = list(llm.stream(ids, params))
    whole = llm.generate([ids], params)[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [entry for chunk in chunks for entry in chunk.logprobs] == whole.logprobs
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_stream_closed_early_gives_everything_back(llm):
    stream = llm.stream("Tell me a long story.", SamplingParams(max_new_tokens=200, temperature=1.0))
    next(stream)
    stream.close()
    assert not llm.engine.has_work()
    llm.engine.check_integrity()
    assert llm.engine.flush_cache()


def test_a_grammar_holds_and_ends_inside_a_block(llm):
    pytest.importorskip("xgrammar")
    import json

    schema = json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[\\w]+$"}, "capital": {"type": "boolean"}},
            "required": ["name", "capital"],
        }
    )
    messages = [{"role": "user", "content": "Give facts about Paris as JSON."}]
    plain = LLM(MODEL, kv_tokens=2048)
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_new_tokens=96, temperature=temperature, seed=2, json_schema=schema, logprobs=1, logprobs_kind="scaled"
        )
        answer = llm.chat(messages, params)[0]
        assert answer.token_ids == plain.chat(messages, params)[0].token_ids
        assert set(json.loads(answer.text)) >= {"name", "capital"}
        assert len(answer.logprobs) == len(answer.token_ids)
        assert answer.finish_reason.kind == "stop"
