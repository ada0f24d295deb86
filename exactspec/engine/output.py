"""Where an answer ends: committed tokens are cut here, once, for tokens, logprobs, counts and text alike
(contract C3).
"""

from __future__ import annotations

from collections.abc import Sequence

from exactspec.text.stops import SlowPattern
from exactspec.types import FinishReason, RunningRequest, SamplingParams

NO_IDS: frozenset[int] = frozenset()


def stop_token_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end such a request; ignore_eos switches off EOS and the request's own stop ids alike."""
    if params.ignore_eos:
        return NO_IDS
    return eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids


def append_until_stop(request: RunningRequest, committed: Sequence[int]) -> tuple[int, FinishReason | None]:
    """Appends committed tokens one by one to the request, as plain decoding would, up to the first end.

    Returns how many were emitted and why the request ended, if it did. At one token the order is: stop string
    or regex, stop token, length, grammar; so a stop at the very last allowed token is a stop, and one beyond it is
    never reached.
    """
    tokens, count = request.token_ids, len(committed)
    plain = request.grammar is None and request.stop_checker is None
    if plain and len(tokens) + count < request.max_tokens and request.stop_ids.isdisjoint(committed):
        tokens.extend(committed)  # nothing ends here: most rounds of most requests
        return count, None
    for count, token_id in enumerate(committed, start=1):
        request.token_ids.append(token_id)
        finish = _end_at(request, token_id)
        if finish is not None:
            return count, finish
    return len(committed), None


def _end_at(request: RunningRequest, token_id: int) -> FinishReason | None:
    if request.grammar is not None:
        request.grammar.advance([token_id])
    matched = request.stop_checker.append(token_id) if request.stop_checker is not None else None
    if isinstance(matched, SlowPattern):  # this request ends, the others go on
        return FinishReason("abort", message=matched.reason)
    if matched is not None:
        return FinishReason("stop", matched=matched)
    if token_id in request.stop_ids:
        return FinishReason("stop", matched=token_id)
    if len(request.token_ids) >= request.max_tokens:
        return FinishReason("length")
    if request.grammar is not None and request.grammar.terminated:
        return FinishReason("stop", matched=token_id)
    return None
