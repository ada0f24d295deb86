"""Several processes, one draft: a thin layer over torch.distributed. One process is the case of world size 1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set in some process."""
        if self.world_size == 1:
            return flag
        value = torch.tensor(int(flag), device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def join_ranks(device: torch.device) -> Ranks:
    """Joins the process group that torchrun's environment describes (NCCL on CUDA, gloo on the CPU), if any."""
    if not dist.is_available():
        return Ranks()
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size())
