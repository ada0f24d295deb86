"""Which backend serves a device. The only place that knows them all; each is imported only when chosen."""

from __future__ import annotations

import logging
import os

import torch

from exactspec.backend.base import Backend
from exactspec.backend.parallel import SINGLE, Parallel
from exactspec.errors import ConfigError, DeviceError

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def select_backend(
    device: str = "auto", dtype: str | torch.dtype = "auto", numerics: str = "exact", parallel: Parallel = SINGLE
) -> Backend:
    """The backend for "cpu", "cuda" (or "cuda:1") or "auto" (CUDA if there is one).

    Of several ranks each takes the CUDA device of its number, or, on the CPU, the plain-torch backend (the native one
    runs all layers in one call and has no place to join parts).

    EXACTSPEC_BACKEND=torch forces the plain-torch backend on any device. Raises DeviceError when the device is
    not there and ConfigError for unknown names; a device is never replaced by another.
    """
    if numerics not in ("exact", "fast"):
        raise ConfigError(f"numerics must be exact or fast, got {numerics!r}")
    kind = torch.device(resolve_device(device))
    if parallel.size > 1:
        return _parallel_backend(kind, numerics, parallel)
    forced = os.environ.get("EXACTSPEC_BACKEND", "")
    if forced not in ("", "torch", "native"):
        raise ConfigError(f"EXACTSPEC_BACKEND must be torch or native, got {forced!r}")
    if forced == "torch" or (kind.type == "cpu" and _is_float16(dtype)):  # the CPU kernels know bfloat16 and float32
        return _torch_backend(kind, numerics)
    if kind.type == "cpu":
        return _cpu_backend(numerics, required=forced == "native")
    from exactspec.backend.cuda.backend import CudaBackend

    backend: Backend = CudaBackend(device=kind, numerics=numerics)
    return backend


def _parallel_backend(kind: torch.device, numerics: str, parallel: Parallel) -> Backend:
    if kind.type == "cpu":
        return _torch_backend(kind, numerics, parallel)
    if kind.index is not None:
        raise ConfigError(f"device: give cuda without a number with tensor_parallel, got {kind}")
    count = torch.cuda.device_count()
    if count < parallel.size:
        raise DeviceError(f"tensor_parallel: {parallel.size} ranks need as many CUDA devices, torch sees {count}")
    from exactspec.backend.cuda.backend import CudaBackend

    backend: Backend = CudaBackend(torch.device("cuda", parallel.rank), numerics, parallel)
    return backend


def resolve_device(device: str) -> str:
    """ "auto" -> "cuda" or "cpu"; refuses what is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda, got {device!r}") from error
    if kind.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {device!r}")
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {device!r} asked for, but torch sees no CUDA device")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device {device!r} asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def _is_float16(dtype: str | torch.dtype) -> bool:
    return dtype in ("float16", torch.float16)


def _torch_backend(device: torch.device, numerics: str, parallel: Parallel = SINGLE) -> Backend:
    from exactspec.backend.torch_ref.backend import TorchBackend

    backend: Backend = TorchBackend(device, "exact" if numerics == "exact" else "fast", parallel)
    return backend


def _cpu_backend(numerics: str, required: bool) -> Backend:
    """The native CPU backend; the torch one, with a warning, where it cannot be built (no compiler)."""
    try:
        from exactspec.backend.cpu.backend import CpuBackend

        backend: Backend = CpuBackend()  # exact costs nothing there, so fast is the same
        return backend
    except (ImportError, DeviceError) as error:
        if required:
            raise
        logger.warning("native CPU kernels not available (%s); using the plain torch backend, which is slower", error)
        return _torch_backend(torch.device("cpu"), numerics)
