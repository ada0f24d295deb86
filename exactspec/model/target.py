"""The target model on a device: embedding, stack, final norm and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from exactspec.backend.base import Backend, KVPool, LayerWeights
from exactspec.backend.parallel import head_linear, shard_layer, shard_spec
from exactspec.errors import CheckpointError
from exactspec.model.weights import LoadedTarget
from exactspec.types import ForwardBatch


class TargetModel:
    """One forward for prefill chunks, single rows and verify blocks; it knows nothing of requests.

    The layers live in the backend's packed form alone: call `loaded.release_layers()` after building to free the
    other copy. A tied embedding may be held twice (rows for look-up, packed for the head). Of several ranks
    (backend.parallel) each builds its share; their forwards run together and give every rank the same rows.
    """

    def __init__(self, backend: Backend, loaded: LoadedTarget) -> None:
        weights = loaded.weights
        if len(weights.layers) != loaded.config.num_layers:
            raise CheckpointError(
                f"{loaded.name}: {len(weights.layers)} layers at hand, expected {loaded.config.num_layers}"
                " (already released?)"
            )
        self.backend = backend
        self.config = loaded.config
        self.name = loaded.name
        self.tokenizer = loaded.tokenizer
        self.eos_ids = loaded.eos_ids
        self.generation_defaults = loaded.generation_defaults
        self.dtype = loaded.dtype
        whole = loaded.config.stack_spec()
        self.spec = shard_spec(whole, backend.parallel)  # this rank's share
        self._embed = weights.embed.to(backend.device)
        # Gemma was trained with the scale rounded to the weights' dtype
        self._embed_scale = torch.tensor(loaded.config.embed_scale, dtype=self.dtype).item()
        self._final_norm = weights.final_norm.to(backend.device)
        layers = weights.layers
        if loaded.num_shards != backend.parallel.size:
            layers = [shard_layer(layer, whole, backend.parallel) for layer in layers]
        layers = [_on_device(layer, backend.device) for layer in layers]
        self.stack = backend.make_stack(self.spec, layers, loaded.config.rope_tables(backend.device))
        self.lm_head = head_linear(backend, self._embed if loaded.config.tied else weights.lm_head.to(backend.device))

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, H] float32, scaled where the family does so."""
        rows = self._embed[token_ids].float()
        return rows if self._embed_scale == 1.0 else rows * self._embed_scale

    def forward(self, batch: ForwardBatch, pool: KVPool, capture: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Runs the batch's rows, writing their K/V. Returns (hidden [T, H] float32 after the final norm, captured
        [T, len(capture) * H] float32: outputs of the layers in `capture`, before any final norm, or None)."""
        out, captured = self.stack.forward(self.embed(batch.token_ids), batch, pool, capture)
        return self.backend.rms_norm(out, self._final_norm, self.spec.rms_eps), captured

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """hidden_rows [N, H] float32 (after the final norm) -> [N, V] float32."""
        return self.lm_head(hidden_rows)

    def make_pool(self, num_slots: int) -> KVPool:
        return self.backend.make_pool(self.spec, num_slots, self.dtype)


def _on_device(layer: LayerWeights, device: torch.device) -> LayerWeights:
    moved: dict[str, Any] = {}
    for f in fields(layer):
        tensor = getattr(layer, f.name)
        moved[f.name] = None if tensor is None else tensor.to(device)
    return LayerWeights(**moved)
