"""From padded sequences to draft blocks: anchors, what each row must predict, and what it may look at."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from exactspec.draft.block_model import Attend, block_attention_mask
from exactspec.train.data import Batch


@dataclass
class BlockBatch:
    """Sequences with anchors, and the N rows that predict something, flat. All int64 unless said.

    An anchor is the newest known token of a draft round: its block sees the context strictly before it and must
    predict the gamma tokens after it (fewer at a sequence's end). Sequences with few answer tokens have spare anchors,
    which no row refers to.
    """

    token_ids: Tensor  # [B, L]
    anchors: Tensor  # [B, A] positions
    block: Tensor  # [N] which of the B * A blocks
    step: Tensor  # [N] draft position k - 1, 0 .. gamma - 1
    label: Tensor  # [N] the token after the row's prefix
    previous: Tensor  # [N] the token before it (the anchor for k = 1)
    target_row: Tensor  # [N] which of the B * L target rows predicts the label
    weight: Tensor  # [N] float32, sums to 1
    noise_seed: Tensor  # [1] of the noise of a coupled loss

    def to(self, device: torch.device) -> BlockBatch:
        if device.type == "cpu":
            return self
        return BlockBatch(*(getattr(self, f.name).pin_memory().to(device, non_blocking=True) for f in fields(self)))

    @property
    def num_blocks(self) -> int:
        return self.anchors.numel()


def make_blocks(batch: Batch, num_anchors: int, gamma: int, loss_decay: float, rng: np.random.Generator) -> BlockBatch:
    """Draws up to `num_anchors` distinct anchors a sequence among answer tokens that have a successor."""
    token_ids = batch.token_ids.numpy()
    lengths, prompt_len = batch.lengths.numpy(), batch.prompt_len.numpy()
    batch_size, width = token_ids.shape
    at = np.arange(width)
    allowed = (at >= np.maximum(prompt_len, 1)[:, None]) & (at < lengths[:, None] - 1)
    keys = np.where(allowed, rng.random((batch_size, width)), 2.0)
    num_anchors = min(num_anchors, width)
    picked = np.sort(np.argpartition(keys, num_anchors - 1, axis=1)[:, :num_anchors], axis=1)
    used = np.take_along_axis(allowed, picked, axis=1)
    anchors = np.where(used, picked, 1)
    goals = anchors[:, :, None] + np.arange(1, gamma + 1)  # [B, A, G] positions to predict
    valid = used[:, :, None] & (goals < lengths[:, None, None])
    sequence, anchor, step = np.nonzero(valid)
    goal = goals[valid]
    weight = np.exp(-step / loss_decay).astype(np.float32)
    total = max(float(weight.sum()), 1e-9)
    return BlockBatch(
        token_ids=batch.token_ids,
        anchors=torch.from_numpy(anchors),
        block=torch.from_numpy(sequence * num_anchors + anchor),
        step=torch.from_numpy(step),
        label=torch.from_numpy(token_ids[sequence, goal]),
        previous=torch.from_numpy(token_ids[sequence, goal - 1]),
        target_row=torch.from_numpy(sequence * width + goal - 1),
        weight=torch.from_numpy(weight / total),
        noise_seed=torch.from_numpy(rng.integers(0, 2**31, 1)),
    )


def block_input_ids(blocks: BlockBatch, mask_token_id: int, num_rows: int) -> Tensor:
    """[anchor, mask, mask, ...] of every block: [B, A, num_rows] int64."""
    ids = blocks.anchors.new_full((*blocks.anchors.shape, num_rows), mask_token_id)
    ids[..., 0] = blocks.token_ids.gather(1, blocks.anchors)
    return ids


def block_attend(blocks: BlockBatch, num_rows: int, dtype: torch.dtype) -> Attend | Tensor:
    """The attention of all blocks at once: a boolean mask, or on CUDA a callable around one additive mask."""
    positions = context_positions(blocks)
    mask = block_attention_mask(blocks.anchors, positions, num_rows)
    if not mask.is_cuda:
        return mask
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf).unsqueeze(1)
    return _cuda_attention(bias)


def _cuda_attention(bias: Tensor) -> Attend:
    """The memory-efficient kernel: it takes any mask and no shape needs a new plan; it lacks grouped heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        q, k = q.to(v.dtype), k.to(v.dtype)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(-1, q.shape[1], -1, -1))

    return attend


def context_positions(blocks: BlockBatch) -> Tensor:
    """[B, L]: padding stands after every anchor of its sequence, so no block sees it."""
    batch, width = blocks.token_ids.shape
    return torch.arange(width, device=blocks.token_ids.device).expand(batch, width)


class Prefetcher:
    """Runs `make` for successive items in a thread, a few ahead. Errors of the thread surface in `__next__`."""

    def __init__(
        self, items: Iterator[list[int]], make: Callable[[int, list[int]], BlockBatch], start: int, ahead: int = 4
    ):
        self._queue: queue.Queue[BlockBatch | BaseException] = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(items, make, start), daemon=True)
        self._thread.start()

    def _work(self, items: Iterator[list[int]], make: Callable[[int, list[int]], BlockBatch], start: int) -> None:
        try:
            for step, item in enumerate(items, start=start):
                self._put(make(step, item))
                if self._stopped.is_set():
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: BlockBatch | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def __next__(self) -> BlockBatch:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)
