"""The floor of a step: the bytes of weights it must read over the machine's read bandwidth; and steps measured
against it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from exactspec.backend.base import KVPool
from exactspec.model.target import TargetModel
from exactspec.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median time of a target forward with logits for `rows` rows of one request, at `context` tokens of K/V."""

    rows: int
    context: int
    milliseconds: float


def weight_bytes(target: TargetModel) -> int:
    """Bytes of weights that one step reads: the layers' linears and the LM head (norms are nothing beside them)."""
    spec = target.spec
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    mlp = 3 * spec.intermediate_size * spec.hidden_size
    parameters = spec.num_layers * (attention + mlp) + target.config.vocab_size * spec.hidden_size
    return parameters * target.dtype.itemsize


def read_bandwidth(target: TargetModel, num_bytes: int) -> float:
    """Bytes per second that this device reads from an array of num_bytes with the engine's own threads."""
    measure = getattr(target.backend, "read_bandwidth", None)
    if measure is not None:
        return float(measure(num_bytes))
    array = torch.ones(num_bytes // 4, dtype=torch.float32, device=target.backend.device)
    best = float("inf")
    for _ in range(8):
        _synchronize(target)
        began = time.perf_counter()
        array.sum().item()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best


def measure_step(target: TargetModel, pool: KVPool, rows: int, context: int, repeats: int = 15) -> StepTime:
    """Times one request's block of `rows` rows behind `context` tokens; the pool's contents do not matter."""
    batch = _block(target, rows, context)
    times = []
    for _ in range(repeats + 3):
        _synchronize(target)
        began = time.perf_counter()
        hidden, _ = target.forward(batch, pool)
        target.logits(hidden)
        _synchronize(target)
        times.append(time.perf_counter() - began)
    return StepTime(rows, context, statistics.median(times[3:]) * 1e3)


def _block(target: TargetModel, rows: int, context: int) -> ForwardBatch:
    device, page_size = target.backend.device, 16
    positions = torch.arange(context, context + rows, dtype=torch.int32, device=device)
    num_pages = -(-(context + rows) // page_size)
    return ForwardBatch(
        token_ids=torch.arange(rows, device=device) % target.config.vocab_size,
        positions=positions,
        slots=positions.clone(),
        q_start=torch.tensor([0, rows], dtype=torch.int32, device=device),
        kv_len=torch.tensor([context + rows], dtype=torch.int32, device=device),
        page_table=torch.arange(num_pages, dtype=torch.int32, device=device)[None],
        logit_rows=torch.arange(rows, device=device),
        page_size=page_size,
        max_kv_len=context + rows,
        max_q_len=rows,
    )


def _synchronize(target: TargetModel) -> None:
    if target.backend.device.type == "cuda":
        torch.cuda.synchronize(target.backend.device)
