"""Decoder layers on CUDA: nine kernels a layer, no device synchronisation, ready to be captured in a graph.

The residual stream is float32; rows are rounded to the weights' dtype where they meet a GEMM. A layer is: norm, qkv,
q/k norm + RoPE + K/V write, attention (+ merge of its splits), o + residual, norm, gate/up + activation, down +
residual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.backend.cuda import gemm as g
from exactspec.backend.cuda.attention import ROW_TILE, AttentionPlan, attention, make_plan
from exactspec.backend.cuda.elementwise import add_parts, add_rms_norm, rms_norm, rope_write
from exactspec.backend.cuda.launch import AFTER_WAIT, LARGE_STARTS, NO_STARTS, OFF, SMALL_STARTS, EarlyStarts
from exactspec.backend.cuda.linear import SMALL_ROWS, CudaLinear
from exactspec.backend.cuda.peers import PeerSums
from exactspec.backend.parallel import SINGLE, Parallel
from exactspec.errors import CheckpointError, UnsupportedModelError
from exactspec.types import ForwardBatch

ACTIVATIONS = {"silu": g.SILU_MUL, "gelu_tanh": g.GELU_MUL}


class CudaLayer:
    """One layer's packed weights. x is updated in place."""

    def __init__(
        self,
        spec: StackSpec,
        weights: LayerWeights,
        index: int,
        exact: bool,
        pdl: bool,
        num_sms: int,
        parallel: Parallel = SINGLE,
        peers: PeerSums | None = None,
    ) -> None:
        self.spec, self.index, self.parallel, self.peers = spec, index, parallel, peers
        self.window = spec.windows[index]
        act = ACTIVATIONS[spec.activation]
        self.qkv = CudaLinear(weights.qkv, weights.qkv_bias, exact, pdl=pdl, num_sms=num_sms)
        self.kv = self.qkv.rows(spec.num_heads * spec.head_dim)
        self.o = CudaLinear(weights.o, weights.o_bias, exact, pdl=pdl, num_sms=num_sms)
        self.gate_up = CudaLinear(weights.gate_up, weights.gate_up_bias, exact, act, pdl, num_sms)
        self.down = CudaLinear(weights.down, weights.down_bias, exact, pdl=pdl, num_sms=num_sms)
        self.starts = LARGE_STARTS if self.gate_up.is_large else SMALL_STARTS
        self.input_norm, self.mlp_norm = weights.input_norm, weights.mlp_norm
        self.q_norm, self.k_norm = weights.q_norm, weights.k_norm
        self.post_attention_norm, self.post_mlp_norm = weights.post_attention_norm, weights.post_mlp_norm
        if (self.q_norm is None) != (self.k_norm is None):
            raise UnsupportedModelError("q_norm and k_norm must both be given or both be absent")

    def forward(
        self,
        x: Tensor,
        source: Tensor,
        batch: ForwardBatch,
        plan: AttentionPlan,
        rope: RopeTable,
        pool: KVPool,
        copy: Tensor | None,
        starts: EarlyStarts,
    ) -> None:
        """x = layer(source); x and source [T, H] float32 may be one tensor. `copy` gets the result too."""
        spec, rows = self.spec, x.shape[0]
        dtype, device = self.qkv.dtype, x.device
        h = torch.empty(x.shape, dtype=dtype, device=device)
        rms_norm(source, self.input_norm, spec.rms_eps, h, starts.norm)
        qkv = self.qkv.into(h, torch.empty((rows, self.qkv.out_features), device=device), start=starts.qkv)
        q = torch.empty((rows, spec.num_heads, spec.head_dim), dtype=dtype, device=device)
        k_pool, v_pool = pool.k[self.index], pool.v[self.index]
        rope_write(
            qkv, self.q_norm, self.k_norm, rope, batch.positions, batch.slots, q, k_pool, v_pool, spec.rms_eps,
            starts.rope,
        )  # fmt: skip
        mixed = torch.empty((rows, spec.num_heads * spec.head_dim), dtype=dtype, device=device)
        attention(
            q, k_pool, v_pool, batch, plan, spec.attention_scale, self.window, mixed, starts.attention, starts.merge
        )
        self._branch(0, self.o, mixed, self.post_attention_norm, source, x, None, starts.o, starts.mlp_norm)
        rms_norm(x, self.mlp_norm, spec.rms_eps, h, starts.mlp_norm)
        act = torch.empty((rows, spec.intermediate_size), dtype=dtype, device=device)
        self.gate_up.into(h, act, start=starts.gate_up)
        self._branch(1, self.down, act, self.post_mlp_norm, x, x, copy, starts.down, starts.norm)

    def _branch(
        self,
        which: int,
        linear: CudaLinear,
        rows: Tensor,
        norm: Tensor | None,
        residual: Tensor,
        out: Tensor,
        copy: Tensor | None,
        start: int,
        norm_start: int,
    ) -> None:
        if self.parallel.size > 1:
            self._joined_branch(which, linear, rows, norm, residual, out, copy, start, norm_start)
            return
        if norm is None:
            linear.into(rows, out, residual, copy, start=start)
            return
        branch = linear.into(rows, torch.empty_like(out), start=start)
        add_rms_norm(branch, norm, self.spec.rms_eps, residual, out, copy, norm_start)

    def _joined_branch(
        self,
        which: int,
        linear: CudaLinear,
        rows: Tensor,
        norm: Tensor | None,
        residual: Tensor,
        out: Tensor,
        copy: Tensor | None,
        start: int,
        norm_start: int,
    ) -> None:
        """The same where each rank has a part of the sum over the branch's inputs."""
        if norm is None:
            self._sum_ranks(which, linear, rows, residual, out, copy, start)
            return
        branch = self._sum_ranks(which, linear, rows, None, torch.empty_like(out), None, start)
        add_rms_norm(branch, norm, self.spec.rms_eps, residual, out, copy, norm_start)

    def _sum_ranks(
        self,
        which: int,
        linear: CudaLinear,
        rows: Tensor,
        residual: Tensor | None,
        out: Tensor,
        copy: Tensor | None,
        start: int,
    ) -> Tensor:
        """out = residual + the sum of all ranks' linear(rows)."""
        peers = self.peers
        if peers is None or not peers.fits(*out.shape):
            return self.add_ranks(which, linear.into(rows, torch.empty_like(out)), residual, out, copy)
        part = linear.into(rows, peers.part(which, *out.shape), start=start)
        return self.add_ranks(which, part, residual, out, copy, OFF if start == OFF else AFTER_WAIT)

    def add_ranks(
        self,
        which: int,
        part: Tensor,
        residual: Tensor | None,
        out: Tensor,
        copy: Tensor | None = None,
        start: int = OFF,
    ) -> Tensor:
        """out = residual + the ranks' parts, in rank order: from their memory (`part` is peers.part) or gathered. The
        same bits either way."""
        if self.peers is None or not self.peers.fits(*out.shape):
            return add_parts(self.parallel.gather(part), residual, out, copy)
        return self.peers.sum(which, residual, out, copy, start)


class CudaStack:
    def __init__(
        self,
        spec: StackSpec,
        layers: list[LayerWeights],
        ropes: list[RopeTable],
        exact: bool,
        pdl: bool,
        num_sms: int,
        parallel: Parallel = SINGLE,
        peers: PeerSums | None = None,
    ) -> None:
        """`pdl`: kernels of few rows start early; with several ranks that needs `peers`."""
        if len(layers) != spec.num_layers:
            raise CheckpointError(f"{len(layers)} layers given, expected {spec.num_layers}")
        if spec.activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {spec.activation!r} is not one of {sorted(ACTIVATIONS)}")
        group = spec.num_heads // spec.num_kv_heads
        if spec.num_heads % spec.num_kv_heads or group > ROW_TILE or spec.head_dim > 256:
            raise UnsupportedModelError(
                f"attention with {spec.num_heads} heads over {spec.num_kv_heads} of width {spec.head_dim} has no kernel"
            )
        self.spec, self.ropes, self.pdl, self.num_sms = spec, ropes, pdl, num_sms
        self.layers = [
            CudaLayer(spec, weights, i, exact, pdl, num_sms, parallel, peers) for i, weights in enumerate(layers)
        ]

    def forward(
        self, x: Tensor, batch: ForwardBatch, pool: KVPool, capture: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        spec, rows = self.spec, x.shape[0]
        hidden = torch.empty((rows, spec.hidden_size), device=x.device)
        captured = torch.empty((rows, len(capture) * spec.hidden_size), device=x.device) if capture else None
        if rows == 0:
            return hidden, captured
        early = self.pdl and rows <= SMALL_ROWS
        plan = make_plan(batch, spec.num_heads, spec.num_kv_heads, spec.head_dim, self.num_sms)
        source = x
        for i, layer in enumerate(self.layers):
            copy = None
            if captured is not None and i in capture:
                at = list(capture).index(i) * spec.hidden_size
                copy = captured[:, at : at + spec.hidden_size]
            layer.forward(
                hidden,
                source,
                batch,
                plan,
                self.ropes[spec.rope_index[i]],
                pool,
                copy,
                layer.starts if early else NO_STARTS,
            )
            source = hidden
        return hidden, captured

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, pool: KVPool) -> None:
        if context.shape[0] == 0:
            return
        pdl = AFTER_WAIT if self.pdl and context.shape[0] <= SMALL_ROWS else OFF
        rows = context.to(self.layers[0].kv.dtype)
        for i, layer in enumerate(self.layers):
            kv = layer.kv
            out = kv.into(rows, torch.empty((rows.shape[0], kv.out_features), device=rows.device))
            rope = self.ropes[self.spec.rope_index[i]]
            rope_write(
                out, None, layer.k_norm, rope, positions, slots, None, pool.k[i], pool.v[i], self.spec.rms_eps, pdl
            )
