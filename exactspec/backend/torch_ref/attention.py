"""Attention over paged K/V whose bits do not depend on the batch: fixed row tiles, fixed key blocks from key 0.

Online softmax (Milakov & Gimelshein 2018) over blocks of 64 keys in order. A block that a row may not see at all
leaves the row's state as it was, bit for bit, so it does not matter which other rows share the tile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import StackSpec
from exactspec.backend.torch_ref.ops import pad_columns
from exactspec.types import ForwardBatch

ROW_TILE = 16
KEY_BLOCK = 64


def request_slots(batch: ForwardBatch) -> list[Tensor]:
    """For each request the slots of its keys 0 .. kv_len - 1, int64 [kv_len]."""
    slots = []
    offsets = torch.arange(batch.page_size, device=batch.page_table.device)
    for pages, kv_len in zip(batch.page_table, batch.kv_len.tolist(), strict=True):
        used = pages[: -(-kv_len // batch.page_size)].long()
        slots.append((used[:, None] * batch.page_size + offsets).flatten()[:kv_len])
    return slots


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: ForwardBatch,
    slots: list[Tensor],
    spec: StackSpec,
    window: int | None,
    exact: bool = True,
) -> Tensor:
    """q [T, heads, D] float32; k, v [slots, kv_heads, D] of one layer -> [T, heads * D] float32."""
    starts = batch.q_start.tolist()
    outputs = []
    for r, of_request in enumerate(slots):
        rows = slice(starts[r], starts[r + 1])
        keys, values = k[of_request].float(), v[of_request].float()
        positions = batch.positions[rows].long()
        one = _exact_request if exact else _sdpa_request
        outputs.append(one(q[rows], keys, values, positions, spec, window, batch.causal))
    return torch.cat(outputs).flatten(1)


def _visible(positions: Tensor, keys: Tensor, kv_len: int, window: int | None, causal: bool) -> Tensor:
    """bool [rows, keys]: which key positions a row attends to."""
    mask = (keys < kv_len).expand(positions.shape[0], -1)
    if causal:
        mask = mask & (keys <= positions[:, None])
    if window is not None:
        mask = mask & (keys > positions[:, None] - window)
    return mask


def _exact_request(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spec: StackSpec, window: int | None, causal: bool
) -> Tensor:
    kv_len, head_dim = keys.shape[0], q.shape[-1]
    padding = -kv_len % KEY_BLOCK
    q, keys, values = pad_columns(q), pad_columns(keys), pad_columns(values)
    keys = F.pad(keys, (0, 0, 0, 0, 0, padding))
    values = F.pad(values, (0, 0, 0, 0, 0, padding))
    outputs = []
    for start in range(0, q.shape[0], ROW_TILE):
        rows = min(ROW_TILE, q.shape[0] - start)
        tile = F.pad(q[start : start + rows], (0, 0, 0, 0, 0, ROW_TILE - rows))
        # padding rows repeat the last row's position: they see keys, so no 0 / 0 arises
        where = torch.cat([positions[start : start + rows], positions[start + rows - 1].expand(ROW_TILE - rows)])
        outputs.append(_exact_tile(tile, keys, values, where, kv_len, spec, window, causal)[:rows])
    return torch.cat(outputs)[..., :head_dim]


def _exact_tile(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    kv_len: int,
    spec: StackSpec,
    window: int | None,
    causal: bool,
) -> Tensor:
    """q [ROW_TILE, heads, D] -> the same shape. Keys and values padded to whole blocks."""
    kv_heads, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    queries = q.view(ROW_TILE, kv_heads, group, -1).permute(1, 0, 2, 3).reshape(kv_heads, ROW_TILE * group, -1)
    best = queries.new_full((kv_heads, ROW_TILE * group, 1), float("-inf"))
    total = torch.zeros_like(best)
    out = torch.zeros_like(queries)
    for start in _blocks(positions, kv_len, window, causal):
        block = slice(start, start + KEY_BLOCK)
        key_positions = torch.arange(start, start + KEY_BLOCK, device=q.device)
        mask = _visible(positions, key_positions, kv_len, window, causal).repeat_interleave(group, 0)
        scores = torch.matmul(queries, keys[block].permute(1, 2, 0)) * spec.attention_scale
        scores = scores.masked_fill(~mask, float("-inf"))
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        finite = new_best.masked_fill(new_best == float("-inf"), 0.0)  # nothing seen yet: exp(-inf - 0) = 0
        weights = torch.exp(scores - finite)
        decay = torch.exp(best - finite)
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + torch.matmul(weights, values[block].permute(1, 0, 2))
        best = new_best
    out = out / total
    return out.view(kv_heads, ROW_TILE, group, -1).permute(1, 0, 2, 3).reshape(ROW_TILE, spec.num_heads, -1)


def _blocks(positions: Tensor, kv_len: int, window: int | None, causal: bool) -> range:
    """First keys of the blocks that any row of the tile sees. Skipping the others changes no bit."""
    low, high = positions.min().item(), positions.max().item()
    end = min(kv_len, int(high) + 1) if causal else kv_len
    first = 0 if window is None else max(0, int(low) - window + 1) // KEY_BLOCK * KEY_BLOCK
    return range(first, end, KEY_BLOCK)


def _sdpa_request(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, spec: StackSpec, window: int | None, causal: bool
) -> Tensor:
    """The fast mode: torch's SDPA, whose bits depend on the number of rows."""
    kv_len = keys.shape[0]
    mask = _visible(positions, torch.arange(kv_len, device=q.device), kv_len, window, causal)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=mask, scale=spec.attention_scale, enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)
