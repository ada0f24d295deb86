"""Small random stacks, ragged batches over paged K/V, and the slow obvious truth the CPU backend is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.types import ForwardBatch


def make_spec(**changes: Any) -> StackSpec:
    base: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_eps": 1e-5,
        "activation": "silu",
    }
    base |= changes
    layers = base["num_layers"]
    base.setdefault("attention_scale", base["head_dim"] ** -0.5)
    base.setdefault("windows", (None,) * layers)
    base.setdefault("rope_index", (0,) * layers)
    return StackSpec(**base)


def make_layers(
    spec: StackSpec, dtype: torch.dtype = torch.float32, seed: int = 0, *, biases: bool = False,
    qk_norm: bool = False, post_norms: bool = False,
) -> list[LayerWeights]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    h, i, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads

    def linear(out: int, width: int) -> Tensor:
        return (torch.randn(out, width, generator=g) * width**-0.5).to(dtype)

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=g)

    def layer() -> LayerWeights:
        w = LayerWeights(
            norm(h), linear(heads * d, h), linear(h, spec.num_heads * d), norm(h), linear(2 * i, h), linear(h, i)
        )
        if biases:
            w = replace(w, qkv_bias=norm(heads * d), o_bias=norm(h), gate_up_bias=norm(2 * i), down_bias=norm(h))
        if qk_norm:
            w = replace(w, q_norm=norm(d), k_norm=norm(d))
        if post_norms:
            w = replace(w, post_attention_norm=norm(h), post_mlp_norm=norm(h))
        return w

    return [layer() for _ in range(spec.num_layers)]


def make_rope(spec: StackSpec, positions: int = 512, theta: float = 10000.0, rotary: int | None = None) -> RopeTable:
    rotary = rotary or spec.head_dim
    frequency = theta ** (-torch.arange(0, rotary, 2).float() / rotary)
    angle = torch.arange(positions).float()[:, None] * frequency
    return RopeTable(angle.cos(), angle.sin())


@dataclass
class Pages:
    """Page tables of R requests over one pool, in a shuffled order unless `seed` is None."""

    page_size: int = 16
    num_requests: int = 1
    capacity: int = 256  # tokens per request
    seed: int | None = 0
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        per = -(-self.capacity // self.page_size)
        count = per * self.num_requests
        g = torch.Generator().manual_seed(self.seed or 0)
        order = torch.arange(count) if self.seed is None else torch.randperm(count, generator=g)
        self.table = order.reshape(self.num_requests, per).to(torch.int32)

    @property
    def num_slots(self) -> int:
        return self.table.numel() * self.page_size

    def slots(self, request: int, positions: Tensor) -> Tensor:
        return (self.table[request][positions // self.page_size] * self.page_size + positions % self.page_size).int()

    def batch(self, chunks: list[tuple[int, int, int]], causal: bool = True) -> ForwardBatch:
        """chunks: (request, first position, rows)."""
        positions = [torch.arange(start, start + n) for _, start, n in chunks]
        slots = [self.slots(r, p) for (r, _, _), p in zip(chunks, positions, strict=True)]
        starts = torch.tensor([0, *(n for _, _, n in chunks)]).cumsum(0).int()
        return ForwardBatch(
            token_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
            positions=torch.cat(positions).int(),
            slots=torch.cat(slots),
            q_start=starts,
            kv_len=torch.tensor([start + n for _, start, n in chunks], dtype=torch.int32),
            page_table=self.table[[r for r, _, _ in chunks]].contiguous(),
            logit_rows=torch.arange(int(starts[-1])),
            page_size=self.page_size,
            causal=causal,
            max_kv_len=max(start + n for _, start, n in chunks),
            max_q_len=max(n for _, _, n in chunks),
        )


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rotate(x: Tensor, rope: RopeTable, positions: Tensor) -> Tensor:
    """x [n, heads, d]."""
    half = rope.cos.shape[1]
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = x.to(w.dtype).float() @ w.float().T
    return y if bias is None else y + bias


def _visible(n: int, keys: int, start: int, window: int | None, causal: bool) -> Tensor:
    row, key = torch.arange(start, start + n)[:, None], torch.arange(keys)[None]
    mask = key <= row if causal else torch.ones(n, keys, dtype=torch.bool)
    return mask if window is None else mask & (key > row - window)


def reference_forward(
    spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable], x: Tensor, *, start: int = 0,
    context: list[tuple[Tensor, Tensor]] | None = None, kv_dtype: torch.dtype = torch.float32, causal: bool = True,
) -> list[Tensor]:  # fmt: skip
    """One request in plain float32: x [n, H] at start.. over `context` K/V per layer -> the output of each layer."""
    n, (h, kv, d) = len(x), (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    positions = torch.arange(start, start + n)
    outputs = []
    for i, w in enumerate(layers):
        qkv = linear(rms_norm(x, w.input_norm, spec.rms_eps), w.qkv, w.qkv_bias).view(n, h + 2 * kv, d)
        q, k, v = qkv.split([h, kv, kv], 1)
        if w.q_norm is not None:
            q = rms_norm(q, w.q_norm, spec.rms_eps)
        if w.k_norm is not None:
            k = rms_norm(k, w.k_norm, spec.rms_eps)
        rope = ropes[spec.rope_index[i]]
        q, k = rotate(q, rope, positions), rotate(k, rope, positions)
        k, v = k.to(kv_dtype).float(), v.to(kv_dtype).float()
        if context:
            k, v = torch.cat([context[i][0], k]), torch.cat([context[i][1], v])
        k, v = k.repeat_interleave(h // kv, 1), v.repeat_interleave(h // kv, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.attention_scale
        mask = _visible(n, len(k), start, spec.windows[i], causal)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(n, h * d)
        branch = linear(attended, w.o, w.o_bias)
        if w.post_attention_norm is not None:
            branch = rms_norm(branch, w.post_attention_norm, spec.rms_eps)
        x = x + branch
        gate, up = linear(rms_norm(x, w.mlp_norm, spec.rms_eps), w.gate_up, w.gate_up_bias).chunk(2, -1)
        act = F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")
        branch = linear(act * up, w.down, w.down_bias)
        if w.post_mlp_norm is not None:
            branch = rms_norm(branch, w.post_mlp_norm, spec.rms_eps)
        x = x + branch
        outputs.append(x)
    return outputs


def kv_at(pool: KVPool, pages: Pages, request: int, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
    slots = pages.slots(request, positions).long()
    return [(pool.k[i, slots].float(), pool.v[i, slots].float()) for i in range(pool.k.shape[0])]
