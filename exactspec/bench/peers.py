"""Peers that a comparison may include, where installed: transformers' generate and llama.cpp (xllamacpp)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exactspec.bench.contenders import Contender, Run
from exactspec.errors import ConfigError
from exactspec.model.config import from_hf_config
from exactspec.model.hub import resolve_model
from exactspec.model.loader import RANDOM, open_checkpoint
from exactspec.model.target import TargetModel

PEERS = ("transformers", "transformers-ngram", "llama.cpp", "llama.cpp-ngram")
PROMPT_LOOKUP_TOKENS = 7  # as many drafts a round as our n-gram drafter


class LeftOutError(ConfigError):
    """A peer cannot take part here."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} is left out: {reason}")


def make_peer(name: str, model: str, target: TargetModel, batch: int) -> Contender:
    """The peer `name` of PEERS on the checkpoint, device and threads of `target`. Raises LeftOutError."""
    if model.startswith(RANDOM):
        raise LeftOutError(name, "random weights are ours alone")
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    ngram = name.endswith("-ngram")
    if name.startswith("transformers"):
        if ngram and batch != 1:
            raise LeftOutError(name, "it takes one prompt at a time")
        return load_transformers(model, target.dtype, target.backend.device, threads, ngram)
    path = resolve_model(model)
    if batch != 1 or path.suffix != ".gguf":
        raise LeftOutError(name, "it takes part at batch 1 and with a GGUF model; see `exactspec bench serve`")
    return LlamaCppContender(path, threads=threads, ngram=ngram)


class TransformersContender:
    """`generate` of a transformers model with a cache, in the dtype of the target and on its device.

    ngram: with its prompt lookup decoding, which takes one prompt at a time. End tokens count for nothing.
    """

    def __init__(self, model: Any, threads: int, ngram: bool = False) -> None:
        self.name = "transformers-ngram" if ngram else "transformers"
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.threads = threads
        self.options: dict[str, Any] = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if ngram else {}

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.manual_seed(seed)
        width = max(len(prompt) for prompt in prompts)
        device = self.model.device
        padding = [width - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        first: list[float] = []
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        def note(_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if not first:
                _wait(device)
                first.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool, device=device)

        options: dict[str, Any] = {"do_sample": temperature > 0, **self.options}
        if temperature > 0:
            options["temperature"] = temperature
        counting = self.model.register_forward_pre_hook(count)
        began = time.perf_counter()
        try:
            out = self.model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new_tokens,
                stopping_criteria=[note],
                pad_token_id=0,
                **options,
            )
        finally:
            counting.remove()
            torch.set_num_threads(before)
        _wait(device)
        ended = time.perf_counter()
        if out.shape[1] != width + new_tokens:
            raise ConfigError(f"{self.name}: {out.shape[1] - width} tokens came, expected {new_tokens}")
        accept_length = (new_tokens - 1) / max(forwards - 1, 1) if self.options else None
        return Run((new_tokens - 1) * len(prompts), ended - first[0], first[0] - began, accept_length)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def llama_cpp_server(gguf: Path, *, slots: int, slot_tokens: int, threads: int, ngram: bool = False) -> Any:
    """llama.cpp's server in this process, listening on a free port (`listening_address`). Raises LeftOutError."""
    try:
        import xllamacpp
    except ImportError:
        raise LeftOutError("llama.cpp", "xllamacpp is not installed (pip install 'exactspec[bench]')") from None
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = slot_tokens * slots
    params.n_parallel = slots
    params.verbosity = 0
    params.port = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    if ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    return xllamacpp.Server(params)


class LlamaCppContender:
    """llama.cpp through the xllamacpp wheel, on the GGUF as it is (it computes with the quantised weights)."""

    def __init__(self, gguf: Path, *, threads: int, ngram: bool = False) -> None:
        self.name = "llama.cpp-ngram" if ngram else "llama.cpp"
        self.server = llama_cpp_server(gguf, slots=1, slot_tokens=4096, threads=threads, ngram=ngram)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        answer = self.server.handle_completions(
            {
                "prompt": list(prompts[0]),
                "n_predict": new_tokens,
                "temperature": temperature,
                "seed": seed % 2**31,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        timings = answer["timings"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        tokens = timings["predicted_n"] - 1
        accept_length = (tokens / max(tokens - accepted, 1)) if drafted else None
        return Run(tokens, timings["predicted_ms"] / 1e3, timings["prompt_ms"] / 1e3, accept_length)


def load_transformers(
    model: str, dtype: torch.dtype, device: torch.device, threads: int, ngram: bool = False
) -> TransformersContender:
    """transformers' model of the checkpoint with our weights: a GGUF's are dequantised as ours are, since newer
    versions keep them packed, which is slower."""
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(model)
    theirs: Any = AutoModelForCausalLM.from_config(checkpoint.hf_config, dtype=dtype)
    weights = {name: checkpoint.read(name).to(dtype) for name in checkpoint.shapes if name in theirs.state_dict()}
    if checkpoint.norms_folded and from_hf_config(checkpoint.hf_config).norm_offset:
        weights = {name: w - 1.0 if name.endswith("norm.weight") else w for name, w in weights.items()}
    missing = set(theirs.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"lm_head.weight"} or (missing and not theirs.config.tie_word_embeddings):
        raise ConfigError(f"transformers: no weights for {', '.join(sorted(missing))}")
    theirs.tie_weights()
    return TransformersContender(theirs.to(device), threads, ngram)
