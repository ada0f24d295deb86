"""A tokenizer with true bytes for every token, over transformers' fast tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from exactspec.errors import CheckpointError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"  # sentencepiece writes a space as U+2581


class Tokenizer:
    """Ids <-> text. `hf` is the wrapped transformers tokenizer, for libraries that want one.

    `eos_ids` holds the tokenizer's own end token and whatever ids the model's configs add.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int] = ()) -> None:
        if getattr(hf, "backend_tokenizer", None) is None:
            raise CheckpointError("the tokenizer is not a fast one (no tokenizer.json): not supported")
        self.hf = hf
        own = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_ids: frozenset[int] = frozenset((*own, *eos_ids))
        # not the number of tokens: a vocabulary may have holes below its largest id
        self.vocab_size: int = 1 + max(hf.get_vocab().values(), default=-1)
        self.bos_id: int | None = hf.bos_token_id
        self._special = {i for i, token in hf.added_tokens_decoder.items() if token.special} | set(hf.all_special_ids)
        self._added = {i: token.content for i, token in hf.added_tokens_decoder.items()}
        self._style = _byte_style(hf.backend_tokenizer.decoder)
        self._known_bytes: dict[int, bytes] = {}  # by token id; asking `hf` takes 20 times longer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises RequestError for half a surrogate pair, which is no character."""
        try:
            return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        except TypeError:
            raise RequestError("prompt", f"is no text: {text!r:.80}") from None

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD. Fast tokenizers never put spaces between special tokens:
        the argument is accepted for API parity. Ids without a token (padded vocabulary) decode to nothing."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        return str(self.hf.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Ids of a conversation; the template writes all special tokens itself, none are added.

        kwargs go to the template: tools, chat_template, continue_final_message (no generation prompt then), ...
        """
        text = self.render_chat_template(messages, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def render_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as the template writes it. Raises RequestError when there is no template or it refuses."""
        if not (kwargs.get("chat_template") or self.has_chat_template):
            raise RequestError("messages", "this model has no chat template; pass chat_template or use plain prompts")
        if kwargs.get("continue_final_message"):
            add_generation_prompt = False
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # jinja, key and value errors of a user's messages: all are the request's fault
            raise RequestError("messages", f"the chat template refuses them: {error}") from error
        return str(text)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.hf, "chat_template", None))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, also where they are no complete UTF-8. b"" for ids without a token.

        Joined over the ids of a text they give its bytes (sentencepiece: with the space it puts in front).
        """
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._token_bytes(token_id)
            if 0 <= token_id < self.vocab_size:
                self._known_bytes[token_id] = known
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.hf.convert_ids_to_tokens(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._style == "byte_level":
            return b"".join(_BYTE_OF_CHAR[c] if c in _BYTE_OF_CHAR else c.encode() for c in token)
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match.group(1), 16)])
        return token.replace(_SPACE_MARK, " ").encode() if self._style == "sentencepiece" else token.encode()

    @cached_property
    def all_token_bytes(self) -> list[bytes]:
        """token_bytes of every id below vocab_size."""
        return [self.token_bytes(i) for i in range(self.vocab_size)]


def _byte_style(decoder: Any) -> str:
    """ "byte_level", "sentencepiece" (space mark and <0xNN> tokens) or "plain", read from the tokenizer's decoder."""
    if decoder is None:
        return "plain"
    state = json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return "byte_level"
    marks = [part for part in parts if part.get("type") in ("Metaspace", "Replace")]
    return "sentencepiece" if marks or "ByteFallback" in kinds else "plain"


def _byte_of_char() -> dict[str, bytes]:
    """GPT-2's byte alphabet, inverted: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    chars = {chr(b): bytes([b]) for b in printable}
    return chars | {chr(0x100 + i): bytes([b]) for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
