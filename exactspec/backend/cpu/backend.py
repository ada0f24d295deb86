"""The native CPU backend: prepacked weights and one native call for all layers."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.backend.cpu.native import Arena, check, default_threads, library, rows_of, strided_rows
from exactspec.backend.cpu.stack import CpuStack
from exactspec.backend.parallel import SINGLE
from exactspec.errors import ConfigError, RequestError

CACHE_LINE = 64


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros at a cache-line border that take memory only where they are written: a pool may be larger than its use."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8))
    start = -raw.data_ptr() % CACHE_LINE
    return raw[start : start + num_bytes].view(dtype).view(shape)


class CpuLinear:
    """y = x W^T + b with W prepacked. Same bits for a row whatever the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.ndim != 2 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])):
            raise ConfigError(f"linear: weight {list(weight.shape)} and bias do not fit")
        self.out_features, self.in_features = weight.shape
        self._arena = Arena(Arena.bytes_for(weight))
        self._struct = self._arena.pack(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] float32 -> [M, out] float32 (x rounded to the weight dtype, float32 accumulation)."""
        rows = rows_of(x, self.in_features, "x")
        out = torch.empty(rows.shape[0], self.out_features)
        check(library().es_linear(ctypes.byref(self._struct), rows.data_ptr(), rows.shape[0], out.data_ptr()))
        return out

    def draw_chain(
        self, w1: Tensor, base: Tensor, noise: Tensor | None, inverse_temperature: Tensor | None, anchors: Tensor
    ) -> Tensor:
        """See backend.base.ChainedLinear."""
        requests, gamma, vocab_size = base.shape
        if vocab_size != self.out_features or w1.shape[1] != self.in_features:
            raise ConfigError(f"draw_chain: base {list(base.shape)} and w1 {list(w1.shape)} do not fit this weight")
        held = [None if t is None else t.to(torch.float32).contiguous() for t in (base, noise, inverse_temperature)]
        table, before = w1.contiguous(), anchors.to(torch.int64).contiguous()
        tokens = torch.empty((requests, gamma), dtype=torch.int64)
        pointers = [None if t is None else t.data_ptr() for t in held]
        inputs = (ctypes.byref(self._struct), table.data_ptr(), *pointers, before.data_ptr())
        check(library().es_draw_chain(*inputs, requests, gamma, tokens.data_ptr()))
        return tokens


class CpuBackend:
    """Implements backend.base.Backend. `num_threads` None: see native.default_threads."""

    name = "cpu"
    parallel = SINGLE  # one native call runs all layers: nowhere to join parts

    def __init__(self, num_threads: int | None = None) -> None:
        self.device = torch.device("cpu")
        library()
        # torch's own thread team spins after each operator; on the same cores as ours it makes both 10 to 50 times
        # slower. What is left to torch here is small, so one thread serves it best.
        torch.set_num_threads(1)
        self.set_num_threads(default_threads() if num_threads is None else num_threads)

    @property
    def num_threads(self) -> int:
        return int(library().es_threads())

    def set_num_threads(self, count: int) -> None:
        """Size of the thread team, which all backends of the process share. Changes speed, never a bit."""
        if count < 1:
            raise ConfigError(f"num_threads: {count} is not positive")
        library().es_set_threads(count)

    @property
    def instruction_set(self) -> str:
        """The kernels compiled for this machine: avx512-bf16, avx512, avx2 or portable."""
        return str(library().es_build_info().decode())

    def make_pool(self, spec: StackSpec, num_slots: int, dtype: torch.dtype) -> KVPool:
        shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        pool = KVPool(_untouched_zeros(shape, dtype), _untouched_zeros(shape, dtype))
        for tensor in (pool.k, pool.v):
            # On huge pages: a request's keys are scattered, and each 4 KB page would cost a walk of the page tables.
            library().es_advise(tensor.data_ptr(), tensor.nbytes)
        return pool

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> CpuLinear:
        return CpuLinear(weight, bias)

    def make_stack(self, spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> CpuStack:
        return CpuStack(spec, layers, ropes)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, H] float32 -> [M, H] float32."""
        rows = rows_of(x, weight.shape[0], "x")
        w = weight.to(torch.float32).contiguous()
        out = torch.empty_like(rows)
        library().es_rms_norm(rows.data_ptr(), w.data_ptr(), eps, rows.shape[0], rows.shape[1], out.data_ptr())
        return out

    def gumbel(self, seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
        """Gumbel(0, 1) noise float32 [N, V] from Philox 4x32-7 (src/noise.cpp); a prefix of the same row for a
        smaller vocabulary. seeds, positions [N] int64; 0 <= stream < 2^32."""
        if not 0 <= stream < 2**32:
            raise ConfigError(f"stream: {stream} is not a 32-bit number")
        s, p = seeds.to(torch.int64).contiguous(), positions.to(torch.int64).contiguous()
        if s.shape != p.shape or s.ndim != 1:
            raise ConfigError(f"gumbel: seeds {list(s.shape)} and positions {list(p.shape)} must be equal vectors")
        out = torch.empty(s.shape[0], vocab_size)
        library().es_gumbel(s.data_ptr(), p.data_ptr(), stream, s.shape[0], vocab_size, out.data_ptr())
        return out

    def argmax_rows(self, logits: Tensor) -> Tensor:
        """[N, V] -> [N] int64; ties go to the lowest id, a NaN never wins."""
        rows = strided_rows(logits, "logits")
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        library().es_argmax(rows.data_ptr(), rows.stride(0), rows.shape[0], rows.shape[1], out.data_ptr())
        return out

    def logsumexp_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[N, V] -> (row maximum [N], logsumexp [N]), float32. A row of -inf gives -inf twice."""
        rows = strided_rows(logits, "logits")
        top, total = torch.empty(rows.shape[0]), torch.empty(rows.shape[0])
        library().es_logsumexp(
            rows.data_ptr(), rows.stride(0), rows.shape[0], rows.shape[1], top.data_ptr(), total.data_ptr()
        )
        return top, total

    def topk_rows(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, V] -> (values [N, k] falling, ids [N, k] int64); equal values by rising id. A NaN counts as -inf."""
        rows = strided_rows(logits, "logits")
        if not 1 <= k <= rows.shape[1]:
            raise RequestError("k", f"{k} is not within 1 .. {rows.shape[1]}")
        values, ids = torch.empty(rows.shape[0], k), torch.empty(rows.shape[0], k, dtype=torch.int64)
        library().es_topk(
            rows.data_ptr(), rows.stride(0), rows.shape[0], rows.shape[1], k, values.data_ptr(), ids.data_ptr()
        )
        return values, ids

    def read_bandwidth(self, num_bytes: int = 256 << 20) -> float:
        """Bytes per second that all threads together read from memory (best of 12 passes): the floor of a step."""
        speed = float(library().es_read_bandwidth(num_bytes))
        if speed < 0:
            raise ConfigError(f"read_bandwidth: {library().es_last_error().decode()}")
        return speed
