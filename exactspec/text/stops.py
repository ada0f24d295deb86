"""Stop strings and stop regexes, looked for after every single token, so that block borders cannot matter."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from exactspec.errors import RequestError
from exactspec.text.classes import as_re_means
from exactspec.text.detokenizer import Detokenizer, TokenTable
from exactspec.types import FinishReason, SamplingParams

REGEX_TAIL_CHARS = 2048  # a regex sees this much of the end of the output
REGEX_TIMEOUT_S = 0.25  # for one search; only patterns with exploding backtracking come near
MAX_REGEX_BYTES = 256
MAX_STOPS = 32


def check_stops(params: SamplingParams) -> None:
    """Admission: counts, sizes and syntax. Raises RequestError naming `stop` or `stop_regex`."""
    for name in ("stop", "stop_regex"):
        if len(getattr(params, name)) > MAX_STOPS:
            raise RequestError(name, f"at most {MAX_STOPS} are allowed, got {len(getattr(params, name))}")
    for pattern in params.stop_regex or ():
        if len(pattern.encode("utf-8", "surrogatepass")) > MAX_REGEX_BYTES:
            raise RequestError("stop_regex", f"a pattern may have at most {MAX_REGEX_BYTES} bytes")
        _compile(pattern)


@lru_cache(maxsize=512)
def _compile(pattern: str) -> Any:
    """Python's `re` decides what is valid and what it means; the search itself runs in `regex`, which can be given a
    time limit."""
    import regex

    try:
        re.compile(pattern)
        return regex.compile(as_re_means(pattern), flags=regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise RequestError("stop_regex", f"{pattern!r} is not a valid pattern: {error}") from None


class SlowPattern(str):
    """What `StopChecker.append` returns when searching for a pattern took too long: the request must be aborted.

    Equal to the pattern, so that it names it; `reason` is for the client.
    """

    @property
    def reason(self) -> str:
        return f"stop_regex: searching for {str(self)!r} took more than {REGEX_TIMEOUT_S:g} s"


class StopChecker:
    """Watches one output for its stop strings and patterns.

    `append` takes the output token by token and returns the stop string, or the pattern, at the earliest token
    that completes it. Strings come before patterns. When one token completes several strings, the one whose
    match ends first in the text wins (as if the text had come character by character), then the first in the list.
    """

    def __init__(self, tokenizer: TokenTable, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._strings: tuple[str, ...] = tuple(params.stop or ())
        self._patterns = [(pattern, _compile(pattern)) for pattern in params.stop_regex or ()]
        longest = max(map(len, self._strings), default=1)
        self._overlap = longest - 1  # characters before the new ones that can belong to a new match
        self._keep = max(self._overlap, REGEX_TAIL_CHARS if self._patterns else 0)
        self._tail = ""
        self._started = False

    @property
    def has_stops(self) -> bool:
        return bool(self._strings or self._patterns)

    def append(self, token_id: int) -> str | None:
        """Returns what the output ended with, or None. Not to be called after a match."""
        if not self.has_stops:
            return None
        new = self._detokenizer.append((token_id,))
        if not new and self._started:
            return None  # nothing new to see; the text so far held no match
        self._started = True
        seen = self._tail
        self._tail = (seen + new)[-self._keep :] if self._keep else ""
        window = (seen[-self._overlap :] if self._overlap else "") + new
        return first_stop(window, self._strings) or self._first_pattern((seen + new)[-REGEX_TAIL_CHARS:])

    def _first_pattern(self, tail: str) -> str | None:
        for pattern, compiled in self._patterns:
            try:
                if compiled.search(tail, timeout=REGEX_TIMEOUT_S):
                    return pattern
            except TimeoutError:
                return SlowPattern(pattern)
        return None


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The stop string whose first occurrence in `text` ends earliest; None if there is none."""
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (best is None or start + len(stop) < best[0]):
            best = (start + len(stop), stop)
    return best[1] if best else None


def is_stop_token(token_ids: list[int] | tuple[int, ...], finish: FinishReason) -> bool:
    """Did the output end with a stop token (EOS included)? Then that token is the last one."""
    matched = finish.matched
    return finish.kind == "stop" and isinstance(matched, int) and bool(token_ids) and token_ids[-1] == matched


def trim(text: str, matched: int | str | None, params: SamplingParams, start: int = 0) -> str:
    """Cuts `text` at the first occurrence (from `start` on) of the stop string that ended it.

    Patterns are never cut, nor is anything with `no_stop_trim`.
    """
    if params.no_stop_trim or not isinstance(matched, str) or matched not in (params.stop or ()):
        return text
    at = text.find(matched, start)
    return text if at < 0 else text[:at]


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    if not stops:
        return 0
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(stop) > length and stop.startswith(end) for stop in stops):
            return length
    return 0
