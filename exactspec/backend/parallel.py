"""Tensor parallelism: which part of a stack a rank holds, and the collectives that join the parts.

The cut is that of Megatron-LM (Shoeybi et al. 2019, section 3): q/k/v and gate/up by outputs (whole heads), o and down
by inputs, the LM head by vocabulary. Embeddings, norms and the small parts of drafts are on every rank.

A sum over ranks gathers all ranks' parts and adds them in rank order, in float32. An all-reduce would leave the order
to the library, which chooses it by size; so this keeps contract C2 within one number of ranks: a row's bits do not
depend on the other rows. Every rank ends with the same bits and draws the same tokens. This is the only file that
calls torch.distributed while an engine runs; on CUDA devices of one host, few rows are summed without it
(cuda/peers.py), in the same order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from exactspec.errors import ConfigError

if TYPE_CHECKING:
    from exactspec.backend.base import Backend, LayerWeights, Linear, StackSpec

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0  # a rank that hangs, not one that dies: that is seen at once
LEAVE_TIMEOUT_S = 8.0


# torch 2.13 gave the operation another name
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Parallel:
    """One rank of `size`. With size 1 nothing is cut and no collective is called."""

    rank: int = 0
    size: int = 1

    def gather(self, part: Tensor) -> Tensor:
        """[M, W] on each rank -> [size, M, W] on all, in rank order."""
        parts = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        if part.numel():
            _all_gather(parts.flatten(0, 1), part.contiguous())
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """[M, W] float32 -> the sum over ranks, in rank order."""
        if self.size == 1:
            return part
        parts = self.gather(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def join_columns(self, part: Tensor, width: int) -> Tensor:
        """[M, W] on each rank -> [M, width]: the ranks' columns side by side, without the padding at the end."""
        return self.gather(part).transpose(0, 1).reshape(part.shape[0], self.size * part.shape[1])[:, :width]

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.size == 1:
            return value
        return int(self.gather(torch.tensor([[value]], dtype=torch.int64)).min())

    def from_first(self, values: list[float]) -> list[float]:
        """Rank 0's values; all ranks give as many."""
        if self.size == 1:
            return values
        message = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(message, 0)
        received: list[float] = message.tolist()
        return received


SINGLE = Parallel()


def join_group(rank: int, size: int, store_file: str, is_cuda: bool) -> Parallel:
    """Joins the process group whose ranks meet at `store_file` (a path on this host): NCCL for tensors on CUDA devices,
    gloo for the others. Returns when all have come. Raises ConfigError if this process has a process group already."""
    check_no_group()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=dist.FileStore(store_file, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return Parallel(rank, size)


def check_no_group() -> None:
    """Raises ConfigError if this process has a process group: there can be one."""
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel: this process already has a torch.distributed process group; close the other engine first"
        )


def leave_group() -> None:
    """Leaves the group of `join_group`, if there is one. What keeps it for longer than LEAVE_TIMEOUT_S (a captured
    graph that holds one of its collectives, say) does not keep the caller."""
    _releases.clear()
    if not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
    leaving.start()
    leaving.join(LEAVE_TIMEOUT_S)
    if leaving.is_alive():
        logger.warning("tensor_parallel: the process group has not ended after %.0f s; going on", LEAVE_TIMEOUT_S)


_releases: list[Callable[[], None]] = []  # of what waits for other ranks without a collective


def on_abort(release: Callable[[], None]) -> None:
    """`release` is called, from another thread, when a rank has died, until the group is left."""
    _releases.append(release)


def abort_collectives() -> None:
    """Ends collectives in flight, from another thread: a kernel that waits for a dead rank would wait for ever."""
    for release in _releases:
        release()
    group = dist.group.WORLD
    if group is not None:
        group.abort()


# ---- the cut --------------------------------------------------------------------------------------------


def shard_spec(spec: StackSpec, parallel: Parallel, what: str = "model") -> StackSpec:
    """One rank's share of a stack. ConfigError naming the field that does not divide by the number of ranks."""
    size = parallel.size
    fields = {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
    }
    for name, value in fields.items():
        if value % size:
            raise ConfigError(f"tensor_parallel: {name} {value} of the {what} does not divide by {size} ranks")
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=spec.num_kv_heads // size,
        intermediate_size=spec.intermediate_size // size,
    )


def shard_layer(layer: LayerWeights, spec: StackSpec, parallel: Parallel) -> LayerWeights:
    """One rank's part of a whole layer; `spec` describes the whole. Biases of o and down are rank 0's alone."""
    if parallel.size == 1:
        return layer
    rank, size, dim = parallel.rank, parallel.size, spec.head_dim
    qkv = (spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim)
    gate_up = (spec.intermediate_size, spec.intermediate_size)

    def rows(tensor: Tensor | None, parts: tuple[int, ...]) -> Tensor | None:
        if tensor is None:
            return None
        return torch.cat([part.chunk(size)[rank] for part in tensor.split(parts)])

    def columns(tensor: Tensor) -> Tensor:
        return tensor.chunk(size, dim=1)[rank].contiguous()

    cut_qkv, cut_gate_up = rows(layer.qkv, qkv), rows(layer.gate_up, gate_up)
    assert cut_qkv is not None
    assert cut_gate_up is not None
    return replace(
        layer,
        qkv=cut_qkv,
        o=columns(layer.o),
        gate_up=cut_gate_up,
        down=columns(layer.down),
        qkv_bias=rows(layer.qkv_bias, qkv),
        o_bias=layer.o_bias if rank == 0 else None,
        gate_up_bias=rows(layer.gate_up_bias, gate_up),
        down_bias=layer.down_bias if rank == 0 else None,
    )


class VocabularyLinear:
    """An LM head whose rows are dealt out to the ranks; every rank gets all logits."""

    def __init__(self, local: Linear, parallel: Parallel, num_outputs: int) -> None:
        self.local, self.parallel, self.num_outputs = local, parallel, num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        return self.parallel.join_columns(self.local(x), self.num_outputs)


def head_linear(backend: Backend, weight: Tensor) -> Linear:
    """The LM head [V, H] on a backend: whole, or this rank's share of the vocabulary, the last padded with zeros."""
    parallel = backend.parallel
    if parallel.size == 1:
        return backend.make_linear(weight)
    num_rows = -(-weight.shape[0] // parallel.size)
    part = weight[parallel.rank * num_rows : (parallel.rank + 1) * num_rows]
    if part.shape[0] < num_rows:
        part = torch.cat([part, part.new_zeros((num_rows - part.shape[0], part.shape[1]))])
    return VocabularyLinear(backend.make_linear(part), parallel, weight.shape[0])
