"""Peers that a comparison may include, where installed: transformers' generate and llama.cpp (xllamacpp)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exactspec.bench.contenders import Run
from exactspec.errors import ConfigError


class TransformersContender:
    """`generate` of a transformers model with a cache, in the dtype of the target."""

    name = "transformers"

    def __init__(self, model: Any, threads: int) -> None:
        self.model = model.eval()
        self.threads = threads

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        torch.manual_seed(seed)
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def note(_ids: torch.Tensor, _scores: torch.Tensor, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(prompts), dtype=torch.bool)

        options: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            options["temperature"] = temperature
        began = time.perf_counter()
        try:
            self.model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                stopping_criteria=[note],
                pad_token_id=0,
                **options,
            )
        finally:
            torch.set_num_threads(before)
        return Run((new_tokens - 1) * len(prompts), times[-1] - times[0], times[0] - began)


class LlamaCppContender:
    """llama.cpp through the xllamacpp wheel, on the GGUF as it is (it computes with the quantised weights)."""

    def __init__(self, gguf: Path, *, threads: int, slots: int, ngram: bool = False) -> None:
        import xllamacpp

        self.name = "llama.cpp ngram" if ngram else "llama.cpp"
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx = 4096 * slots
        params.n_parallel = slots
        params.verbosity = 0
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        if ngram:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        self.server = xllamacpp.Server(params)

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        if len(prompts) != 1:
            raise ConfigError(
                "llama.cpp takes part at batch 1 here; `exactspec bench serve` compares servers under load"
            )
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


def load_transformers(path: Path, dtype: torch.dtype, device: torch.device, threads: int) -> TransformersContender:
    """The same checkpoint in transformers (a GGUF is dequantised there as it is here)."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype}
    if path.suffix == ".gguf":
        options["gguf_file"] = path.name
        path = path.parent
    model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    model = model.to(device)
    return TransformersContender(model, threads)
