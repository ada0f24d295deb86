"""The plain-torch backend: the reference that other devices are compared with. Right rather than fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.backend.parallel import SINGLE, Parallel
from exactspec.backend.torch_ref import noise, ops
from exactspec.backend.torch_ref.attention import paged_attention, request_slots
from exactspec.errors import CheckpointError, ConfigError
from exactspec.types import ForwardBatch

Numerics = Literal["exact", "fast"]


class TorchLinear:
    """A linear map with float32 accumulation and float32 result.

    torch's own low-precision linear rounds its result to the weight's dtype; products of two bfloat16 or float16
    numbers are exact in float32, so a float32 copy of the weight (the only one kept) gives what is wanted.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exact: bool = True) -> None:
        self.weight_dtype = weight.dtype
        self.weight = ops.pad_columns(weight.float()) if exact else weight.float()
        self.bias = bias
        self.exact = exact

    def __call__(self, x: Tensor) -> Tensor:
        if self.exact:
            out = ops.linear(x, self.weight, self.weight_dtype)
        else:
            out = F.linear(x.to(self.weight_dtype).float(), self.weight)
        return out if self.bias is None else out + self.bias

    def rows(self, start: int) -> TorchLinear:
        """The map to outputs start .. end, sharing this one's memory."""
        part = TorchLinear.__new__(TorchLinear)
        part.weight_dtype, part.exact = self.weight_dtype, self.exact
        part.weight = self.weight[start:]
        part.bias = None if self.bias is None else self.bias[start:]
        return part


class TorchLayer:
    """One pre-norm decoder layer. Keeps packed linears and the norms, not the given LayerWeights."""

    def __init__(
        self, spec: StackSpec, weights: LayerWeights, index: int, exact: bool, parallel: Parallel = SINGLE
    ) -> None:
        self.spec, self.index, self.exact, self.parallel = spec, index, exact, parallel
        self.window = spec.windows[index]
        self.qkv = TorchLinear(weights.qkv, weights.qkv_bias, exact)
        self.kv = self.qkv.rows(spec.num_heads * spec.head_dim)
        self.o = TorchLinear(weights.o, weights.o_bias, exact)
        self.gate_up = TorchLinear(weights.gate_up, weights.gate_up_bias, exact)
        self.down = TorchLinear(weights.down, weights.down_bias, exact)
        self.input_norm, self.mlp_norm = weights.input_norm, weights.mlp_norm
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm
        self.post_attention_norm, self.post_mlp_norm = weights.post_attention_norm, weights.post_mlp_norm

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm over the last dimension; no weight, no norm."""
        if weight is None:
            return x
        return ops.rms_norm(x.reshape(-1, x.shape[-1]), weight, self.spec.rms_eps).view(x.shape)

    def write(self, kv: Tensor, rope: tuple[Tensor, Tensor], slots: Tensor, pool: KVPool) -> None:
        """kv [T, 2 * kv_heads * D]: K is normed and rotated, both are rounded into the pool."""
        k, v = kv.view(kv.shape[0], 2, self.spec.num_kv_heads, self.spec.head_dim).unbind(1)
        k = ops.rotate(self.norm(k, self.k_norm), *rope)
        pool.k[self.index, slots] = k.to(pool.k.dtype)
        pool.v[self.index, slots] = v.to(pool.v.dtype)

    def forward(
        self, x: Tensor, batch: ForwardBatch, keys: list[Tensor], rope: tuple[Tensor, Tensor], pool: KVPool
    ) -> Tensor:
        spec = self.spec
        q_size = spec.num_heads * spec.head_dim
        qkv = self.qkv(self.norm(x, self.input_norm))
        q = qkv[:, :q_size].reshape(-1, spec.num_heads, spec.head_dim)
        q = ops.rotate(self.norm(q, self.q_norm), *rope)
        self.write(qkv[:, q_size:].contiguous(), rope, batch.slots.long(), pool)
        attended = paged_attention(
            q, pool.k[self.index], pool.v[self.index], batch, keys, spec, self.window, self.exact
        )
        x = x + self.norm(self.parallel.sum(self.o(attended)), self.post_attention_norm)
        gate, up = self.gate_up(self.norm(x, self.mlp_norm)).chunk(2, dim=-1)
        branch = self.parallel.sum(self.down(ops.gated_activation(gate, up, spec.activation)))
        return x + self.norm(branch, self.post_mlp_norm)


class TorchStack:
    def __init__(
        self,
        spec: StackSpec,
        layers: list[LayerWeights],
        ropes: list[RopeTable],
        exact: bool,
        parallel: Parallel = SINGLE,
    ) -> None:
        if len(layers) != spec.num_layers:
            raise CheckpointError(f"{len(layers)} layers given, expected {spec.num_layers}")
        self.spec = spec
        self.ropes = ropes
        self.layers = [TorchLayer(spec, weights, i, exact, parallel) for i, weights in enumerate(layers)]

    def _angles(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        where = positions.long()
        return [(rope.cos[where], rope.sin[where]) for rope in self.ropes]

    def forward(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, capture: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        angles, keys = self._angles(batch.positions), request_slots(batch)
        wanted: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x = layer.forward(x, batch, keys, angles[self.spec.rope_index[i]], pool)
            if i in capture:
                wanted[i] = x
        return x, torch.cat([wanted[i] for i in capture], dim=-1) if capture else None

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        angles = self._angles(positions)
        for i, layer in enumerate(self.layers):
            layer.write(layer.kv(context), angles[self.spec.rope_index[i]], slots.long(), pool)


class TorchBackend:
    """Implements backend.base.Backend on any torch device, in float32, bfloat16 or float16 self."""

    name = "torch"

    def __init__(
        self, device: str | torch.device = "cpu", numerics: Numerics = "exact", parallel: Parallel = SINGLE
    ) -> None:
        if numerics not in ("exact", "fast"):
            raise ConfigError(f"numerics must be exact or fast, got {numerics!r}")
        self.device = torch.device(device)
        self.numerics = numerics
        self.exact = numerics == "exact"
        self.parallel = parallel

    def make_pool(self, spec: StackSpec, num_slots: int, dtype: torch.dtype) -> KVPool:
        shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        return KVPool(
            torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device)
        )

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight.to(self.device), None if bias is None else bias.to(self.device), self.exact)

    def make_stack(self, spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> TorchStack:
        return TorchStack(spec, layers, ropes, self.exact, self.parallel)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return ops.rms_norm(x, weight, eps)

    def gumbel(self, seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
        return noise.gumbel(seeds, positions, stream, vocab_size)
