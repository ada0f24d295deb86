"""One weight matrix on a CUDA device: the exact GEMM, or cuBLAS for numerics="fast"."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from exactspec.backend.cuda import gemm as g
from exactspec.backend.cuda.launch import AFTER_WAIT, LATE, OFF
from exactspec.backend.cuda.tiles import Tile, choose_tile, tiles_of_shape
from exactspec.errors import DeviceError

PREFETCH_TOTAL = 2 << 20  # bytes of weights a waiting GEMM brings into the L2 cache: small models' matrices whole
LATE_BYTES = 16 << 20  # weights from this size on fill the device: their GEMM lets the next kernel start late
SMALL_ROWS = 32  # early starts pay where kernels are short


class CudaLinear:
    """x @ weight.T + bias with float32 accumulation; weight [out, in] bfloat16 or float16, bias float32."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        exact: bool = True,
        activation: int = g.PLAIN,
        pdl: bool = False,
        num_sms: int = 132,
    ) -> None:
        if not g.gemm_dtype_ok(weight.dtype):
            raise DeviceError(f"the CUDA backend computes in bfloat16 or float16, got weights in {weight.dtype}")
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.exact = exact
        self.activation = activation
        self.pdl = pdl
        self.num_sms = num_sms
        self.out_features = weight.shape[0] // (1 if activation == g.PLAIN else 2)
        share = PREFETCH_TOTAL // weight.shape[0]
        self.prefetch = min(share, weight.shape[1] * weight.element_size()) if pdl else 0

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def is_large(self) -> bool:
        return self.weight.numel() * self.weight.element_size() >= LATE_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] float32 (or already rounded) -> [M, out] float32."""
        return self.into(x.to(self.dtype), torch.empty((x.shape[0], self.out_features), device=x.device))

    def rows(self, start: int) -> CudaLinear:
        """The map to outputs start .. end, sharing this one's memory."""
        bias = None if self.bias is None else self.bias[start:]
        return CudaLinear(self.weight[start:], bias, self.exact, self.activation, self.pdl, self.num_sms)

    def into(
        self,
        x: Tensor,
        out: Tensor,
        residual: Tensor | None = None,
        copy: Tensor | None = None,
        tile: Tile | None = None,
        start: int | None = None,
    ) -> Tensor:
        """x [M, in] in the weights' dtype; out = activation(x @ w.T + bias) + residual, and once more into `copy`.

        start: a mode of launch.py; None: as fits a GEMM of this size among others."""
        if x.shape[0] == 0:
            return out
        if not self.exact:
            return self._fast(x, out, residual, copy)
        chosen = tile or choose_tile(x.shape[0], self.weight.shape[0], self.weight.shape[1])
        mode = OFF
        if self.pdl and x.shape[0] <= SMALL_ROWS:
            mode = start if start is not None else LATE if self.is_large else AFTER_WAIT
        return g.gemm(
            x.contiguous(), self.weight, out, chosen, self.bias, residual, copy, self.activation, mode,
            self.prefetch if mode != OFF else 0, self.num_sms, mode != OFF and not self.is_large,
        )  # fmt: skip

    def _fast(self, x: Tensor, out: Tensor, residual: Tensor | None, copy: Tensor | None) -> Tensor:
        y = F.linear(x, self.weight).float()
        if self.bias is not None:
            y += self.bias
        if self.activation != g.PLAIN:
            gate, up = y.chunk(2, dim=-1)
            y = (F.silu(gate) if self.activation == g.SILU_MUL else F.gelu(gate, approximate="tanh")) * up
        if residual is not None:
            y = y + residual
        out.copy_(y)
        if copy is not None:
            copy.copy_(y)
        return out

    def check_tiles(self, rows: int = 600) -> None:
        """Raises DeviceError unless all tiles of this shape give a row the same bits (first, middle and last rows)."""
        if not self.exact:
            return
        generator = torch.Generator(device=self.weight.device).manual_seed(0)
        x = torch.randn((rows, self.weight.shape[1]), generator=generator, device=self.weight.device).to(self.dtype)
        picks = (0, rows // 2, rows - 1)
        tiles = tiles_of_shape(*self.weight.shape)
        want = self.into(x[list(picks)], self._empty(3), tile=tiles[0])
        for tile in tiles:
            few = max(3, min(rows, tile.rows - 1))
            part = x.clone()
            part[[0, few // 2, few - 1]] = x[list(picks)]
            got = self.into(part[:few], self._empty(few), tile=tile)[[0, few // 2, few - 1]]
            if not torch.equal(got, want):
                raise DeviceError(
                    f"self-check: tile {tile} gives other bits than {tiles[0]} for weights {tuple(self.weight.shape)}"
                )

    def _empty(self, rows: int) -> Tensor:
        return torch.empty((rows, self.out_features), device=self.weight.device)
