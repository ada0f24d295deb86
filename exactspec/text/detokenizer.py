"""Tokens to text, a few at a time: byte-exact with decoding everything at once."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """What this room needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """Incremental decoder of one output.

    The text of a sequence is the UTF-8 decoding of its tokens' bytes laid end to end, bytes that are not UTF-8
    shown as U+FFFD. A token may end inside a character: `append` then keeps the unfinished bytes back until the
    character is complete (or turns out to be broken), so that what it has returned never changes.
    """

    def __init__(self, tokenizer: TokenTable, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these tokens; "" while a character is unfinished."""
        return self._decoder.decode(b"".join(map(self._bytes, token_ids)))

    def flush(self) -> str:
        """The end of the output: unfinished bytes become U+FFFD, as in a full decode."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bytes:
        """Bytes of an unfinished character, held back."""
        return self._decoder.getstate()[0]

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


def decode_all(tokenizer: TokenTable, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The text of a complete output."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return detokenizer.append(token_ids) + detokenizer.flush()
