"""`exactspec draft-vocab`: counts which tokens a target says, so that a draft may keep to the frequent ones."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exactspec.draft.checkpoint import TargetFacts, check_fit
from exactspec.draft.config import read_draft_config
from exactspec.draft.vocabulary import frequent_tokens, write_draft_vocab
from exactspec.engine.llm import LLM
from exactspec.errors import ConfigError
from exactspec.text.prompt_file import read_prompt_file
from exactspec.train.calibrate import own_turns
from exactspec.train.options import DataOptions
from exactspec.train.prompts import frame_prompts
from exactspec.types import SamplingParams

GROUP = 512  # prompts answered between two reports
RUNNING = 128  # of them side by side
log = logging.getLogger(__name__)


def shorten_vocabulary(
    target: str,
    draft: str | Path,
    *,
    size: int,
    num_tokens: int = 500_000,
    max_new_tokens: int = 256,
    prompts: Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Writes DRAFT/draft_vocab.json: the `size` tokens that stand most often in answers of the target. Returns facts.

    Answers are made until `num_tokens` are counted or the prompts end, at the temperatures of training data. `prompts`:
    JSON lines; None: the target writes some, and templates add others. "covered": the share of the last tenth of the
    answers that the `size` most frequent tokens of the others cover.
    """
    vocab_size = read_draft_config(Path(draft)).vocab_size
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"size: must be from 1 to {vocab_size}, got {size}")
    if num_tokens < 1:
        raise ConfigError(f"num_tokens: must be at least 1, got {num_tokens}")
    turns = read_prompt_file(prompts) if prompts else None
    llm = LLM(target, device=device, max_running_requests=RUNNING, prefix_cache=False)
    served = llm.engine.target
    facts_of_target = TargetFacts(
        served.config.hidden_size, served.config.num_layers, served.config.vocab_size, frozenset(served.eos_ids)
    )
    check_fit(read_draft_config(Path(draft)), facts_of_target, str(draft))
    groups: list[Tensor] = []
    began, counted = time.monotonic(), 0
    for counts in _answer_counts(llm, turns, max_new_tokens, vocab_size, seed):
        groups.append(counts)
        counted += int(counts.sum())
        speed = max(counted, 1) / (time.monotonic() - began)
        left = max(0.0, (num_tokens - counted) / speed)
        log.info("counted %d of %d tokens, %.0f a second, %.1f min left", counted, num_tokens, speed, left / 60)
        if counted >= num_tokens:
            break
    counts, facts = _summary(groups, size)
    write_draft_vocab(draft, frequent_tokens(counts, size), {"target": target, **facts})
    return facts


def _answer_counts(
    llm: LLM, turns: list[str] | None, max_new_tokens: int, vocab_size: int, seed: int
) -> Iterator[Tensor]:
    """Token counts [V] of the answers to one group of prompts after the other; without `turns` for ever."""
    rng, number = random.Random(seed), 0
    shares, temperatures = zip(*DataOptions().temperatures, strict=True)
    longest = llm.engine.target.config.context_length - max_new_tokens
    if longest < 1:
        raise ConfigError(f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in the target's context")
    while turns is None or number * GROUP < len(turns):
        number += 1
        group = own_turns(llm, GROUP, seed + number) if turns is None else turns[(number - 1) * GROUP : number * GROUP]
        ids = [prompt for prompt in frame_prompts(llm.tokenizer, group, seed + number) if len(prompt) <= longest]
        params = [
            SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=rng.choices(temperatures, shares)[0],
                seed=rng.getrandbits(31),
            )
            for _ in ids
        ]
        said = [token for answer in llm.generate(ids, params) for token in answer.token_ids]
        yield torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=vocab_size)


def _summary(groups: list[Tensor], size: int) -> tuple[Tensor, dict[str, Any]]:
    """All counts [V], and what is known of them."""
    counts = torch.stack(groups)
    total = counts.sum(0)
    if not total.any():
        raise ConfigError("prompts: no prompt was short enough to be answered")
    facts: dict[str, Any] = {"counted_tokens": int(total.sum()), "distinct_tokens": int(total.gt(0).sum())}
    last = counts[-max(1, len(groups) // 10) :].sum(0)
    if len(groups) > 1 and last.any():
        facts["covered"] = round(float(last[frequent_tokens(total - last, size)].sum() / last.sum()), 5)
    return total, facts
