"""From a step's plan to one ragged ForwardBatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from exactspec.types import ForwardBatch, RunningRequest


@dataclass(slots=True)
class Block:
    """The rows of one request in a step: a prefill chunk, or an anchor followed by the drafts to verify.

    Rows stand at positions start .. start + len(token_ids) - 1. The last `num_sampled` rows are sampled: none
    (chunk that ends
    inside the prompt), one (last chunk of a prompt), or all (anchor and drafts).
    """

    request: RunningRequest
    start: int
    token_ids: Sequence[int]
    num_sampled: int
    drafts: list[int] = field(default_factory=list)
    num_drafted: int = 0  # drafts proposed, verified or not
    is_prefill: bool = False
    first_row: int = 0  # set by build_batch

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_rows(self) -> range:
        """Row numbers in the batch whose logits are drawn from."""
        end = self.first_row + self.num_rows
        return range(end - self.num_sampled, end)


def page_rows(requests: Sequence[RunningRequest]) -> np.ndarray:
    """Page ids of the requests, int32 [R, longest], unused entries 0."""
    width = max((len(request.pages) for request in requests), default=1)
    table = np.zeros((len(requests), max(width, 1)), dtype=np.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.pages)] = request.pages
    return table


def build_batch(blocks: Sequence[Block], page_size: int, device: torch.device) -> ForwardBatch:
    """Lays the blocks end to end and notes in each where its rows begin."""
    table = page_rows([block.request for block in blocks])
    positions, slots, starts = [], [], [0]
    logit_rows: list[int] = []
    for number, block in enumerate(blocks):
        block.first_row = starts[-1]
        at = np.arange(block.start, block.start + block.num_rows, dtype=np.int32)
        positions.append(at)
        slots.append(table[number, at // page_size] * page_size + at % page_size)
        starts.append(block.first_row + block.num_rows)
        logit_rows.extend(block.sampled_rows)
    kv_len = [block.start + block.num_rows for block in blocks]
    token_ids = [token_id for block in blocks for token_id in block.token_ids]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        q_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(kv_len, dtype=torch.int32, device=device),
        page_table=torch.from_numpy(table).to(device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        page_size=page_size,
        max_kv_len=max(kv_len),
        max_q_len=max(block.num_rows for block in blocks),
    )
