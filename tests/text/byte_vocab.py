"""A small byte-level vocabulary whose tokens cut characters wherever they like."""

from __future__ import annotations

from collections.abc import Sequence


class ByteVocab:
    """Ids 0-255 are single bytes; longer pieces and special tokens follow."""

    pieces = (b"ab", b"abc", b" the", b"\xe2\x82", b"\xac!", "é".encode(), b"\xf0\x9f", b"\x98\x80STOP", b"\n\n", b"ST")
    specials = (b"<|end|>", b"<|start|>")
    end_id = 256 + len(pieces)

    def __init__(self) -> None:
        self.table = [bytes([b]) for b in range(256)] + list(self.pieces) + list(self.specials)

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def token_bytes(self, token_id: int) -> bytes:
        return self.table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.end_id

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The slow obvious truth: all bytes at once."""
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(self.table[i] for i in kept).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Greedy longest match."""
        data, ids = text.encode(), []
        while data:
            ids.append(
                max((i for i, p in enumerate(self.table) if data.startswith(p)), key=lambda i: len(self.table[i]))
            )
            data = data[len(self.table[ids[-1]]) :]
        return ids
