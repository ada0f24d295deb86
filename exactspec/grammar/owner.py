"""The grammar state of one request: masks along a draft block, committed tokens, the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactspec.grammar.utf8 import CharacterGuard

TIMEOUT_S = 0.5  # processor time of one call; only grammars of exploding ambiguity come near


class MaskOwner:
    """Walks one matcher over committed and drafted tokens.

    The matcher stands at the committed output plus `ahead`, a run of draft tokens it has been walked along; asking
    for another run steps back to where the two part. A finished matcher (EOS accepted) is never asked anything, only
    stepped back. The mask of each position is computed once and kept until its position is stepped over.
    `name` is the request's field, for messages.
    """

    def __init__(
        self,
        compiled: Any,
        vocab_size: int,
        eos_ids: Iterable[int],
        name: str = "grammar",
        guard: CharacterGuard | None = None,
    ) -> None:
        import xgrammar

        self._name = name
        self._guard = guard
        self._last: int | None = None  # the newest committed token
        self._slowest = 0.0  # seconds of the slowest call
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocab_size = vocab_size
        self._eos_ids = sorted(i for i in eos_ids if i < vocab_size)
        self._bits = torch.zeros(xgrammar.get_bitmask_shape(1, vocab_size), dtype=torch.int32)
        self._ahead: list[int] = []
        self._masks: list[Tensor] = []  # masks[j]: after ahead[:j]; filled on demand
        self.terminated = False
        """The grammar is complete and its EOS committed (or a token was committed that it does not know)."""

    @property
    def overrun(self) -> str | None:
        """Why the request must be aborted: following its grammar holds up everybody's steps. None if it does not."""
        if self._slowest <= TIMEOUT_S:
            return None
        return f"{self._name}: following it took {self._slowest:.2f} s in one step; at most {TIMEOUT_S:g} s are allowed"

    @property
    def can_start(self) -> bool:
        """Some token is allowed at the very beginning."""
        return bool(self._raw_mask().any())

    @property
    def completed(self) -> bool:
        """The committed output is a whole match, so EOS is allowed."""
        self._step_back_to(0)
        return self.terminated or bool(self._matcher.is_completed())

    def masks(self, draft_tokens: Sequence[int]) -> Tensor:
        """bool [len(draft_tokens) + 1, V] on the CPU, True = allowed: row j stands after the drafts before j.

        Rows after a draft that the grammar forbids, or after its end, cannot be reached: they allow everything and
        EOS alone. Every row allows something.
        """
        return torch.stack(self._rows(draft_tokens))

    def mask_after(self, prefix: Sequence[int]) -> Tensor:
        """bool [V] for the position after these draft tokens; do not write to it."""
        return self._rows(prefix)[-1]

    def _rows(self, drafts: Sequence[int]) -> list[Tensor]:
        if self.terminated:
            return [self._eos_only()] * (len(drafts) + 1)
        began = time.thread_time()
        rows = self._compute_rows(drafts)
        self._slowest = max(self._slowest, time.thread_time() - began)
        return rows

    def _compute_rows(self, drafts: Sequence[int]) -> list[Tensor]:
        self._walk(drafts)
        over = bool(self._matcher.is_terminated())
        if not over:
            self._mask_here()
        rows = self._masks[: len(self._ahead) + 1]
        missing = len(drafts) + 1 - len(rows)
        beyond = self._eos_only() if over else torch.ones(self._vocab_size, dtype=torch.bool)
        return rows + [beyond] * missing

    def advance(self, tokens: Iterable[int]) -> None:
        """Commits tokens. Nothing after the end is looked at."""
        began = time.thread_time()
        self._commit(tokens)
        self._slowest = max(self._slowest, time.thread_time() - began)

    def _commit(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self.terminated:
                return
            self._last = token
            if self._ahead and self._ahead[0] == token:
                del self._ahead[0], self._masks[:1]
                self.terminated = not self._ahead and bool(self._matcher.is_terminated())
                continue
            self._step_back_to(0)
            self._masks.clear()
            # a token that the grammar forbids cannot come from a masked draw; should it come all the same, the
            # output ends here rather than go on outside the grammar
            self.terminated = not self._accept(token) or bool(self._matcher.is_terminated())

    def _walk(self, drafts: Sequence[int]) -> None:
        """Moves the matcher along `drafts`, as far as the grammar allows; `ahead` then holds that part."""
        common = 0
        for drafted, walked in zip(drafts, self._ahead, strict=False):
            if drafted != walked:
                break
            common += 1
        self._step_back_to(common)
        for token in drafts[common:]:
            if self._matcher.is_terminated() or not self._allows(token) or not self._accept(token):
                return
            self._ahead.append(token)

    def _step_back_to(self, length: int) -> None:
        if len(self._ahead) > length:
            self._matcher.rollback(len(self._ahead) - length)
            del self._ahead[length:]
        del self._masks[length + 1 :]

    def _allows(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and bool(self._mask_here()[token])

    def _accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def _mask_here(self) -> Tensor:
        """The mask at the matcher's own position, which must not be past the end."""
        at = len(self._ahead)
        if at < len(self._masks):
            return self._masks[at]
        mask = self._raw_mask()
        if self._guard is not None:
            mask = self._guard.restrict(mask, self._ahead[-1] if self._ahead else self._last)
        if not mask.any():  # a dead end: the grammar wants a byte sequence that no token gives
            mask = self._eos_only()
        if at == len(self._masks):
            self._masks.append(mask)
        return mask

    def _raw_mask(self) -> Tensor:
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")
        return torch.from_numpy(bits[: self._vocab_size].astype(np.bool_))

    def _eos_only(self) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[self._eos_ids] = True
        return mask
