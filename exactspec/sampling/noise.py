"""Randomness: noise streams, and the noise rows that draft and verify share.

All randomness is counter-based. The Gumbel noise of a token is a pure function of (seed, output position, stream,
token id), so a draw can be repeated at any time, in any batch, on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from exactspec.backend.base import Backend

CACHE_BYTES = 48 << 20
LEAST_CACHE_ROWS = 16


class NoiseStream(IntEnum):
    """Independent noise at one (seed, position).

    TARGET is shared by draft and target under coupled acceptance: that is the coupling. Rejection acceptance needs
    its draft, its coins and its residual draws to be independent of each other and of the bonus draw (TARGET).
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


_ROUND = -7046029254386353131  # odd, its bits well mixed


def round_seed(seed: int, first_position: int) -> int:
    """The seed of a round's own draft noise (stream DRAFT), for a round whose first draft has this output position.

    A position may be drafted again in a later round, and whether that is worth it may have been judged by the drafts
    thrown away: noise of its own keeps the new draft independent of that judgement.
    """
    mixed = (first_position * _ROUND) & (2**64 - 1)
    return seed ^ (mixed - 2**64 if mixed >= 2**63 else mixed)


def round_seeds(seeds: Tensor, first_positions: Tensor) -> Tensor:
    """`round_seed` of int64 tensors (products wrap around)."""
    return seeds ^ (first_positions * _ROUND)


def _as_ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(v) for v in values.tolist()] if isinstance(values, Tensor) else list(values)


class NoiseCache:
    """The newest Gumbel noise rows, so that the rows a drafter drew with are not made again for the verify draw.

    Holds `capacity` rows of [vocab_size] float32 in one buffer that never grows. Entries at and beyond `valid_vocab`
    are -inf: a padded id can never win an argmax.
    """

    def __init__(
        self, backend: Backend, vocab_size: int, valid_vocab: int | None = None, capacity: int | None = None
    ) -> None:
        """`capacity` rows, by default as many as CACHE_BYTES hold."""
        self._backend = backend
        self._valid = vocab_size if valid_vocab is None else valid_vocab
        self._vocab_size = vocab_size
        self.capacity = capacity or max(LEAST_CACHE_ROWS, CACHE_BYTES // (4 * vocab_size))
        self._buffer: Tensor | None = None
        self._keys: list[tuple[int, int, int] | None] = [None] * self.capacity
        self._slots: dict[tuple[int, int, int], int] = {}
        self._cursor = 0

    def rows(
        self,
        seeds: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        stream: NoiseStream = NoiseStream.TARGET,
    ) -> Tensor:
        """Noise [N, vocab_size] float32 for pairs of seed and output position.

        Read-only, and valid until the next call only: it may be a view of the buffer.
        """
        keys = [(s, p, int(stream)) for s, p in zip(_as_ints(seeds), _as_ints(positions), strict=True)]
        wanted = set(keys)
        if not keys or len(wanted) > self.capacity:
            return self._make(keys)
        buffer = self._store([key for key in dict.fromkeys(keys) if key not in self._slots], wanted)
        slots = [self._slots[key] for key in keys]
        if slots == list(range(slots[0], slots[0] + len(slots))):
            return buffer.narrow(0, slots[0], len(slots))
        return buffer.index_select(0, torch.tensor(slots, device=self._backend.device))

    def _store(self, missing: list[tuple[int, int, int]], wanted: set[tuple[int, int, int]]) -> Tensor:
        """Makes the missing rows and puts them over the oldest rows that this call does not want; the buffer."""
        if self._buffer is None:
            self._buffer = torch.empty((self.capacity, self._vocab_size), device=self._backend.device)
        if not missing:
            return self._buffer
        made = self._make(missing)
        taken = {self._slots[key] for key in wanted if key in self._slots}
        slots = []
        for _ in missing:
            while self._cursor in taken:
                self._cursor = (self._cursor + 1) % self.capacity
            taken.add(self._cursor)
            slots.append(self._cursor)
        for slot in slots:
            old, self._keys[slot] = self._keys[slot], None
            if old is not None:
                del self._slots[old]
        self._buffer.index_copy_(0, torch.tensor(slots, device=self._backend.device), made)
        for key, slot in zip(missing, slots, strict=True):  # promised once it is written: all this may be cut short
            self._keys[slot], self._slots[key] = key, slot
        return self._buffer

    def _make(self, keys: list[tuple[int, int, int]]) -> Tensor:
        device = self._backend.device
        seeds = torch.tensor([key[0] for key in keys], dtype=torch.int64, device=device)
        positions = torch.tensor([key[1] for key in keys], dtype=torch.int64, device=device)
        stream = keys[0][2] if keys else 0
        noise = self._backend.gumbel(seeds, positions, stream, self._valid)
        if self._valid == self._vocab_size:
            return noise
        padded = noise.new_full((len(keys), self._vocab_size), float("-inf"))
        padded[:, : self._valid] = noise
        return padded
