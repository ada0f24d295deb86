"""What the engine lets in (contract C6): every request is checked whole before it queues."""

from __future__ import annotations

from dataclasses import dataclass

from exactspec.errors import RequestError
from exactspec.types import Request, SamplingParams

RESERVED_ROWS = 16  # no fewer rows of the pool stay beyond an answer that has no limit of its own


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and pool allow."""

    vocab_size: int  # rows of the embedding: ids that have an embedding
    context_length: int
    pool_tokens: int  # tokens that one request alone can hold
    block_rows: int  # rows reserved beyond the last token: anchor and gamma drafts
    hidden_states: bool
    drawable: int = 0  # ids below this can be drawn, the rest is padding
    eos_ids: frozenset[int] = frozenset()


def max_total_tokens(request: Request, limits: Limits) -> int:
    """Prompt and output together may grow to this many tokens. Without a limit of its own a request has what the
    context leaves, or a smaller pool: as much whatever the draft, unless its blocks are longer than usual."""
    limit = request.params.max_new_tokens
    if limit is None:
        room = limits.pool_tokens - max(limits.block_rows, RESERVED_ROWS)
        return min(limits.context_length, max(len(request.prompt_ids) + 1, room))
    return len(request.prompt_ids) + limit


def check_request(request: Request, limits: Limits) -> None:
    """Raises RequestError naming the field when the request cannot be served exactly as asked."""
    _check_prompt(request, limits)
    _check_length(request, limits)
    _check_token_ids(request.params, limits.vocab_size)
    params = request.params
    if params.min_new_tokens and limits.drawable:
        ends = {*limits.eos_ids, *(params.stop_token_ids or ())}  # over HTTP the limits have come as lists
        if ends.issuperset(range(limits.drawable)):
            raise RequestError("min_new_tokens", "EOS and stop_token_ids are all tokens there are: none may come first")
    if params.prompt_logprobs is not None and params.prompt_logprob_start > len(request.prompt_ids):
        raise RequestError(
            "prompt_logprob_start",
            f"{params.prompt_logprob_start} is beyond the prompt of {len(request.prompt_ids)} tokens",
        )
    if request.return_hidden_states and not limits.hidden_states:
        raise RequestError("return_hidden_states", "the engine was not started with hidden states enabled")
    if request.sampling_mask not in (None, "selected", "support"):
        raise RequestError("sampling_mask", f"must be selected or support, got {request.sampling_mask!r}")
    if request.max_drafts is not None and not 0 <= request.max_drafts < 2**63:
        raise RequestError("max_drafts", f"must be a 64-bit integer >= 0, got {request.max_drafts}")


def _check_prompt(request: Request, limits: Limits) -> None:
    if not request.prompt_ids:
        raise RequestError("prompt", "is empty; at least one token is needed")
    for position, token_id in enumerate(request.prompt_ids):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                "prompt",
                f"token id {token_id} at position {position} is outside the vocabulary (0..{limits.vocab_size - 1})",
            )


def _check_length(request: Request, limits: Limits) -> None:
    prompt_len, limit = len(request.prompt_ids), request.params.max_new_tokens
    if prompt_len >= limits.context_length:
        raise RequestError("prompt", f"has {prompt_len} tokens; the context length is {limits.context_length}")
    if limit is not None and prompt_len + limit > limits.context_length:
        raise RequestError(
            "max_new_tokens",
            f"{prompt_len} prompt tokens + {limit} exceed the context length of {limits.context_length}",
        )
    most = max_total_tokens(request, limits)
    if limit is None and request.params.min_new_tokens > most - prompt_len:
        raise RequestError(
            "min_new_tokens", f"exceeds the {most - prompt_len} tokens that context length and pool leave"
        )
    needed = most + limits.block_rows
    if needed > limits.pool_tokens:
        raise RequestError(
            "max_new_tokens",
            f"the request may need {needed} K/V tokens; the pool holds {limits.pool_tokens} (see kv_tokens)",
        )


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        k = getattr(params, name)
        if k is not None and k > vocab_size:
            raise RequestError(name, f"{k} is over the vocabulary of {vocab_size}")
    for token_id in params.logprob_token_ids or ():
        if token_id >= vocab_size:
            raise RequestError(
                "logprob_token_ids", f"token id {token_id} is outside the vocabulary (0..{vocab_size - 1})"
            )
    for token_id in params.logit_bias or {}:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError("logit_bias", f"token id {token_id!r} is outside 0..{vocab_size - 1}")
