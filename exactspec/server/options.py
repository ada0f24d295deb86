"""Options of `exactspec serve`, under SGLang's names where SGLang has the option.

Each field of ServeOptions is one flag (`--field-name`); its metadata holds the help text and further spellings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from exactspec.errors import ConfigError


def _option(default: Any, text: str | None, *, also: Sequence[str] = ()) -> Any:
    """text: None hides the flag from --help. What an empty default (0, "") stands for, the text says itself."""
    return field(default=default, metadata={"help": text, "also": tuple(also)})


ALGORITHMS = ("DFLASH", "DSPARK", "NGRAM", "NONE")


@dataclass(frozen=True)
class ServeOptions:
    """What the server is started with. `engine_settings` gives the engine's share."""

    model_path: str = _option("", "the same as MODEL", also=("--model",))
    served_model_name: str = _option("", "name in answers (default: the model path)")
    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(30000, "port to listen on")
    allow_origin: str = _option("", "web origin whose pages may call this server (for the comparing page)")
    api_key: str = _option("", "clients must send it as a bearer token")
    device: str = _option("auto", "auto, cpu or cuda")
    tp_size: int = _option(
        1, "processes (on CUDA, devices) that share the layers", also=("--tp", "--tensor-parallel-size")
    )
    dtype: str = _option("auto", "auto, bfloat16, float16 or float32")
    numerics: str = _option("exact", "exact (bits never depend on the batch) or fast")
    draft: str = _option("", "none, ngram, dflash, dspark, or a draft checkpoint folder (default: none)")
    speculative_algorithm: str = _option("", "DFLASH, DSPARK or NGRAM")
    speculative_draft_model_path: str = _option("", "draft checkpoint", also=("--speculative-draft-model",))
    speculative_num_draft_tokens: int = _option(0, "rows of a verify block, anchor included (default: the draft's)")
    gamma: int = _option(0, "most draft tokens a round, anchor not included (default: the draft's)")
    acceptance: str = _option("coupled", "coupled or rejection")
    verify: str = _option("all", "all or confidence: how many drafts are verified")
    context_length: int = _option(0, "most tokens of prompt and answer (default: the model's own)")
    max_total_tokens: int = _option(0, "K/V pool in tokens (default: from free memory)", also=("--kv-tokens",))
    page_size: int = _option(16, "tokens of a K/V page")
    max_running_requests: int = _option(48, "requests in one step")
    max_queued_requests: int = _option(4096, "waiting requests; more get a 503")
    chunked_prefill_size: int = _option(512, "prompt tokens a step")
    disable_radix_cache: bool = _option(False, "no prefix cache")
    disable_overlap_schedule: bool = _option(False, "read every round before the next is launched (CUDA)")
    enable_return_hidden_states: bool = _option(False, "allow return_hidden_states")
    enable_cache_report: bool = _option(False, "cached_tokens in the usage of the OpenAI routes")
    incremental_streaming_output: bool = _option(
        False, "native streams send new pieces only", also=("--stream-output",)
    )
    stream_interval: int = _option(1, "least tokens per streamed event")
    random_seed: int = _option(0, "seed of the engine's own choices")
    simulate_accept_length: float = _option(0.0, "benchmarks only: rounds accept this many tokens, whatever they say")
    request_timeout: float = _option(0.0, "seconds a request may take, then 503 (default: no limit)")
    drain_timeout: float = _option(60.0, "seconds that SIGTERM waits for requests in flight")
    max_restarts: int = _option(3, "restarts of the engine process in ten minutes")
    max_body_mb: int = _option(64, "largest request body, MiB; more gets a 413")
    max_n: int = _option(256, "samples per prompt")
    max_batch: int = _option(4096, "prompts times samples of one request")
    max_logprobs: int = _option(1024, "alternatives and asked ids per token")
    max_logit_bias: int = _option(1024, "entries of logit_bias")
    log_level: str = _option("info", "debug, info, warning or error")
    # module:function, for tests: (settings) -> engine, (model) -> tokenizer
    factory: str = _option("exactspec.server.engine_process:build_from_json", None)
    tokenizer_factory: str = _option("exactspec.server.launch:load_tokenizer", None)

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ConfigError("model_path: which model to serve?")
        if self.gamma and self.speculative_num_draft_tokens:
            raise ConfigError("gamma: give it or speculative_num_draft_tokens, not both")
        if self.speculative_num_draft_tokens == 1:
            raise ConfigError("speculative_num_draft_tokens: counts the anchor, so at least 2")
        if self.draft and (self.speculative_algorithm or self.speculative_draft_model_path):
            raise ConfigError("draft: give it or the speculative_* options, not both")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port: must be from 0 to 65535, got {self.port}")
        for name in ("max_body_mb", "max_n", "max_batch", "stream_interval", "max_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")
        if self.speculative_algorithm.upper() not in ("", *ALGORITHMS):
            known = ", ".join(ALGORITHMS)
            raise ConfigError(f"speculative_algorithm: must be one of {known}, got {self.speculative_algorithm!r}")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @property
    def draft_name(self) -> str | None:
        """The draft for the engine: a folder, a shipped kind, or None."""
        name = self.speculative_draft_model_path or self.draft or self.speculative_algorithm.lower()
        return None if name in ("", "none") else name

    @property
    def counts_rounds(self) -> bool:
        """Whether answers carry the spec_* counts: a drafter is named, and be it none, whose rounds are single rows."""
        return bool(self.draft or self.speculative_algorithm or self.speculative_draft_model_path)

    @property
    def algorithm(self) -> str | None:
        """As /server_info shows it: a draft folder's config names it, a shipped draft is called by it."""
        if self.speculative_algorithm or not self.draft_name:
            return self.speculative_algorithm.upper() or None
        config = Path(self.draft_name).expanduser() / "config.json"
        if not config.is_file():
            return self.draft_name.upper()
        return str(json.loads(config.read_text()).get("algorithm") or "block").upper()

    def engine_settings(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        gamma = self.gamma or (self.speculative_num_draft_tokens - 1 if self.speculative_num_draft_tokens else None)
        return {
            "model": self.model_path,
            "draft": self.draft_name,
            "acceptance": self.acceptance,
            "device": self.device,
            "dtype": self.dtype,
            "numerics": self.numerics,
            "gamma": gamma,
            "verify": self.verify,
            "max_running_requests": self.max_running_requests,
            "max_waiting_requests": self.max_queued_requests,
            "kv_tokens": self.max_total_tokens or None,
            "page_size": self.page_size,
            "prefix_cache": not self.disable_radix_cache,
            "overlap": not self.disable_overlap_schedule,
            "prefill_chunk": self.chunked_prefill_size,
            "context_length": self.context_length or None,
            "hidden_states": self.enable_return_hidden_states,
            "simulate_accept_length": self.simulate_accept_length or None,
            "seed": self.random_seed,
            "tensor_parallel": self.tp_size,
        }


# SGLang flags that change nothing about the answers here: accepted so that a launch line works as it is
HARMLESS_WITH_VALUE = (
    "attention-backend", "sampling-backend", "grammar-backend", "mem-fraction-static", "cuda-graph-max-bs",
    "schedule-policy", "schedule-conservativeness", "watchdog-timeout", "tokenizer-mode", "load-format",
    "speculative-attention-mode", "speculative-eagle-topk", "speculative-num-steps", "decode-log-interval",
    "max-prefill-tokens", "log-requests-level", "weight-version", "mamba-scheduler-strategy",
)  # fmt: skip
HARMLESS_SWITCHES = (
    "trust-remote-code", "disable-cuda-graph", "skip-server-warmup", "enable-metrics",
    "log-requests", "enable-deterministic-inference", "disable-outlines-disk-cache", "disable-custom-all-reduce",
    "enable-request-time-stats-logging",
)  # fmt: skip
_METAVARS = {str: "TEXT", int: "N", float: "X"}
ONLY_ONE = ("dp-size", "pp-size", "nnodes")  # one engine on one machine serves


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="exactspec serve", usage="exactspec serve MODEL [options]", allow_abbrev=False,
        description="Serves SGLang's native API and OpenAI's over HTTP. Options of an SGLang launch line work as they "
        "are; those that change nothing here are accepted and not listed.",
    )  # fmt: skip
    result.add_argument("model", nargs="?", default=None, metavar="MODEL", help="alias, folder, GGUF file or hub id")
    result.add_argument(
        "--random-weights", default=None, metavar="CONFIG",
        help="instead of a model: random weights in the shape of qwen3-8b, qwen3-4b, llama-3.1-8b, smollm2-135m or of "
        "a config.json, for speed measurements (--draft random goes with it)",
    )  # fmt: skip
    for option in fields(ServeOptions):
        flags = [f"--{option.name.replace('_', '-')}", *option.metadata["also"]]
        text, default = option.metadata["help"], option.default
        if isinstance(default, bool):
            result.add_argument(*flags, dest=option.name, action="store_true", help=text)
            continue
        shown = argparse.SUPPRESS if text is None else f"{text} (default: {default})" if default else text
        kind = type(default)
        result.add_argument(*flags, dest=option.name, type=kind, default=default, metavar=_METAVARS[kind], help=shown)
    for name in HARMLESS_WITH_VALUE:
        result.add_argument(f"--{name}", dest="_ignored", help=argparse.SUPPRESS)
    for name in HARMLESS_SWITCHES:
        result.add_argument(f"--{name}", dest="_ignored", action="store_true", help=argparse.SUPPRESS)
    for name in ONLY_ONE:
        result.add_argument(f"--{name}", dest=name.replace("-", "_"), type=int, default=1, help=argparse.SUPPRESS)
    return result


def parse(argv: Sequence[str]) -> ServeOptions:
    """Options from a command line. Raises ConfigError; argparse itself ends the process on unknown flags."""
    values = vars(parser().parse_args(argv))
    values.pop("_ignored", None)
    for name in ONLY_ONE:
        if values.pop(name.replace("-", "_")) != 1:
            raise ConfigError(f"{name}: only 1 is supported")
    positional = values.pop("model")
    if positional:
        if values["model_path"] not in ("", positional):
            raise ConfigError(f"model_path: {values['model_path']!r} is given beside the model {positional!r}")
        values["model_path"] = positional
    random_weights = values.pop("random_weights")
    if random_weights is not None:
        if values["model_path"]:
            raise ConfigError("random_weights: stands instead of a model; give one of the two")
        values["model_path"] = f"random:{random_weights}"
    return ServeOptions(**values)
