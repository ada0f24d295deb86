"""A stack of layers whose forward is one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.backend.cpu.native import (
    ACTIVATIONS,
    Arena,
    EsBatch,
    EsLayer,
    EsPool,
    EsRope,
    EsStack,
    check,
    dtype_code,
    int32,
    library,
    rows_of,
)
from exactspec.errors import ConfigError
from exactspec.types import ForwardBatch

_NORMS = ("input_norm", "mlp_norm", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")
_LINEARS = ("qkv", "o", "gate_up", "down")
MAX_HEAD_DIM = 512


def _shapes(spec: StackSpec) -> dict[str, tuple[int, ...]]:
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    h, i, q = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"qkv": (heads, h), "o": (h, q), "gate_up": (2 * i, h), "down": (h, i)}
    shapes |= {f"{name}_bias": shapes[name][:1] for name in _LINEARS}
    shapes |= dict.fromkeys(_NORMS, (h,))
    return shapes | {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}


def _check_spec(spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> None:
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= MAX_HEAD_DIM:
        raise ConfigError(f"head_dim: {spec.head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(f"num_heads: {spec.num_heads} is not a multiple of num_kv_heads {spec.num_kv_heads}")
    if spec.activation not in ACTIVATIONS:
        raise ConfigError(f"activation: {spec.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    for name, count in (("layers", len(layers)), ("windows", len(spec.windows)), ("rope_index", len(spec.rope_index))):
        if count != spec.num_layers:
            raise ConfigError(f"{name}: {count} entries for {spec.num_layers} layers")
    if not ropes or not all(0 <= i < len(ropes) for i in spec.rope_index):
        raise ConfigError(f"rope_index: {spec.rope_index} does not fit {len(ropes)} rope tables")
    for table in ropes:
        if table.cos.shape != table.sin.shape or 2 * table.cos.shape[1] > spec.head_dim:
            raise ConfigError(f"ropes: table {list(table.cos.shape)} does not fit head_dim {spec.head_dim}")


def _check_layer(spec: StackSpec, layer: LayerWeights, index: int, dtype: torch.dtype) -> None:
    for name, shape in _shapes(spec).items():
        tensor = getattr(layer, name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"layers[{index}].{name}: expected {list(shape)}, got {list(tensor.shape)}")
        if name in _LINEARS and tensor.dtype != dtype:
            raise ConfigError(f"layers[{index}].{name}: dtype {tensor.dtype} differs from {dtype}")


class CpuStack:
    """`spec.num_layers` decoder layers. Keeps packed copies of the weights, not the tensors given."""

    def __init__(self, spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> None:
        _check_spec(spec, layers, ropes)
        dtype = layers[0].qkv.dtype if layers else torch.float32
        dtype_code(dtype, "layers[0].qkv")
        for index, layer in enumerate(layers):
            _check_layer(spec, layer, index, dtype)
        self.spec = spec
        self._keep: list[Tensor] = []  # tensors that the structs point into
        self._arena = Arena(sum(Arena.bytes_for(getattr(w, n), n == "gate_up") for w in layers for n in _LINEARS))
        self._layers = (EsLayer * spec.num_layers)(*(self._layer(w, i) for i, w in enumerate(layers)))
        self._ropes = (EsRope * len(ropes))(*(self._rope(table) for table in ropes))
        self._struct = EsStack(
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_layers,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            ACTIVATIONS[spec.activation],
            len(ropes),
            spec.rms_eps,
            spec.attention_scale,
            self._layers,
            self._ropes,
        )

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().to("cpu", torch.float32).contiguous()
        self._keep.append(kept)
        return kept.data_ptr()

    def _layer(self, weights: LayerWeights, index: int) -> EsLayer:
        out = EsLayer()
        for name in _LINEARS:
            packed = self._arena.pack(getattr(weights, name), getattr(weights, f"{name}_bias"), glu=name == "gate_up")
            setattr(out, name, packed)
        for name in _NORMS:
            setattr(out, name, self._pointer(getattr(weights, name)))
        out.window = self.spec.windows[index] or 0
        out.rope = self.spec.rope_index[index]
        return out

    def _rope(self, table: RopeTable) -> EsRope:
        positions, half = table.cos.shape
        return EsRope(self._pointer(table.cos), self._pointer(table.sin), positions, half)

    def _pool(self, pool: KVPool) -> EsPool:
        layers, slots, heads, dim = pool.k.shape
        spec = self.spec
        expected = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        if (layers, heads, dim) != expected or pool.v.shape != pool.k.shape:
            raise ConfigError(f"pool: {list(pool.k.shape)} does not fit layers, kv_heads, head_dim = {expected}")
        if not (pool.k.is_contiguous() and pool.v.is_contiguous()):
            raise ConfigError("pool: k and v must be contiguous")
        return EsPool(pool.k.data_ptr(), pool.v.data_ptr(), slots, dtype_code(pool.k.dtype, "pool"))

    def forward(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, capture: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """See backend.base.Stack.forward. Positions, slots and pages out of range raise ConfigError."""
        rows = rows_of(x, self.spec.hidden_size, "x")
        out = rows.clone() if rows.data_ptr() == x.data_ptr() else rows
        if not all(0 <= i < self.spec.num_layers for i in capture):
            raise ConfigError(f"capture: {list(capture)} is not within {self.spec.num_layers} layers")
        tensors = [int32(t) for t in (batch.positions, batch.slots, batch.q_start, batch.kv_len, batch.page_table)]
        if tensors[0].shape[0] != out.shape[0] or tensors[1].shape[0] != out.shape[0]:
            raise ConfigError(f"batch: {tensors[0].shape[0]} positions for {out.shape[0]} rows of x")
        struct = EsBatch(
            *(t.data_ptr() for t in tensors),
            out.shape[0],
            tensors[3].shape[0],
            tensors[4].shape[1],
            batch.page_size,
            int(batch.causal),
        )
        captured = torch.empty(out.shape[0], len(capture) * self.spec.hidden_size) if capture else None
        code = library().es_stack_forward(
            ctypes.byref(self._struct),
            ctypes.byref(struct),
            ctypes.byref(self._pool(pool)),
            out.data_ptr(),
            (ctypes.c_int32 * len(capture))(*capture),
            len(capture),
            None if captured is None else captured.data_ptr(),
        )
        check(code)
        return out, captured

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """See backend.base.Stack.write_context."""
        rows = rows_of(context, self.spec.hidden_size, "context")
        positions, slots = int32(positions), int32(slots)
        if positions.shape[0] != rows.shape[0] or slots.shape[0] != rows.shape[0]:
            raise ConfigError(
                f"write_context: {positions.shape[0]} positions, {slots.shape[0]} slots, {len(rows)} rows"
            )
        code = library().es_write_context(
            ctypes.byref(self._struct),
            rows.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            rows.shape[0],
            ctypes.byref(self._pool(pool)),
        )
        check(code)
