"""The native library seen from Python: structs of src/api.h, prototypes, threads and packed memory."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p

import torch
from torch import Tensor

from exactspec.backend.cpu.build import library_path
from exactspec.errors import ConfigError, DeviceError

DTYPES = {torch.bfloat16: 0, torch.float32: 1}  # ES_BF16, ES_F32
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # ES_SILU, ES_GELU_TANH


class EsLinear(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("in_", c_int32),
        ("out", c_int32),
        ("dtype", c_int32),
        ("glu", c_int32),
    )


class EsLayer(ctypes.Structure):
    _fields_ = (
        *((name, EsLinear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_mlp_norm")),
        ("window", c_int32),
        ("rope", c_int32),
    )


class EsRope(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("positions", c_int32), ("half", c_int32))


class EsStack(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden", "intermediate", "num_layers", "num_heads", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim", "activation", "num_ropes")),
        ("rms_eps", c_float),
        ("attention_scale", c_float),
        ("layers", POINTER(EsLayer)),
        ("ropes", POINTER(EsRope)),
    )


class EsBatch(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "q_start", "kv_len", "page_table")),
        *((name, c_int32) for name in ("num_rows", "num_requests", "pages_per_request", "page_size", "causal")),
    )


class EsPool(ctypes.Structure):
    _fields_ = (("k", c_void_p), ("v", c_void_p), ("num_slots", c_int64), ("dtype", c_int32))


_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "es_last_error": (c_char_p, ()),
    "es_build_info": (c_char_p, ()),
    "es_set_threads": (None, (c_int32,)),
    "es_threads": (c_int32, ()),
    "es_alloc": (c_void_p, (c_int64,)),
    "es_free": (None, (c_void_p, c_int64)),
    "es_advise": (None, (c_void_p, c_int64)),
    "es_packed_bytes": (c_int64, (c_int32,) * 4),
    "es_pack": (None, (c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, POINTER(EsLinear))),
    "es_linear": (c_int32, (POINTER(EsLinear), c_void_p, c_int32, c_void_p)),
    "es_draw_chain": (c_int32, (POINTER(EsLinear), *(c_void_p,) * 5, c_int32, c_int32, c_void_p)),
    "es_stack_forward": (
        c_int32,
        (POINTER(EsStack), POINTER(EsBatch), POINTER(EsPool), c_void_p, POINTER(c_int32), c_int32, c_void_p),
    ),
    "es_write_context": (c_int32, (POINTER(EsStack), c_void_p, c_void_p, c_void_p, c_int32, POINTER(EsPool))),
    "es_rms_norm": (None, (c_void_p, c_void_p, c_float, c_int32, c_int32, c_void_p)),
    "es_gumbel": (None, (c_void_p, c_void_p, c_uint32, c_int32, c_int32, c_void_p)),
    "es_philox": (None, (POINTER(c_uint32), POINTER(c_uint32), POINTER(c_uint32))),
    "es_argmax": (None, (c_void_p, c_int64, c_int32, c_int32, c_void_p)),
    "es_logsumexp": (None, (c_void_p, c_int64, c_int32, c_int32, c_void_p, c_void_p)),
    "es_topk": (None, (c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
    "es_read_bandwidth": (c_double, (c_int64,)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Loads (and on first use compiles) the library. ctypes releases the GIL during its calls."""
    path = library_path()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise DeviceError(f"cpu backend: cannot load {path}: {error}") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.es_set_threads(default_threads())
    return lib


@functools.cache
def default_threads() -> int:
    """EXACTSPEC_NUM_THREADS, else torch's number of threads (physical cores, OMP_NUM_THREADS) within the affinity.

    Cached: the backend sets torch to one thread, so torch's number can be asked only once.
    """
    wanted = os.environ.get("EXACTSPEC_NUM_THREADS")
    if wanted is not None:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ConfigError(f"EXACTSPEC_NUM_THREADS: {wanted!r} is not a positive number")
        return int(wanted)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), available))


def check(code: int) -> None:
    if code != 0:
        raise ConfigError(f"cpu backend: {library().es_last_error().decode()}")


def dtype_code(dtype: torch.dtype, name: str) -> int:
    if dtype not in DTYPES:
        raise ConfigError(f"{name}: dtype {dtype} is not supported by the cpu backend (bfloat16, float32)")
    return DTYPES[dtype]


def rows_of(x: Tensor, width: int, name: str) -> Tensor:
    """x as contiguous float32 [rows, width] on the CPU."""
    if x.ndim != 2 or x.shape[1] != width:
        raise ConfigError(f"{name}: expected [rows, {width}], got {list(x.shape)}")
    return x.to(device="cpu", dtype=torch.float32).contiguous()


def strided_rows(x: Tensor, name: str) -> Tensor:
    """x as float32 [rows, width] on the CPU whose rows are contiguous; a slice of wider rows is not copied."""
    if x.ndim != 2:
        raise ConfigError(f"{name}: expected [rows, width], got {list(x.shape)}")
    x = x.to(device="cpu", dtype=torch.float32)
    return x if x.stride(1) == 1 else x.contiguous()


def int32(x: Tensor) -> Tensor:
    return x.to(torch.int32).contiguous()


class Arena:
    """One block of packed weights, freed with the object. Pieces follow each other in the order they are packed,
    which is the order they are read in: the hardware prefetcher then runs across them."""

    def __init__(self, num_bytes: int) -> None:
        lib = library()
        base = lib.es_alloc(num_bytes)
        if not base:
            raise DeviceError(f"cpu backend: no memory for {num_bytes} bytes of packed weights")
        self._next = int(base)
        self._end = self._next + num_bytes
        self._finalizer = weakref.finalize(self, lib.es_free, base, num_bytes)

    @staticmethod
    def bytes_for(weight: Tensor, glu: bool = False) -> int:
        out, width = weight.shape
        size = library().es_packed_bytes(out, width, dtype_code(weight.dtype, "weight"), int(glu))
        return (int(size) + 63) // 64 * 64

    def pack(self, weight: Tensor, bias: Tensor | None = None, glu: bool = False) -> EsLinear:
        size = self.bytes_for(weight, glu)
        if self._next + size > self._end:
            raise DeviceError("cpu backend: packed weights exceed their arena")
        w = weight.detach().to("cpu").contiguous()
        b = None if bias is None else bias.detach().to("cpu", torch.float32).contiguous()
        linear = EsLinear()
        pointer = None if b is None else b.data_ptr()
        out, width = w.shape
        library().es_pack(
            w.data_ptr(), pointer, out, width, DTYPES[w.dtype], int(glu), self._next, ctypes.byref(linear)
        )
        self._next += size
        return linear
