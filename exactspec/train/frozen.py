"""The target while a draft is trained: frozen weights, a dense forward over padded sequences and a one-token step.

Speed over bits: this forward is not the exact one that serving uses. It runs in the weights' dtype throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from exactspec.backend.base import LayerWeights
from exactspec.errors import ConfigError
from exactspec.train.ops import operators

if TYPE_CHECKING:
    from exactspec.model.weights import LoadedTarget


@dataclass
class StaticCache:
    """K/V of generation: k, v [layers, S, kv_heads, L, D]."""

    k: Tensor
    v: Tensor


class FrozenTarget:
    """A LoadedTarget on a device. `dtype` None keeps the weights' own."""

    def __init__(self, loaded: LoadedTarget, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.config = loaded.config
        self.spec = loaded.config.stack_spec()
        self.device = device
        self.dtype = dtype or loaded.dtype
        self.ops = operators(device)
        weights = loaded.weights
        self.embed = weights.embed.to(device, self.dtype)
        tied = weights.lm_head is weights.embed
        self.lm_head = self.embed if tied else weights.lm_head.to(device, self.dtype)
        self.final_norm = weights.final_norm.to(device, self.dtype)
        self.layers = [self._place(layer) for layer in weights.layers]
        self.ropes = loaded.config.rope_tables(device)

    def _place(self, layer: LayerWeights) -> LayerWeights:
        given = {f.name: getattr(layer, f.name) for f in fields(layer)}
        return replace(layer, **{n: t.to(self.device, self.dtype) for n, t in given.items() if t is not None})

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (weight.shape[0],), weight, self.spec.rms_eps)

    def _qkv(self, index: int, normed: Tensor, positions: Tensor) -> Tensor:
        """Input-normed rows [M, H] -> rotated q, k and v side by side [M, (heads + 2 kv_heads) * D]."""
        layer, spec = self.layers[index], self.spec
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        split = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(qkv[:, : split[0]].unflatten(1, (-1, spec.head_dim)), layer.q_norm).flatten(1)
            k = self._norm(qkv[:, split[0] : sum(split)].unflatten(1, (-1, spec.head_dim)), layer.k_norm).flatten(1)
            qkv = torch.cat([q, k, qkv[:, sum(split) :]], dim=1)
        rope = self.ropes[spec.rope_index[index]]
        self.ops.rope_(qkv, spec.num_heads + spec.num_kv_heads, spec.head_dim, positions, rope.cos, rope.sin)
        return qkv

    def _start(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding rows [M, H], and the same under the first layer's norm."""
        return self.ops.add_norm(self.embed_rows(token_ids), None, self.layers[0].input_norm, self.spec.rms_eps)

    def _finish(self, index: int, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output [M, heads * D] -> the layer's output [M, H], and the same under the norm that follows."""
        layer, eps = self.layers[index], self.spec.rms_eps
        branch = F.linear(attended, layer.o, layer.o_bias)
        if layer.post_attention_norm is not None:
            branch = self._norm(branch, layer.post_attention_norm)
        x, normed = self.ops.add_norm(x, branch, layer.mlp_norm, eps)
        branch = F.linear(
            self._activate(F.linear(normed, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias
        )
        if layer.post_mlp_norm is not None:
            branch = self._norm(branch, layer.post_mlp_norm)
        is_last = index + 1 == self.spec.num_layers
        return self.ops.add_norm(x, branch, self.final_norm if is_last else self.layers[index + 1].input_norm, eps)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.spec.activation == "silu":
            return self.ops.silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def embed_rows(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] int64 -> embeddings [..., H], scaled where the family does so."""
        rows = F.embedding(token_ids, self.embed)
        return rows if self.config.embed_scale == 1.0 else rows * self.config.embed_scale

    @torch.no_grad()
    def forward(self, token_ids: Tensor, capture: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Padded sequences [B, L] (padding at the right) -> (features [B, L, len(capture) * H], the outputs of
        those layers side by side; hidden [B, L, H] after the final norm)."""
        batch, length = token_ids.shape
        spec = self.spec
        positions = torch.arange(length, device=token_ids.device, dtype=torch.int32).repeat(batch)
        x, normed = self._start(token_ids.reshape(-1))
        features = x.new_empty(batch * length, len(capture) * spec.hidden_size)
        for index in range(spec.num_layers):
            attended = self._attend(self._qkv(index, normed, positions), batch, length, spec.windows[index])
            x, normed = self._finish(index, x, attended)
            if index in capture:
                at = list(capture).index(index) * spec.hidden_size
                features[:, at : at + spec.hidden_size] = x
        return features.view(batch, length, -1), normed.view(batch, length, -1)

    def _attend(self, qkv: Tensor, batch: int, length: int, window: int | None) -> Tensor:
        spec = self.spec
        heads = qkv.view(batch, length, -1, spec.head_dim).transpose(1, 2)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        mask = None
        if window is not None and window < length:
            at = torch.arange(length, device=qkv.device)
            mask = (at[:, None] >= at[None]) & (at[:, None] - at[None] < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.attention_scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(batch * length, -1)

    @torch.no_grad()
    def prefill(self, token_ids: Tensor, slots: Tensor, cache: StaticCache) -> None:
        """Writes K/V of whole prompts [B, L] (padding at the right) to the first L places of `slots` [B]."""
        batch, length = token_ids.shape
        spec = self.spec
        positions = torch.arange(length, device=token_ids.device, dtype=torch.int32).repeat(batch)
        x, normed = self._start(token_ids.reshape(-1))
        for index in range(spec.num_layers):
            qkv = self._qkv(index, normed, positions)
            heads = qkv.view(batch, length, -1, spec.head_dim)[:, :, spec.num_heads :].transpose(1, 2)
            cache.k[index][slots, :, :length], cache.v[index][slots, :, :length] = heads.chunk(2, dim=1)
            if index + 1 < spec.num_layers:
                attended = self._attend(qkv, batch, length, spec.windows[index])
                x, normed = self._finish(index, x, attended)

    def make_cache(self, slots: int, length: int) -> StaticCache:
        shape = (self.spec.num_layers, slots, self.spec.num_kv_heads, length, self.spec.head_dim)
        try:
            k = torch.zeros(shape, device=self.device, dtype=self.dtype)
            return StaticCache(k, torch.zeros_like(k))
        except RuntimeError as error:  # of a CPU's allocator; torch.OutOfMemoryError of a device is one, too
            raise ConfigError(
                f"memory_tokens: a cache of {slots} slots of {length} tokens does not fit the memory of {self.device}: "
                "set a lower one"
            ) from error

    @torch.no_grad()
    def step(self, token_ids: Tensor, positions: Tensor, lengths: Tensor, cache: StaticCache) -> Tensor:
        """One token a slot: token_ids, positions [S] int32 and lengths [S] (keys to see, this one included; 0: the
        slot is idle) -> logits [S, V]. Sliding windows are not applied: the generator refuses longer slots."""
        x, normed = self._start(token_ids.long())
        heads, scale = self.spec.num_heads, self.spec.attention_scale
        for index in range(self.spec.num_layers):
            qkv = self._qkv(index, normed, positions)
            k, v = cache.k[index], cache.v[index]
            self.ops.write_cache(qkv, k, v, positions, heads)
            x, normed = self._finish(index, x, self.ops.decode_attention(qkv, k, v, lengths, heads, scale))
        return F.linear(normed, self.lm_head)
