"""ExactSpec: LLM inference whose speculation is exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from exactspec.engine.llm import LLM
    from exactspec.types import SamplingParams


def __getattr__(name: str) -> Any:
    """Heavy imports wait until they are used, so that `import exactspec` and `--help` are quick."""
    if name == "LLM":
        from exactspec.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from exactspec.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'exactspec' has no attribute {name!r}")
