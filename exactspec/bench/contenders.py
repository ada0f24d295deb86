"""Who takes part in a comparison: our engine with each drafter, behind the one interface that peers implement too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exactspec.draft.factory import NAMES, RANDOM
from exactspec.engine.build import assemble
from exactspec.engine.config import EngineConfig
from exactspec.errors import ConfigError
from exactspec.model.target import TargetModel
from exactspec.types import Request, SamplingParams

CONTEXT_PER_REQUEST = 2048  # K/V tokens set aside for each prompt of a batch


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a group of prompts. Decode time begins when the first token of the last prompt is out."""

    num_tokens: int  # output tokens after each prompt's first
    decode_seconds: float
    first_token_seconds: float  # until every prompt has its first token
    accept_length: float | None = None  # incl. bonus

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Contender(Protocol):
    name: str

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        """Generates exactly new_tokens for each prompt (EOS ignored), all at once."""
        ...


def parse_name(name: str) -> tuple[str, list[str]]:
    """Draft ("plain": none) and options of an EngineContender. Raises ConfigError for other names; loads nothing."""
    draft, *options = name.split("+")
    unknown = set(options) - {"confidence", "logprobs"}
    if unknown:
        raise ConfigError(f"contenders: {name}: unknown option {', '.join(sorted(unknown))}")
    if draft not in ("plain", RANDOM, *NAMES) and not Path(draft).expanduser().is_dir():
        raise ConfigError(
            f"contenders: {draft!r} is neither plain, one of {', '.join(NAMES)}, a draft folder nor a peer"
        )
    return draft, options


class EngineContender:
    """Our engine with one drafter over a target that contenders share.

    `name` is "plain" or a draft, with options behind it: "+confidence" lets verification follow the draft's confidence,
    "+logprobs" also returns the top 5 logprobs. prefill_chunk: rows of a step that prompts may take.
    """

    def __init__(
        self,
        name: str,
        target: TargetModel,
        *,
        batch: int,
        logprobs: int | None = None,
        acceptance: str = "coupled",
        prefill_chunk: int = 512,
    ) -> None:
        self.name = name
        draft, options = parse_name(name)
        self.logprobs = 5 if "logprobs" in options else logprobs
        config = EngineConfig(
            model=target.name,
            draft=None if draft == "plain" else draft,
            acceptance=acceptance,  # type: ignore[arg-type]
            verify="confidence" if "confidence" in options else "all",
            max_running_requests=batch,
            prefix_cache=False,
            prefill_chunk=prefill_chunk,
        )
        longest = min(target.config.context_length, CONTEXT_PER_REQUEST)
        self.engine = assemble(config, target, batch * -(-longest // config.page_size) + 64)
        self._runs = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int) -> Run:
        params = SamplingParams(
            max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True, logprobs=self.logprobs
        )
        self._runs += 1
        for number, prompt in enumerate(prompts):
            self.engine.add(Request(f"bench-{self._runs}-{number}", tuple(prompt), params, seed + number))
        return self._drain(len(prompts))

    def _drain(self, count: int) -> Run:
        began = time.perf_counter()
        first_at: float | None = None
        seen: set[str] = set()
        after_first = 0
        rounds = committed = 0
        while self.engine.has_work():
            for output in self.engine.step():
                if first_at is not None:
                    after_first += len(output.token_ids)
                if output.token_ids:
                    seen.add(output.request_id)
                if output.finish is not None:
                    rounds += output.stats.rounds
                    committed += output.stats.num_committed
            if first_at is None and len(seen) == count:
                first_at = time.perf_counter()
        ended = time.perf_counter()
        first_at = first_at or ended
        return Run(after_first, ended - first_at, first_at - began, committed / rounds if rounds else None)
