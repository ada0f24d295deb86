"""Two ranks add their parts from each other's memory. Here both ranks' memory is this process's, and one rank runs
after the other: in Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

# ruff: noqa: E402 (the interpreter must be chosen before Triton is imported)
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
ON_DEVICE = torch.cuda.is_available()
if not ON_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported for the first time

from exactspec.backend.cuda import peers as p
from exactspec.backend.cuda import twins
from exactspec.backend.parallel import Parallel

DEVICE = "cuda" if ON_DEVICE else "cpu"
PROGRAMS = 16


def ranks(size: int, elements: int) -> list[p.PeerSums]:
    parts = [torch.zeros((p.SLOTS, elements), device=DEVICE) for _ in range(size)]
    flags = [torch.zeros((p.SLOTS, size, PROGRAMS), dtype=torch.int32, device=DEVICE) for _ in range(size)]

    def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([[t[slot].data_ptr() for t in tensors] for slot in range(p.SLOTS)], device=DEVICE)

    where = addresses(parts), addresses(flags)
    return [p.PeerSums(Parallel(rank, size), parts[rank], flags[rank], *where) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_adds_the_parts_of_all_in_rank_order(size: int) -> None:
    rows, width = 3, 1100  # two blocks of columns, the second ragged
    everyone = ranks(size, 4 * width)
    assert not everyone[0].fits(5, width)
    for number in range(4):  # slots take turns, flags are used again
        slot = number % 2
        generator = torch.Generator().manual_seed(number)
        parts = torch.randn((size, rows, width), generator=generator).to(DEVICE)
        residual = torch.randn((rows, width), generator=generator).to(DEVICE) if number != 1 else None
        want = twins.add_parts(parts, residual)
        for one, part in zip(everyone, parts, strict=True):
            one.part(slot, rows, width).copy_(part)
        for one in everyone[1:]:  # the others have come as far: rank 0 need not wait
            everyone[0].flags[slot, one.parallel.rank, : 2 * rows] = 1
            for other in everyone[1:]:
                if other is not one:
                    other.flags[slot, one.parallel.rank, : 2 * rows] = 1
        for one in everyone:
            out = torch.full((rows, width), float("nan"), device=DEVICE) if residual is None else residual.clone()
            wide = torch.full((rows, 2 * width), float("nan"), device=DEVICE)
            one.sum(slot, None if residual is None else out, out, wide[:, width:])
            assert torch.equal(out, want)
            assert torch.equal(wide[:, width:], want)
            assert not one.flags[slot].any()  # what was waited for is set back
            told = [other.flags[slot, one.parallel.rank] for other in everyone if other is not one]
            assert all(int(flags.sum()) == 2 * rows and int(flags.max()) == 1 for flags in told)
            for other in everyone:  # whoever ran before has read its flags already; do not leave them for later
                if other.parallel.rank < one.parallel.rank:
                    other.flags[slot, one.parallel.rank] = 0
