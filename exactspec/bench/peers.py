"""Peers that a comparison may include, where installed: transformers' generate and llama.cpp (xllamacpp)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from exactspec.bench.contenders import Contender, Run
from exactspec.draft.block_model import BlockModel
from exactspec.draft.checkpoint import TargetFacts, load_block_model
from exactspec.draft.factory import shipped_folder
from exactspec.errors import ConfigError
from exactspec.model.config import from_hf_config
from exactspec.model.hub import resolve_model
from exactspec.model.loader import RANDOM, open_checkpoint
from exactspec.model.target import TargetModel

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
    if name in THEIR_DRAFTS:
        options = THEIR_DRAFTS[name](target)
        if options and batch != 1:
            raise LeftOutError(name, "it takes one prompt at a time")
        return TransformersContender(
            name, load_transformers(model, target.dtype, target.backend.device), threads, options
        )
    path = resolve_model(model)
    if batch != 1 or path.suffix != ".gguf":
        raise LeftOutError(name, "it takes part at batch 1 and with a GGUF model; see `exactspec bench serve`")
    return LlamaCppContender(path, threads=threads, ngram=name.endswith("-ngram"))


class TransformersContender:
    """`generate` of a transformers model with a cache, in the dtype of the target and on its device.

    drafting: options of `generate` that make it draft (THEIR_DRAFTS), which takes one prompt at a time; {} for none.
    End tokens count for nothing.
    """

    def __init__(self, name: str, model: Any, threads: int, drafting: dict[str, Any]) -> None:
        self.name = name
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.threads = threads
        self.drafting = drafting

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

        options: dict[str, Any] = {"do_sample": temperature > 0, **self.drafting}
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
        accept_length = (new_tokens - 1) / max(forwards - 1, 1) if self.drafting else None
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


def load_transformers(model: str, dtype: torch.dtype, device: torch.device) -> Any:
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
    return theirs.to(device)


def _prompt_lookup(_: TargetModel) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}


def _their_dflash(target: TargetModel) -> dict[str, Any]:
    facts = TargetFacts(target.config.hidden_size, target.config.num_layers, target.config.vocab_size)
    try:
        draft = as_transformers_draft(load_block_model(shipped_folder("dflash", facts)))
    except ConfigError as error:
        raise LeftOutError("transformers-dflash", str(error)) from None
    return {"assistant_model": draft.to(target.backend.device, target.dtype), "speculation_type": "dflash"}


def as_transformers_draft(ours: BlockModel) -> Any:
    """A DFlash draft as the one architecture that transformers has for its own DFlash decoding.

    The network is the same (arXiv 2602.06036), two of its modules have other names. Raises ConfigError where the
    installed transformers lacks it.
    """
    try:
        from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    except ImportError:
        raise ConfigError("this version of transformers has no DFlash draft") from None
    config = ours.config
    theirs = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_positions,
            layer_types=["full_attention"] * config.num_layers,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=list(config.target_layer_ids),
        )
    )
    weights = {}
    for name, value in ours.state_dict().items():
        module, _, rest = name.partition(".")
        weights[f"{_THEIR_MODULES.get(module, module)}.{rest}"] = value
    theirs.load_state_dict(weights)
    return theirs.eval()


_THEIR_MODULES = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}

# how transformers drafts in each of its contenders: options of `generate`
THEIR_DRAFTS: dict[str, Callable[[TargetModel], dict[str, Any]]] = {
    "transformers": lambda _: {},
    "transformers-ngram": _prompt_lookup,
    "transformers-dflash": _their_dflash,
}
PEERS = (*THEIR_DRAFTS, "llama.cpp", "llama.cpp-ngram")
