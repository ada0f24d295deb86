"""Several processes, one draft: a thin layer over torch.distributed. One process is the case of world size 1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S = 7200.0  # between the first process that has made its data and the last


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def average_gradients(self, params: Sequence[Tensor]) -> None:
        """Every process's gradients become their mean. One message: drafts are small."""
        if self.world_size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in params]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= self.world_size
        for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            param.grad = part.view_as(param)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in some process. Host to host: no device waits."""
        if self.world_size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def from_first(self, value: float) -> float:
        """The first process's value: what a clock decides must be the same everywhere. Host to host."""
        if self.world_size == 1:
            return value
        message = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(message, 0)
        return float(message)

    def barrier(self) -> None:
        """Host to host: what a process does before it (its data, say) may take long."""
        if self.world_size > 1:
            dist.all_reduce(torch.zeros(1))


def join_ranks(device: torch.device) -> Ranks:
    """Joins the process group that torchrun's environment describes, if any: gloo for what is on the host, NCCL for
    what is on CUDA devices."""
    if not dist.is_available():
        return Ranks()
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    if not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())
