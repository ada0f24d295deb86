"""All that a request must return, from the naive generator's own steps and what that leaves out: grammars (a fresh
matcher for every token), stop patterns, text, hidden states, supports, and the token that a scored prompt would get."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from exactspec.model.target import TargetModel
from exactspec.naive import (
    adjust,
    draw,
    entry,
    kept_ids,
    logit_domains,
    naive_prompt_logprobs,
    sequence_logits,
    stop_match,
    valid_vocab,
)
from exactspec.sampling.row_ops import row_ops
from exactspec.text.detokenizer import Detokenizer, decode_all
from exactspec.types import FinishReason, Request, SamplingParams, TokenLogprob


@dataclass
class Truth:
    """An answer. `after` is the entry of the token that would follow (only where no output is asked for)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason = field(default_factory=lambda: FinishReason("length"))
    text: str = ""
    supports: list[list[int]] = field(default_factory=list)
    after: TokenLogprob | None = None


def truth_of(target: TargetModel, request: Request, compiled: Any = None) -> Truth:
    """`compiled` is the request's grammar. One forward of the whole sequence for every token."""
    params, truth, limit = request.params, *_begun(target, request)
    if limit == 0 and params.logprobs is not None:
        truth.after = _next(target, request, [], compiled)[1]
    while len(truth.token_ids) < limit:
        token_id, scored, support = _next(target, request, truth.token_ids, compiled)
        truth.token_ids.append(token_id)
        truth.supports.append(support)
        if truth.logprobs is not None:
            truth.logprobs.append(scored)
        end = _end(target, params, truth.token_ids, limit, compiled)
        if end is not None:
            truth.finish = end
            break
    truth.text = _text(target, params, truth)
    return truth


def _begun(target: TargetModel, request: Request) -> tuple[Truth, int]:
    """What is known of an answer before its first token, and how many it may have."""
    params, prompt = request.params, list(request.prompt_ids)
    truth = Truth(logprobs=None if params.logprobs is None else [])
    if params.prompt_logprobs is not None:
        truth.prompt_logprobs = naive_prompt_logprobs(target, prompt, params)
    room = target.config.context_length - len(prompt)
    return truth, room if params.max_new_tokens is None else min(room, params.max_new_tokens)


def truth_about(target: TargetModel, request: Request, token_ids: Sequence[int], compiled: Any = None) -> Truth:
    """Of an answer that is given: what must be said of these tokens, whoever drew them. `finish` is that of the first
    end, which must be the last token; a token that could not be drawn fails."""
    params, truth, limit = request.params, *_begun(target, request)
    for count, token_id in enumerate(token_ids, start=1):
        _, scored, support = _next(target, request, truth.token_ids, compiled, token_id)
        assert token_id in support, f"token {count} of {request} is impossible"
        truth.token_ids.append(token_id)
        truth.supports.append(support)
        if truth.logprobs is not None:
            truth.logprobs.append(scored)
        end = _end(target, params, truth.token_ids, limit, compiled)
        assert (end is not None) == (count == len(token_ids)), f"{request} should have ended at {count}"
        truth.finish = end or truth.finish
    truth.text = _text(target, params, truth)
    return truth


def _next(
    target: TargetModel, request: Request, output: Sequence[int], compiled: Any, drawn: int | None = None
) -> tuple[int, TokenLogprob, list[int]]:
    """The next token (`drawn` where it is given), its entry and what might have been drawn."""
    params = request.params
    logits = sequence_logits(target, [*request.prompt_ids, *output])[-1]
    domains = logit_domains(target, logits, params, output)
    if compiled is not None:
        domains |= _masked(target, logits, params, output, allowed(target, compiled, output))
    token_id = draw(target, domains["processed"], params, request.seed, len(output)) if drawn is None else drawn
    support = (domains["processed"] > -math.inf).nonzero()[:, 0].tolist()
    return token_id, entry(target, domains[params.logprobs_kind], token_id, params.logprobs or 0, params), support


def allowed(target: TargetModel, compiled: Any, output: Sequence[int]) -> Tensor:
    """bool [V]: what the grammar allows after `output`, broken characters apart; the ends where that is nothing."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    if all(matcher.accept_token(token_id) for token_id in output) and not matcher.is_terminated():
        bits = xgrammar.allocate_token_bitmask(1, len(mask))
        matcher.fill_next_token_bitmask(bits)
        words = bits[0].tolist()
        mask = torch.tensor([bool(words[i // 32] >> (i % 32) & 1) for i in range(len(mask))])
        for token_id in mask.nonzero()[:, 0].tolist():
            mask[token_id] = _well_formed(target, [*output, token_id])
    if not mask.any():
        mask[list(target.eos_ids)] = True
    return mask


def _well_formed(target: TargetModel, token_ids: Sequence[int]) -> bool:
    """Are their bytes the beginning of a text in UTF-8? Grammars of bytes may allow what is no character."""
    data = b"".join(target.tokenizer.token_bytes(i) for i in token_ids if not target.tokenizer.is_special(i))
    for tail in itertools.product((b"", b"\x80", b"\xbf"), range(4)):
        with contextlib.suppress(UnicodeDecodeError):
            (data + tail[0] * tail[1]).decode()
            return True
    return False


def _masked(target: TargetModel, logits: Tensor, params: SamplingParams, output: Sequence[int], mask: Tensor) -> dict:
    """The scaled and the processed row under a grammar, which goes before min_new_tokens where only ends are left."""
    held = mask.clone()
    if len(output) < params.min_new_tokens:
        held[[i for i in {*target.eos_ids, *(params.stop_token_ids or ())} if 0 <= i < len(held)]] = False
    free = adjust(logits, replace(params, min_new_tokens=0), output, target.eos_ids)
    row = free.masked_fill(~(held if held.any() else mask), -math.inf)
    scaled = row if params.greedy else row / torch.tensor(params.temperature, dtype=torch.float32)
    keep = torch.zeros_like(mask)
    keep[kept_ids(scaled[: valid_vocab(target)], params, row_ops(target.backend))] = True
    processed = scaled.masked_fill(~keep, -math.inf)
    return {"scaled": scaled, "processed": processed.masked_fill(keep, 0.0) if params.greedy else processed}


def _end(
    target: TargetModel, params: SamplingParams, output: list[int], limit: int, compiled: Any
) -> FinishReason | None:
    """Stop string, pattern, stop token, length, grammar: the first of these."""
    matched = stop_match(target, output, params)
    if not isinstance(matched, str):
        text = Detokenizer(target.tokenizer, params.skip_special_tokens).append(output)
        matched = next((p for p in params.stop_regex or () if re.search(p, text)), matched)
    if matched is not None:
        return FinishReason("stop", matched)
    if len(output) == limit:
        return FinishReason("length")
    if compiled is not None and _complete(compiled, output):
        return FinishReason("stop", output[-1])
    return None


def _complete(compiled: Any, output: Sequence[int]) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    return not all(matcher.accept_token(token_id) for token_id in output) or matcher.is_terminated()


def _text(target: TargetModel, params: SamplingParams, truth: Truth) -> str:
    """Stop tokens and stop strings are cut off, patterns never, and nothing with no_stop_trim."""
    matched, shown = truth.finish.matched, truth.token_ids
    cut = truth.finish.kind == "stop" and not params.no_stop_trim
    if cut and isinstance(matched, int):
        shown = shown[:-1]
    text = decode_all(target.tokenizer, shown, params.skip_special_tokens)
    return text[: text.index(matched)] if cut and matched in (params.stop or ()) else text
