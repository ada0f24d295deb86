"""Engine settings: frozen, checked once, named as users meet them in `LLM(...)` and on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exactspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from.

    `kv_tokens` is the size of the K/V pool in tokens (None: from free memory, see `default_kv_tokens`). `gamma`
    caps the draft
    tokens of a round (None: what the draft was trained for). `verify="confidence"` lets the measured step cost and
    the draft's
    confidence decide how many drafts are verified; it never changes a token. `simulate_accept_length` is for
    benchmarks: rounds accept as
    if the draft had this mean (bonus included); the tokens are then meaningless. `seed` is for that alone: a request's
    seed is its own. `overlap`: where the device
    allows it, launch the next round before the present one is read; same outputs. `tensor_parallel`: processes
    (on CUDA, devices) that share the model's layers.
    """

    model: str
    draft: str | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    device: str = "auto"
    dtype: str = "auto"
    numerics: Literal["exact", "fast"] = "exact"
    gamma: int | None = None
    verify: Literal["all", "confidence"] = "all"
    max_running_requests: int = 48
    max_waiting_requests: int = 4096
    kv_tokens: int | None = None
    page_size: int = 16
    prefix_cache: bool = True
    prefill_chunk: int = 512
    context_length: int | None = None
    hidden_states: bool = False
    overlap: bool = True
    simulate_accept_length: float | None = None
    seed: int = 0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "acceptance": ("coupled", "rejection"),
            "numerics": ("exact", "fast"),
            "verify": ("all", "confidence"),
            "dtype": ("auto", "bfloat16", "float16", "float32"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("max_running_requests", "max_waiting_requests", "page_size", "prefill_chunk", "tensor_parallel"):
            _check_count(name, getattr(self, name))
        for name in ("gamma", "kv_tokens", "context_length"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.simulate_accept_length is not None and self.simulate_accept_length < 1:
            raise ConfigError(f"simulate_accept_length: must be at least 1, got {self.simulate_accept_length!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: must be an integer >= 1, got {value!r}")
