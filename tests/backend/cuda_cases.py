"""Inputs shared by the tests of the CUDA kernels: run by Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from exactspec.backend.base import LayerWeights, RopeTable, StackSpec
from exactspec.types import ForwardBatch

PAGE = 16


def rope_table(positions: int, rotary: int, base: float = 10000.0, device: str = "cpu") -> RopeTable:
    angles = torch.outer(torch.arange(positions).float(), base ** (-torch.arange(0, rotary, 2).float() / rotary))
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def ragged_batch(
    q_lens: list[int], kv_lens: list[int], causal: bool = True, device: str = "cpu", seed: int = 0, spare_pages: int = 3
) -> tuple[ForwardBatch, int]:
    """A batch whose requests end at kv_lens with shuffled pages; returns it and the number of slots of the pool."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-n // PAGE) for n in kv_lens]
    order = torch.randperm(sum(pages) + spare_pages, generator=generator)
    table = torch.zeros((len(q_lens), max(pages)), dtype=torch.int32)
    taken = 0
    positions, slots = [], []
    for r, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table[r, : pages[r]] = order[taken : taken + pages[r]]
        taken += pages[r]
        where = torch.arange(kv_len - q_len, kv_len)
        positions.append(where)
        slots.append(table[r, where // PAGE].long() * PAGE + where % PAGE)
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    batch = ForwardBatch(
        token_ids=torch.zeros(sum(q_lens), dtype=torch.int64, device=device),
        positions=torch.cat(positions).int().to(device),
        slots=torch.cat(slots).int().to(device),
        q_start=starts.int().to(device),
        kv_len=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        page_table=table.to(device),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        page_size=PAGE,
        causal=causal,
        max_kv_len=max(kv_lens),
        max_q_len=max(q_lens),
    )
    return batch, (sum(pages) + spare_pages) * PAGE


def one_request(
    batch: ForwardBatch, r: int, first_row: int = 0, num_rows: int | None = None
) -> tuple[ForwardBatch, slice]:
    """Request r alone, only its rows first_row .. first_row + num_rows (its keys end there if causal)."""
    starts = batch.q_start.tolist()
    low = starts[r] + first_row
    high = starts[r + 1] if num_rows is None else low + num_rows
    rows = slice(low, high)
    kv_len = int(batch.positions[high - 1]) + 1 if batch.causal else int(batch.kv_len[r])
    device = batch.kv_len.device
    return ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows].contiguous(),
        slots=batch.slots[rows].contiguous(),
        q_start=torch.tensor([0, high - low], dtype=torch.int32, device=device),
        kv_len=torch.tensor([kv_len], dtype=torch.int32, device=device),
        page_table=batch.page_table[r : r + 1].contiguous(),
        logit_rows=batch.logit_rows,
        page_size=batch.page_size,
        causal=batch.causal,
        max_kv_len=kv_len,
        max_q_len=high - low,
    ), rows


def tiny_spec(**changes: object) -> StackSpec:
    values: dict = {
        "hidden_size": 96, "intermediate_size": 160, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32,
        "rms_eps": 1e-5, "activation": "silu", "attention_scale": 32**-0.5, "windows": (None, 40, None),
        "rope_index": (0, 1, 0),
    }  # fmt: skip
    values.update(changes)
    return StackSpec(**values)


def random_layers(
    spec: StackSpec, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, seed: int = 0, everything: bool = False
) -> list[LayerWeights]:
    """Layers with the plain parts, or with biases, q/k norms and post norms as well."""
    generator = torch.Generator().manual_seed(seed)
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    mixed = spec.num_heads * spec.head_dim

    def matrix(out: int, into: int) -> Tensor:
        return (torch.randn((out, into), generator=generator) * into**-0.5).to(device, dtype)

    def vector(size: int, around: float) -> Tensor:
        return (around + 0.1 * torch.randn(size, generator=generator)).to(device)

    layers = []
    for _ in range(spec.num_layers):
        layer = LayerWeights(
            vector(spec.hidden_size, 1.0), matrix(width, spec.hidden_size), matrix(spec.hidden_size, mixed),
            vector(spec.hidden_size, 1.0), matrix(2 * spec.intermediate_size, spec.hidden_size),
            matrix(spec.hidden_size, spec.intermediate_size),
        )  # fmt: skip
        if everything:
            layer.qkv_bias, layer.o_bias = vector(width, 0.0), vector(spec.hidden_size, 0.0)
            layer.gate_up_bias = vector(2 * spec.intermediate_size, 0.0)
            layer.down_bias = vector(spec.hidden_size, 0.0)
            layer.q_norm, layer.k_norm = vector(spec.head_dim, 1.0), vector(spec.head_dim, 1.0)
            layer.post_attention_norm = vector(spec.hidden_size, 1.0)
            layer.post_mlp_norm = vector(spec.hidden_size, 1.0)
        layers.append(layer)
    return layers


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; NaN never passes a comparison."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())
