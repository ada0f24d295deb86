"""CUDA graphs: capture once for a key, replay for ever.

Graphs of one kind share a memory pool: what one leaves behind is overwritten by the next replay of its kind, and by no
other. So a step may replay one graph of each kind and read all their results afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from exactspec.backend.base import KVPool
from exactspec.backend.cuda.tiles import bucket_rows
from exactspec.types import ForwardBatch


@dataclass(slots=True)
class CapturedGraph:
    """A graph and the tensors it leaves its results in: valid until the next replay of a graph of its kind."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.outputs


class GraphCache:
    """Captured functions by kind and key. A function reads and writes buffers that stay where they are."""

    def __init__(self) -> None:
        self.is_capturing = False  # False too in the run before a capture
        self._pools: dict[str, Any] = {}
        self._graphs: dict[tuple[str, Hashable], CapturedGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, kind: str, key: Hashable) -> bool:
        """Whether `get` would find it captured."""
        return (kind, key) in self._graphs

    def get(self, kind: str, key: Hashable, function: Callable[[], Any]) -> CapturedGraph:
        """The graph of `key`; at first use `function` is run once (kernels get compiled) and then captured."""
        found = self._graphs.get((kind, key))
        if found is None:
            found = self._capture(kind, function)
            self._graphs[kind, key] = found
        return found

    def _capture(self, kind: str, function: Callable[[], Any]) -> CapturedGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if kind not in self._pools:
            self._pools[kind] = torch.cuda.graph_pool_handle()
        self.is_capturing = True
        try:
            with torch.cuda.graph(graph, pool=self._pools[kind]):
                outputs = function()
        finally:
            self.is_capturing = False
        return CapturedGraph(graph, outputs)


class Replay(Protocol):
    def replay(self) -> Any: ...


class Graphs(Protocol):
    """What GraphCache offers; tests put a cache in its place that runs the functions."""

    is_capturing: bool

    def has(self, kind: str, key: Hashable) -> bool: ...

    def get(self, kind: str, key: Hashable, function: Callable[[], Any]) -> Replay: ...


class ForwardModel(Protocol):
    """What is captured: a target."""

    def forward(
        self, batch: ForwardBatch, pool: KVPool, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]: ...


class ForwardGraphs:
    """A model's forward by bucketed row counts, ragged inside: any mix of chunks and blocks replays one graph.

    `most_requests` bounds the requests of a batch and `most_pages` the pages of one; larger batches run eagerly.
    Results are the bits of the eager forward, and stay valid until the next call.
    """

    def __init__(
        self,
        model: ForwardModel,
        pool: KVPool,
        capture: tuple[int, ...],
        page_size: int,
        most_requests: int,
        most_pages: int,
        device: torch.device,
        graphs: Graphs | None = None,
        most_rows: int = 512,
    ) -> None:
        self.model, self.pool, self.capture, self.page_size = model, pool, capture, page_size
        self.most_requests, self.most_pages, self.most_rows = most_requests, most_pages, most_rows
        self.graphs: Graphs = graphs if graphs is not None else GraphCache()

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._token_ids = zeros(most_rows, dtype=torch.int64)
        self._positions, self._slots = zeros(most_rows), zeros(most_rows)
        self._q_start, self._kv_len = zeros(most_requests + 1), zeros(most_requests)
        self._page_table = zeros(most_requests, most_pages)
        self._no_rows = zeros(0, dtype=torch.int64)

    def __call__(self, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """(hidden [T, H], captured) of batch, by a graph if it fits one."""
        rows = bucket_rows(batch.num_rows)
        if rows is None or rows > self.most_rows or not self._fits(batch):
            return self.model.forward(batch, self.pool, self.capture)
        requests = min(rows, self.most_requests)
        graph = self.graphs.get("forward", rows, lambda: self._run(rows, requests))
        self._fill(batch, rows, requests)
        hidden, captured = graph.replay()
        count = batch.num_rows
        return hidden[:count], None if captured is None else captured[:count]

    def _fits(self, batch: ForwardBatch) -> bool:
        return (
            batch.causal
            and batch.page_size == self.page_size
            and 0 < batch.num_requests <= self.most_requests
            and batch.page_table.shape[1] <= self.most_pages
        )

    def _run(self, rows: int, requests: int) -> tuple[Tensor, Tensor | None]:
        if not self.graphs.is_capturing:  # the run before the capture has no requests and writes no K/V
            self._slots.fill_(-1)
            self._q_start.zero_()
            self._kv_len.zero_()
        padded = ForwardBatch(
            token_ids=self._token_ids[:rows], positions=self._positions[:rows], slots=self._slots[:rows],
            q_start=self._q_start[: requests + 1], kv_len=self._kv_len[:requests],
            page_table=self._page_table[:requests], logit_rows=self._no_rows, page_size=self.page_size,
            max_kv_len=self.most_pages * self.page_size, max_q_len=rows,
        )  # fmt: skip
        return self.model.forward(padded, self.pool, self.capture)

    def _fill(self, batch: ForwardBatch, rows: int, requests: int) -> None:
        count, given = batch.num_rows, batch.num_requests
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._positions[count:rows].zero_()
        self._slots[:count].copy_(batch.slots)
        self._slots[count:rows].fill_(-1)
        self._q_start[: given + 1].copy_(batch.q_start)
        self._q_start[given + 1 : requests + 1].fill_(count)
        self._kv_len[:given].copy_(batch.kv_len)
        self._kv_len[given:requests].zero_()
        self._page_table[:given, : batch.page_table.shape[1]].copy_(batch.page_table)
