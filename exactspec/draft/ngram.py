"""Prompt lookup: propose what followed the last time the newest few tokens occurred in the same request.

The idea is prompt lookup decoding (Saxena 2023): no draft model, the request's own tokens are the model. It pays off
where text repeats (quotes, code edits, loops) and costs next to nothing elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exactspec.draft.base import DraftBatch, Drafter
from exactspec.errors import ConfigError
from exactspec.types import ForwardBatch, Proposal, RunningRequest


class _NgramIndex:
    """Where each n-gram of one growing token list ended last, occurrences at the very end excluded.

    `extend` looks only at tokens that came since its last call: a round costs O(new tokens), not O(length).
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.sizes = range(max_n, min_n - 1, -1)
        self.last_end: dict[tuple[int, ...], int] = {}
        self.num_indexed = 0  # n-grams that end before this index are in the table

    def extend(self, tokens: list[int]) -> None:
        """Index every n-gram that ends before the last token (the last one has no continuation yet)."""
        for end in range(self.num_indexed, len(tokens) - 1):
            for n in self.sizes:
                if end + 1 >= n:
                    self.last_end[tuple(tokens[end + 1 - n : end + 1])] = end
        self.num_indexed = max(self.num_indexed, len(tokens) - 1)

    def find(self, tokens: list[int]) -> int | None:
        """Index of the token after the most recent earlier occurrence of the longest known suffix, or None."""
        for n in self.sizes:
            if len(tokens) > n:
                end = self.last_end.get(tuple(tokens[-n:]))
                if end is not None:
                    return end + 1
        return None


class NgramDrafter(Drafter):
    """Longest suffix n-gram (max_n down to min_n), most recent earlier match, its continuation as the draft.

    A continuation that runs into the end of the text goes on into the draft itself (as LZ77 copies overlap), so a
    short cycle fills the whole block. Proposals are one-hot: `Proposal.probs` stays None.
    """

    def __init__(self, gamma: int = 7, max_n: int = 3, min_n: int = 1) -> None:
        """Raises ConfigError unless gamma >= 1 and 1 <= min_n <= max_n."""
        if gamma < 1:
            raise ConfigError(f"gamma: must be at least 1 for the n-gram drafter, got {gamma}")
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"min_n, max_n: need 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self.gamma = gamma
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[str, _NgramIndex] = {}

    def observe(self, batch: ForwardBatch, captured: Tensor | None) -> None:
        return None

    def propose(self, batch: DraftBatch) -> Proposal:
        drafts = [self._draft(request) for request in batch.requests]
        rows = [draft + [0] * (self.gamma - len(draft)) for draft in drafts]
        token_ids = torch.tensor(rows, dtype=torch.int64).reshape(len(drafts), self.gamma)
        return Proposal(token_ids.to(batch.anchor_ids.device), [len(draft) for draft in drafts])

    def forget(self, request: RunningRequest) -> None:
        self._indexes.pop(request.request.request_id, None)

    def _draft(self, request: RunningRequest) -> list[int]:
        wanted = min(self.gamma, request.draft_room)
        if wanted == 0:
            return []
        tokens = request.token_ids
        request_id = request.request.request_id
        index = self._indexes.get(request_id)
        if index is None or index.num_indexed > len(tokens):  # new, or an id that was used before without `forget`
            index = self._indexes[request_id] = _NgramIndex(self._min_n, self._max_n)
        index.extend(tokens)
        start = index.find(tokens)
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + j % period] for j in range(wanted)]
