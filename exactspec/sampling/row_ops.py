"""The row reductions that sampling and logprobs are made of, by the device's own kernels where it has them.

Contract of every implementation: a row's result depends on that row alone, bit for bit, whatever the other rows.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from exactspec.sampling.argmax import lowest_argmax
from exactspec.sampling.order import top_ids

CUDA_ROW_MULTIPLE = 16  # entries: rows of a multiple of it start at aligned addresses


@runtime_checkable
class RowOps(Protocol):
    """What a backend may offer besides the Backend protocol; all or nothing."""

    def argmax_rows(self, logits: Tensor) -> Tensor:
        """[N, V] float32 -> ids [N] int64, ties to the lowest id."""
        ...

    def logsumexp_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[N, V] float32 -> (row maximum [N], logsumexp [N]) float32."""
        ...

    def topk_rows(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """[N, V] float32 -> (values [N, k] falling, ids [N, k] int64), ties by rising id."""
        ...


@runtime_checkable
class RowScorer(Protocol):
    """What a backend may offer on top of RowOps: all that a logprob entry needs, in one pass, nothing read back."""

    most_scored: int  # greatest k

    def score_rows(
        self,
        logits: Tensor,
        token_ids: Tensor,
        k: int,
        valid_vocab: int,
        divisors: Tensor | None = None,
        packed: Tensor | None = None,
    ) -> Tensor:
        """[N, V] float32, token_ids [N] -> packed [N, 1 + 2k] int32: float32 bits of the logprobs of the token and of
        the k most likely, then the ids of those. Rows are divided by divisors [N] first; divisor 0 leaves a row out."""
        ...


class TorchRowOps:
    """Plain torch operators, any device."""

    def argmax_rows(self, logits: Tensor) -> Tensor:
        return lowest_argmax(logits)

    def logsumexp_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """From log_softmax, whose kernels work row by row: the maximum's own logprob is -log(sum of exp(x - max)).

        torch.logsumexp would not do: a sum over a single long row is split over threads, over many rows it is not.
        On CUDA the kernel's order of summation depends on a row's address modulo 16 bytes, hence the padding.
        """
        rows = logits
        if rows.device.type == "cuda" and rows.shape[1] % CUDA_ROW_MULTIPLE:
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % CUDA_ROW_MULTIPLE), value=float("-inf"))
        greatest = logits.amax(dim=-1)
        return greatest, greatest - torch.log_softmax(rows, dim=-1).amax(dim=-1)

    def topk_rows(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = top_ids(logits, k)
        return logits.gather(1, ids), ids


TORCH_ROW_OPS = TorchRowOps()


def row_ops(backend: object) -> RowOps:
    """The backend's own row reductions, or torch's."""
    return backend if isinstance(backend, RowOps) else TORCH_ROW_OPS
