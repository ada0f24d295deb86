"""Two ranks share a model: the same words and bits from run to run, batch to batch, drafted or not; and what goes wrong
goes wrong with a sentence. Ranks are real processes, over gloo on the CPU and NCCL on two GPUs; weights are random."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from exactspec.backend import parallel
from exactspec.backend.parallel import Parallel, shard_layer, shard_spec
from exactspec.engine.llm import LLM
from exactspec.errors import ConfigError, DeviceError
from exactspec.types import Request, RequestOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
from tiny_checkpoints import hf_model, save

CONFIG = {
    "model_type": "llama", "vocab_size": 301, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")],
    ),
]
CUDA_SIZES = {"vocab_size": 304, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WHOLE_WITHIN = {"cpu": 2e-5, "cuda": 0.1}  # nat between two ranks and one process: float32, and bfloat16
PROMPTS = [[40 + i, 41, 42, 43 + i, 44, 45][: 3 + i % 4] for i in range(5)]
PARAMS = [
    SamplingParams(max_new_tokens=6, temperature=0.0 if i % 2 else 0.9, seed=i, ignore_eos=True, logprobs=2)
    for i in range(5)
]


def shape(folder: Path, device: str = "cpu", **changes: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | (CUDA_SIZES if device == "cuda" else {}) | changes))
    return f"random:{path}"


def options_for(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": "float32" if device == "cpu" else "bfloat16", "kv_tokens": 512}


@contextmanager
def two_ranks(model: str, device: str = "cpu", **options: Any) -> Iterator[LLM]:
    llm = LLM(model, tensor_parallel=2, **options_for(device), **options)
    try:
        yield llm
    finally:
        llm.close()


def said(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that contract C1 fixes, floats as they are."""
    return [(o.token_ids, o.text, [(e.token_id, e.logprob, e.top) for e in o.logprobs or []]) for o in outputs]


def scored(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
    return [[e.logprob for e in o.prompt_logprobs[1:]] for o in llm.score(sequences)]  # type: ignore[index]


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_keep_the_contracts(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shape(tmp_path, device)
    with two_ranks(model, device, prefix_cache=False) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        again = llm.generate(PROMPTS, PARAMS)
        alone = [llm.generate([PROMPTS[i]], PARAMS[i])[0] for i in (2, 3)]
        sequences = [[*p, *o.token_ids] for p, o in zip(PROMPTS, together, strict=True)]
        rescored = scored(llm, sequences)
    assert said(together) == said(again)
    assert said(together)[2:4] == said(alone)
    for prompt, output, row in zip(PROMPTS, together, rescored, strict=True):
        assert [e.logprob for e in output.logprobs or []] == row[len(prompt) - 1 :]
    drafting = {"draft": "random", "gamma": 3, "prefill_chunk": 4, "page_size": 4}
    with two_ranks(model, device, **drafting) as llm:  # in other processes
        drafted = llm.generate(PROMPTS, PARAMS)
        assert said(drafted) == said(together)
        assert sum(o.stats.num_verified for o in drafted) > 20
    if device == "cpu":
        monkeypatch.setenv("EXACTSPEC_BACKEND", "torch")
    whole = LLM(model, **options_for(device))
    for ours, theirs in zip(rescored, scored(whole, sequences), strict=True):
        assert ours == pytest.approx(theirs, abs=WHOLE_WITHIN[device])


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_agree_on_what_the_clock_decides_and_die_together(device: str, tmp_path: Path) -> None:
    """Stop patterns and aborts under two ranks: a step of disagreeing ranks would raise. Then one rank is killed."""
    model = shape(tmp_path, device)
    with two_ranks(model, device) as llm:
        plain = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
        text = llm.generate([PROMPTS[0]], plain)[0].text
        stopping = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True, stop_regex=".{4}")
        output = llm.generate([PROMPTS[0]], stopping)[0]
        assert text.startswith(output.text)
        assert output.finish_reason.matched == ".{4}"
        chunks = llm.stream(PROMPTS[1], plain)
        next(chunks)
        chunks.close()  # aborts
        llm.engine.add(Request("cut", tuple(PROMPTS[2]), plain, seed=0))
        llm.engine.abort("cut")
        assert [output.request_id for output in llm.engine.take_ended()] == ["cut"]  # told here, so with no later step
        with (
            pytest.raises(ConfigError, match="close the other engine first"),
            two_ranks(shape(tmp_path, device), device),
        ):
            pass
        assert llm.engine.flush_cache()
        assert llm.generate([PROMPTS[0]], plain)[0].text == text
        llm.engine.check_integrity()
        follower = llm.engine.followers._all[0].process  # type: ignore[attr-defined]
        chunks = llm.stream(PROMPTS[0], SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True))
        next(chunks)
        os.kill(follower.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="rank 1 ended with code -9"):
            list(chunks)
        with pytest.raises(DeviceError, match="rank 1 ended"):
            llm.generate([PROMPTS[0]], plain)


def test_a_grammar_that_is_too_slow_by_one_clock_ends_its_request_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    from exactspec.grammar import owner

    plain = SamplingParams(max_new_tokens=4, seed=2)
    model = save(hf_model("llama"), tmp_path)  # random shapes have no end token, and grammars want one
    with two_ranks(str(model)) as llm:
        truth = said(llm.generate([PROMPTS[0]], plain))
        monkeypatch.setattr(owner, "TIMEOUT_S", 0.0)  # in this process alone
        for _ in range(2):
            (slow,) = llm.generate([PROMPTS[1]], SamplingParams(max_new_tokens=8, seed=1, regex="[a-c]{3,20}"))
            assert slow.finish_reason.kind == "abort"
            assert "following it took" in str(slow.finish_reason.message)
            assert said(llm.generate([PROMPTS[0]], plain)) == truth
        llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads 3"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, "num_key_value_heads 1"),
        ({"intermediate_size": 65}, "intermediate_size 65"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_by_the_field(tmp_path: Path, changes: Any, field: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"tensor_parallel: {field} of the model does not divide by 2 ranks"),
        two_ranks(shape(tmp_path, **changes)),
    ):
        pass


def test_the_parts_of_a_layer_add_up_to_the_layer() -> None:
    """Every output of the whole is an output of one part (or the sum of the parts'), biases counted once."""
    from fakes import random_layer, tiny_config

    config = tiny_config(qkv_bias=True, o_bias=True, mlp_bias=True)
    spec = config.stack_spec()
    layer = random_layer(config, torch.Generator().manual_seed(1), torch.float32, 0.3)
    layer.qkv_bias, layer.o_bias = torch.randn(layer.qkv.shape[0]), torch.randn(32)
    layer.gate_up_bias, layer.down_bias = torch.randn(128), torch.randn(32)
    parts = [shard_layer(layer, spec, Parallel(rank, 2)) for rank in range(2)]
    assert shard_spec(spec, Parallel(0, 2)).num_heads == 2
    q, kv = 64, 32  # rows of q, of k and of v
    for whole, halves in ((layer.qkv, [p.qkv for p in parts]), (layer.qkv_bias, [p.qkv_bias for p in parts])):
        again = [torch.cat([h.split([q // 2, kv // 2, kv // 2])[i] for h in halves]) for i in range(3)]
        assert torch.equal(torch.cat(again), whole)
    assert torch.equal(torch.cat([p.gate_up[:32] for p in parts] + [p.gate_up[32:] for p in parts]), layer.gate_up)
    assert torch.equal(torch.cat([p.o for p in parts], dim=1), layer.o)
    assert torch.equal(torch.cat([p.down for p in parts], dim=1), layer.down)
    assert [p.o_bias is None for p in parts] == [p.down_bias is None for p in parts] == [False, True]


def test_a_group_that_does_not_end_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "destroy_process_group", ended.wait)
    monkeypatch.setattr(parallel, "LEAVE_TIMEOUT_S", 0.05)
    parallel.leave_group()
    assert "the process group has not ended" in caplog.text
    ended.set()
    caplog.clear()
    parallel.leave_group()
    assert not caplog.text


def test_what_waits_for_a_dead_rank_is_released_until_the_group_is_left() -> None:
    released: list[int] = []
    parallel.on_abort(lambda: released.append(1))
    parallel.abort_collectives()
    parallel.leave_group()
    parallel.abort_collectives()
    assert released == [1]
