"""Logprobs to JSON: the one path for every endpoint, streamed or not.

Values are natural logs. JSON has no infinities: -inf is written as FLOOR, the same in every endpoint. A value goes
through `value` once and the same float is printed wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from exactspec.types import TokenLogprob

FLOOR = -3.4028234663852886e38  # the most negative finite float32


def value(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if logprob > FLOOR else FLOOR


class TokenTexts:
    """Single tokens as text, remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.bytes = lru_cache(maxsize=200_000)(self._bytes)
        self.shown = lru_cache(maxsize=200_000)(self._shown)
        self.legacy = lru_cache(maxsize=200_000)(self._legacy)

    def _bytes(self, token_id: int) -> bytes:
        return bytes(self._tokenizer.token_bytes(token_id))

    def _shown(self, token_id: int) -> str:
        """The token decoded alone, special tokens shown; U+FFFD for parts of a character."""
        return self.bytes(token_id).decode("utf-8", "replace")

    def _legacy(self, token_id: int) -> str:
        """Like `shown`, but bytes that are no whole characters appear as latin-1 characters, one per byte."""
        data = self.bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return data.decode("latin-1")


# ---- native: [logprob, token id, text or null] -----------------------------------------------------------

Triple = list[Any]


def _triples(pairs: Sequence[tuple[int, float]], texts: TokenTexts | None) -> list[Triple]:
    return [[value(logprob), token_id, texts.shown(token_id) if texts else None] for token_id, logprob in pairs]


def native_tokens(entries: Sequence[TokenLogprob], texts: TokenTexts | None) -> list[Triple]:
    return [[value(e.logprob), e.token_id, texts.shown(e.token_id) if texts else None] for e in entries]


def native_top(entries: Sequence[TokenLogprob], texts: TokenTexts | None) -> list[list[Triple]]:
    return [_triples(e.top, texts) for e in entries]


def native_chosen(entries: Sequence[TokenLogprob], texts: TokenTexts | None) -> list[list[Triple]]:
    return [_triples(e.chosen, texts) for e in entries]


def native_prompt(
    entries: Sequence[TokenLogprob], texts: TokenTexts | None, *, top: bool, chosen: bool
) -> dict[str, Any]:
    """The input_* lists. Their first entry is always a null, whatever the start: the peer's convention."""
    tokens: list[Any] = native_tokens(entries, texts)
    if tokens:
        tokens[0][0] = None
    result: dict[str, Any] = {"input_token_logprobs": tokens}
    if top:
        result["input_top_logprobs"] = _first_null(native_top(entries, texts))
    if chosen:
        result["input_token_ids_logprobs"] = _first_null(native_chosen(entries, texts))
    return result


def _first_null(lists: list[list[Triple]]) -> list[Any]:
    return [None, *lists[1:]] if lists else []


def native_output(
    entries: Sequence[TokenLogprob], texts: TokenTexts | None, *, top: bool, chosen: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "output_token_logprobs": native_tokens(entries, texts),
        "output_token_logprobs_length": len(entries),
    }
    if top:
        result["output_top_logprobs"] = native_top(entries, texts)
    if chosen:
        result["output_token_ids_logprobs"] = native_chosen(entries, texts)
    return result


# ---- OpenAI ------------------------------------------------------------------------------------------


def completion_logprobs(
    prompt: Sequence[TokenLogprob], output: Sequence[TokenLogprob], texts: TokenTexts, *, top: bool
) -> dict[str, Any]:
    """The legacy object of /v1/completions over prompt and output tokens. `top` False leaves top_logprobs empty."""
    entries = [*prompt, *output]
    return {
        "text_offset": [-1] * len(entries),
        "token_logprobs": [value(e.logprob) for e in entries],
        "tokens": [texts.legacy(e.token_id) for e in entries],
        "top_logprobs": [_legacy_top(e, texts) for e in entries] if top else [],
    }


def _legacy_top(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any] | None:
    """Text to value, most likely first. Tokens of equal text collapse to the likeliest; the token itself is in."""
    if entry.logprob is None:
        return None
    top: dict[str, Any] = {}
    for token_id, logprob in entry.top:
        top.setdefault(texts.legacy(token_id), value(logprob))
    top.setdefault(texts.legacy(entry.token_id), value(entry.logprob))
    return top


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: one content entry per token, true bytes."""
    return {
        "content": [
            _chat_token(e.token_id, e.logprob, texts)
            | {"top_logprobs": [_chat_token(token_id, logprob, texts) for token_id, logprob in e.top]}
            for e in entries
        ]
    }


def _chat_token(token_id: int, logprob: float | None, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.shown(token_id), "bytes": list(texts.bytes(token_id)), "logprob": value(logprob)}
