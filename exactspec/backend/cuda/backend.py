"""CudaBackend: backend.base.Backend on one CUDA device. Importing this file needs Triton, building it a device."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.base import KVPool, LayerWeights, RopeTable, StackSpec
from exactspec.backend.cuda import sampling, scores
from exactspec.backend.cuda.elementwise import rms_norm
from exactspec.backend.cuda.linear import CudaLinear
from exactspec.backend.cuda.peers import PeerSums, open_peers
from exactspec.backend.cuda.stack import CudaStack
from exactspec.backend.parallel import SINGLE, Parallel, VocabularyLinear
from exactspec.errors import ConfigError, DeviceError

TOPK_BLOCK = 64  # entries whose maximum stands for them in a first look


class CudaBackend:
    """Exact or fast numerics on a CUDA device. Weights bfloat16 or float16.

    EXACTSPEC_PDL=0 turns off programmatic dependent launch (kernels that start early and wait for their input).
    """

    name = "cuda"
    most_scored = scores.MOST_TOP
    parallel = SINGLE
    _peers: PeerSums | None = None
    _early_with_peers = _asked_for_peers = False

    def __init__(
        self, device: str | torch.device = "cuda", numerics: str = "exact", parallel: Parallel = SINGLE
    ) -> None:
        if numerics not in ("exact", "fast"):
            raise ConfigError(f"numerics must be exact or fast, got {numerics!r}")
        self.device = torch.device(device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise DeviceError(f"the CUDA backend needs a CUDA device, got {device!r}")
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        if properties.major < 8:
            raise DeviceError(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}, need 8.0"
            )
        self.numerics = numerics
        self.exact = numerics == "exact"
        self.num_sms = properties.multi_processor_count
        self.parallel = parallel
        early = properties.major >= 9 and os.environ.get("EXACTSPEC_PDL", "1") != "0"
        # a collective between two kernels is no launch of ours: early starts would have to know it
        self.pdl = early and parallel.size == 1
        self._early_with_peers = early

    def make_pool(self, spec: StackSpec, num_slots: int, dtype: torch.dtype) -> KVPool:
        shape = (spec.num_layers, num_slots, spec.num_kv_heads, spec.head_dim)
        return KVPool(
            torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device)
        )

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> CudaLinear:
        bias = None if bias is None else bias.to(self.device)
        return CudaLinear(weight.to(self.device), bias, self.exact, pdl=self.pdl, num_sms=self.num_sms)

    def make_stack(self, spec: StackSpec, layers: list[LayerWeights], ropes: list[RopeTable]) -> CudaStack:
        layers = [_moved(layer, self.device) for layer in layers]
        ropes = [RopeTable(rope.cos.to(self.device), rope.sin.to(self.device)) for rope in ropes]
        if not self._asked_for_peers:
            self._peers, self._asked_for_peers = open_peers(self.parallel, self.device, spec.hidden_size), True
        pdl = self.pdl or (self._early_with_peers and self._peers is not None)
        return CudaStack(spec, layers, ropes, self.exact, pdl, self.num_sms, self.parallel, self._peers)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        return rms_norm(x, weight, eps, torch.empty_like(x)) if x.shape[0] else torch.empty_like(x)

    def gumbel(self, seeds: Tensor, positions: Tensor, stream: int, vocab_size: int) -> Tensor:
        return sampling.gumbel(seeds, positions, stream, vocab_size)

    def draw(
        self,
        logits: Tensor,
        temperatures: Tensor | None,
        seeds: Tensor | None,
        positions: Tensor | None,
        stream: int = 0,
        valid_vocab: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """argmax(logits / T + gumbel) in one pass: (ids, raw logprobs, logsumexp); see sampling.draw."""
        return sampling.draw(logits, temperatures, seeds, positions, stream, valid_vocab)

    def argmax_rows(self, logits: Tensor) -> Tensor:
        """[N, V] float32 -> ids [N] int64, ties to the lowest id."""
        return sampling.draw(logits, None, None, None)[0]

    def logsumexp_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[N, V] float32 -> (row maximum [N], logsumexp [N])."""
        return scores.logsumexp(logits)

    def score_rows(
        self,
        logits: Tensor,
        token_ids: Tensor,
        k: int,
        valid_vocab: int,
        divisors: Tensor | None = None,
        packed: Tensor | None = None,
    ) -> Tensor:
        """The numbers of logprob entries, [N, 1 + 2k] int32; see scores.score_rows."""
        return scores.score_rows(logits, token_ids, k, valid_vocab, divisors, packed)

    def topk_rows(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, V] float32 -> (values [N, k] falling, ids [N, k] int64), ties by rising id.

        torch.topk leaves ties open, so it selects unique int64 keys. The k greatest entries lie in the k blocks with
        the greatest maxima (ties to the earlier block), so the second selection sees only those.
        """
        rows, width = logits.shape
        blocks = -(-width // TOPK_BLOCK)
        padded = F.pad(logits, (0, blocks * TOPK_BLOCK - width), value=float("-inf"))
        padded = padded.view(rows, blocks, TOPK_BLOCK)
        best = _greatest(padded.amax(dim=-1), torch.arange(blocks, device=logits.device), min(k, blocks))
        members = padded.gather(1, best[:, :, None].expand(-1, -1, TOPK_BLOCK)).flatten(1)
        ids = (best[:, :, None] * TOPK_BLOCK + torch.arange(TOPK_BLOCK, device=logits.device)).flatten(1)
        chosen = _greatest(members, ids, k)
        return logits.gather(1, chosen), chosen

    def self_check(self, *stacks_and_linears: CudaStack | CudaLinear | VocabularyLinear) -> None:
        """Proves on this device that all GEMM tiles of the given weights' shapes agree; raises DeviceError if not."""
        seen: set[tuple[int, ...]] = set()
        for item in stacks_and_linears:
            whole = item.local if isinstance(item, VocabularyLinear) else item
            linears = _linears(whole) if isinstance(whole, CudaStack) else [cast(CudaLinear, whole)]
            for linear in linears:
                key = (*linear.weight.shape, linear.activation, linear.bias is not None)
                if key not in seen:
                    seen.add(key)
                    linear.check_tiles()


def _greatest(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Ids of the k greatest of values [N, W] float32, falling, ties by rising id (ids [W] or [N, W], below 2 ** 31).

    The bits of a float, read as an integer, are ordered like the float, the negative ones in reverse; + 0.0 drops -0.0.
    """
    bits = (values + 0.0).view(torch.int32)
    rising = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    keys = (rising << 32) + (2**31 - ids)
    return 2**31 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def _moved(layer: LayerWeights, device: torch.device) -> LayerWeights:
    """The layer on the device; nothing is copied that is there already."""
    moved: dict[str, Any] = {}
    for f in fields(layer):
        tensor = getattr(layer, f.name)
        moved[f.name] = None if tensor is None else tensor.to(device)
    return LayerWeights(**moved)


def _linears(stack: CudaStack) -> list[CudaLinear]:
    first = stack.layers[0]
    return [first.qkv, first.kv, first.o, first.gate_up, first.down]
