"""The device seam: what a kind of device must offer. One folder per kind (torch, cpu, cuda).

A *stack* is a list of pre-norm decoder layers over paged K/V. The target and the block drafters run on the
same stacks, so that a device implements them once. Activations are float32 between operations; weights and K/V
are in the model's dtype and rows are rounded to it where they meet a weight or enter the pool. Contract C2: the
bits of a row depend on that row (and the keys it sees) alone, never on the other rows of the call, nor on how keys
got into the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from exactspec.backend.parallel import Parallel
from exactspec.types import ForwardBatch


@dataclass(frozen=True)
class StackSpec:
    """Shape of a stack, family-neutral. Per-layer tuples have num_layers entries."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    activation: str  # "silu" | "gelu_tanh"
    attention_scale: float  # multiplies q . k, normally head_dim ** -0.5
    windows: tuple[int | None, ...]  # sliding window: a row at position p sees keys p - window + 1 .. p
    rope_index: tuple[int, ...]  # which rope table a layer uses


@dataclass(frozen=True)
class RopeTable:
    """cos and sin, float32 [max_positions, rotary_dim // 2], rotate-half convention, any scaling already applied."""

    cos: Tensor
    sin: Tensor


@dataclass
class LayerWeights:
    """One layer. Linear weights are [out, in] in the model dtype; norms and biases float32 (offsets such as
    Gemma's 1 + w already folded in)."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, H], rows q, k, v
    o: Tensor  # [H, num_heads * head_dim]
    mlp_norm: Tensor  # [H], before the MLP
    gate_up: Tensor  # [2 * intermediate, H], gate first
    down: Tensor  # [H, intermediate]
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [head_dim], RMSNorm on each head before RoPE
    k_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None  # Gemma: norm of the branch before the residual addition
    post_mlp_norm: Tensor | None = None


@dataclass
class KVPool:
    """K/V of all layers of one stack: slot s holds one token. Rows are written by Stack.forward only."""

    k: Tensor  # [layers, slots, kv_heads, head_dim]
    v: Tensor


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] float32 -> [M, out] float32 (x rounded to the weight dtype, float32 accumulation)."""
        ...


@runtime_checkable
class ChainedLinear(Protocol):
    """A Linear [V, r] that can draw whole blocks of a Markov head in one call. A device may have none."""

    def draw_chain(
        self, w1: Tensor, base: Tensor, noise: Tensor | None, inverse_temperature: Tensor | None, anchors: Tensor
    ) -> Tensor:
        """Tokens [R, G] int64, position by position: the lowest argmax of
        (base[r, k] + W w1[token before]) * inverse_temperature[r] + noise[r, k], ids in vocabulary order.

        w1 [V or more, r] in the weight's dtype; base, noise [R, G, V] float32 (None: no noise); inverse_temperature
        [R] float32 (None: 1); anchors [R] int64, the rows of w1 before the first position.
        """
        ...


class Stack(Protocol):
    spec: StackSpec

    def forward(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, capture: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """x [T, H] float32 embeddings -> (output of the last layer [T, H], no final norm;
        captured [T, len(capture) * H], outputs of the layers in `capture` side by side in that order, or None).
        Writes each row's K/V at batch.slots."""
        ...

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        """Block drafters: for each layer write k_proj(context) (k-normed, rotated at positions) and v_proj(context)
        at slots. context [T, H] is used as it is, without the layer's input norm."""
        ...


class Backend(Protocol):
    """Everything that depends on the kind of device."""

    name: str
    device: torch.device
    parallel: Parallel  # this process's rank; specs and layers given to a backend are one rank's share

    def make_pool(self, spec: StackSpec, num_slots: int, dtype: torch.dtype) -> KVPool: ...

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepacks [out, in]; used for the LM head, the draft's fc and heads. May keep a reference to `weight`."""
        ...

    def make_stack(self, spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> Stack: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """[M, H] float32 -> [M, H] float32."""
        ...

    def gumbel(self, seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
        """Counter-based Gumbel noise float32 [N, V] from seeds [N] int64 and output positions [N] int64.
        A pure function of (seed, position, stream, token id) on this device."""
        ...
