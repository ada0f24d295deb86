"""Logprobs to JSON: the one path for every endpoint, streamed or not.

Values are natural logs. JSON has no infinities: -inf is written as FLOOR, the same in every endpoint. A value goes
through `value` once and the same float is printed wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from exactspec.text.detokenizer import Detokenizer
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


class TextOffsets:
    """Where tokens begin in the text of a choice, in characters: those of an echoed prompt, then those of the output.

    A token that only completes a character begins where that character does. Tokens behind a stop, whose text is cut,
    begin at or beyond the end of the text.
    """

    def __init__(self, tokenizer: Any, echo: str, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._at = len(echo)

    def prompt(self, token_ids: Sequence[int]) -> list[int]:
        """The echo may hold special tokens or not, and not the space that some tokenizers put in front."""
        offsets, at, detokenizer = [], 0, Detokenizer(self._tokenizer)
        for token_id in token_ids:
            piece = detokenizer.append((token_id,))
            offsets.append(min(at + self._left_over(token_id, piece), len(self._echo)))
            if self._tokenizer.is_special(token_id):
                shown = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
                piece = shown if self._echo.startswith(shown, at) else ""
            elif at == 0 and piece.startswith(" ") and not self._echo.startswith(" "):
                piece = piece[1:]
            at += len(piece)
        return offsets

    def output(self, token_ids: Sequence[int]) -> list[int]:
        """One call after the other covers a stream."""
        offsets = []
        for token_id in token_ids:
            piece = self._detokenizer.append((token_id,))
            offsets.append(self._at + self._left_over(token_id, piece))
            self._at += len(piece)
        return offsets

    def _left_over(self, token_id: int, piece: str) -> int:
        """Characters of the piece that stand for bytes of the tokens before it: they turn out to be no character."""
        if not piece.startswith("\ufffd"):
            return 0
        try:
            own = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return 0
        return len(piece) - len(own) if own and piece.endswith(own) else 0


def completion_logprobs(
    prompt: Sequence[TokenLogprob],
    output: Sequence[TokenLogprob],
    texts: TokenTexts,
    offsets: TextOffsets,
    *,
    top: bool,
) -> dict[str, Any]:
    """The legacy object of /v1/completions over prompt and output tokens. `top` False leaves top_logprobs empty."""
    entries = [*prompt, *output]
    return {
        "text_offset": offsets.prompt([e.token_id for e in prompt]) + offsets.output([e.token_id for e in output]),
        "token_logprobs": [value(e.logprob) for e in entries],
        "tokens": [texts.legacy(e.token_id) for e in entries],
        "top_logprobs": [_legacy_top(e, texts) for e in entries] if top else [],
    }


def _legacy_top(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any] | None:
    """Text to value, most likely first; the token itself is in. Of tokens with one text the token itself keeps it, else
    the likeliest; the others are called by their ids, so that none is lost and no value stands under a wrong name."""
    if entry.logprob is None:
        return None
    own = texts.legacy(entry.token_id)
    top: dict[str, Any] = {}
    for token_id, logprob in entry.top:
        text = texts.legacy(token_id)
        if token_id != entry.token_id and (text == own or text in top):
            text = f"token_id:{token_id}"
        top[text] = value(logprob)
    top.setdefault(own, value(entry.logprob))
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
