"""No grammar lets out bytes that are no characters: what the compiler takes for one is not always one.

Its masks know how many bytes follow a first one, not which: overlong forms (E0 80 80) and surrogates (ED A0 80) pass.
They would be shown as several U+FFFD, and a string of at most three characters could have five. (RFC 3629, section 4.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

WRONG_SECOND = {0xE0: range(0x80, 0xA0), 0xED: range(0xA0, 0xC0), 0xF0: range(0x80, 0x90), 0xF4: range(0x90, 0xC0)}
_WRONG = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]")


class CharacterGuard:
    """Which tokens of one vocabulary may not follow which. `vocabulary` holds each token's bytes."""

    def __init__(self, vocabulary: Sequence[bytes], width: int) -> None:
        self._leads = {i: data[-1] for i, data in enumerate(vocabulary) if data and data[-1] in WRONG_SECOND}
        self._fine = {lead: torch.ones(width, dtype=torch.bool) for lead in WRONG_SECOND}
        broken = [i for i, data in enumerate(vocabulary) if _WRONG.search(data)]
        self._whole = torch.ones(width, dtype=torch.bool) if broken else None
        if self._whole is not None:
            self._whole[broken] = False
        for i, data in enumerate(vocabulary):
            for lead, seconds in WRONG_SECOND.items() if data and 0x80 <= data[0] < 0xC0 else ():
                if data[0] in seconds:
                    self._fine[lead][i] = False

    def restrict(self, mask: Tensor, last: int | None) -> Tensor:
        """The mask (bool [V]) after the token `last` without what makes no character."""
        lead = self._leads.get(last) if last is not None else None
        if lead is not None:
            mask = mask & self._fine[lead]
        return mask if self._whole is None else mask & self._whole
