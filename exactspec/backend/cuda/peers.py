"""Sums over the ranks of one host, for few rows: every rank reads the others' parts straight from their memory.

A collective of a library costs more than its bytes where a step has two of them a layer. Here a rank's GEMM leaves its
part in memory that all ranks of the host have mapped (torch's symmetric memory; no multicast). One kernel then tells
the other ranks that the part is there, waits until theirs are, adds all parts in rank order and adds the residual: the
same float32 additions in the same order as `add_parts` after a gather, so the same bits.

Two slots take turns (branch 0: attention, branch 1: MLP). A rank writes slot s again two sums later, after the sum
between them, in which it waited for everybody; and everybody answers in that one only after having read slot s. So one
signal a sum is enough, and a flag may be set back by whoever has waited for it.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
import logging
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from exactspec.backend.cuda.launch import OFF, launch_options, wait_for_input
from exactspec.backend.cuda.tiles import next_power_of_2
from exactspec.backend.parallel import Parallel, on_abort

logger = logging.getLogger(__name__)

MOST_ROWS = 256  # of the hidden size of the first stack; more rows are bound by bytes, and gathered
MOST_COLUMNS = 1024  # of one program
MOST_PROGRAMS = 4096
SLOTS = 2
RELEASE_SECONDS = 30.0


@triton.jit
def _sum_kernel(
    parts, flags, residual, out, copy, copy_stride,
    RANK: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns). parts, flags: addresses, one a rank, of this slot's part and flags; flag
    [r, program] of rank q says that rank r's part is there for q's program."""
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    at = row * WIDTH + cols
    wait_for_input(PDL)
    for i in tl.static_range(SIZE):
        if i != RANK:
            theirs = tl.load(flags + i).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + RANK * STRIDE + program, 1, sem="release", scope="sys")
    if HAS_RESIDUAL:
        rest = tl.load(residual + at, mask=ok, other=0.0)
    ours = tl.load(flags + RANK).to(tl.pointer_type(tl.int32))
    for i in tl.static_range(SIZE):
        if i != RANK:
            while tl.atomic_cas(ours + i * STRIDE + program, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    first = tl.multiple_of(tl.load(parts).to(tl.pointer_type(tl.float32)), 16)
    total = tl.load(first + at, mask=ok, other=0.0, volatile=True)
    for i in tl.static_range(1, SIZE):
        part = tl.multiple_of(tl.load(parts + i).to(tl.pointer_type(tl.float32)), 16)
        total += tl.load(part + at, mask=ok, other=0.0, volatile=True)
    if HAS_RESIDUAL:
        total = rest + total
    tl.store(out + at, total, mask=ok)
    if HAS_COPY:
        tl.store(copy + row * copy_stride + cols, total, mask=ok)


class PeerSums:
    """Memory of one rank that the others read, and theirs. `parts` [slots, elements] float32 and `flags` [slots, ranks,
    programs] int32 are this rank's own; the addresses [slots, ranks] int64 are where this process sees everybody's."""

    def __init__(
        self,
        parallel: Parallel,
        parts: Tensor,
        flags: Tensor,
        part_addresses: Tensor,
        flag_addresses: Tensor,
        mapping: object = None,
    ) -> None:
        self.parallel, self.parts, self.flags = parallel, parts, flags
        self._part_addresses, self._flag_addresses = part_addresses, flag_addresses
        self._mapping = mapping  # the others' memory is there as long as this is

    def fits(self, rows: int, width: int) -> bool:
        return rows * width <= self.parts.shape[1] and rows * -(-width // _block(width)) <= self.flags.shape[2]

    def part(self, slot: int, rows: int, width: int) -> Tensor:
        """Where this rank's part [rows, width] of the next sum of that slot goes."""
        return self.parts[slot, : rows * width].view(rows, width)

    def sum(
        self, slot: int, residual: Tensor | None, out: Tensor, copy: Tensor | None = None, pdl: int = OFF
    ) -> Tensor:
        """out [M, H] float32 = residual + (rank 0's part + rank 1's + ...), and once more into `copy`. Every rank calls
        this for the same sums in the same order, slots taking turns; out may be residual. Twin: twins.add_parts."""
        rows, width = out.shape
        block = _block(width)
        launch = launch_options(pdl)
        _sum_kernel[(rows, triton.cdiv(width, block))](
            self._part_addresses[slot], self._flag_addresses[slot], out if residual is None else residual, out,
            out if copy is None else copy, 0 if copy is None else copy.stride(0), RANK=self.parallel.rank,
            SIZE=self.parallel.size, STRIDE=self.flags.shape[2], WIDTH=width, BLOCK=block,
            HAS_RESIDUAL=residual is not None, HAS_COPY=copy is not None, PDL=pdl, num_warps=4, **launch,
        )  # fmt: skip
        return out

    def release(self) -> None:
        """From a thread, once a rank is dead: kernels that wait for it end, with sums that nobody may use."""
        device = self.flags.device

        def run() -> None:
            torch.cuda.set_device(device)
            until = time.monotonic() + RELEASE_SECONDS
            with torch.cuda.stream(torch.cuda.Stream(device)):
                while time.monotonic() < until:
                    self.flags.fill_(1)
                    torch.cuda.current_stream().synchronize()

        threading.Thread(target=run, name="release", daemon=True).start()


def _block(width: int) -> int:
    return min(MOST_COLUMNS, next_power_of_2(width))


def open_peers(parallel: Parallel, device: torch.device, hidden_size: int) -> PeerSums | None:
    """Memory shared by the ranks; all of them call this together. None, with a warning, where the devices cannot map
    each other's memory; EXACTSPEC_PEERS=0 (on every rank) says so without one. Sums are then gathered: the same bits,
    slower."""
    if parallel.size == 1 or os.environ.get("EXACTSPEC_PEERS", "1") == "0":
        return None
    size = SLOTS * MOST_ROWS * hidden_size
    count = SLOTS * parallel.size * MOST_PROGRAMS
    shared, reason = None, "another rank cannot"
    try:
        shared = _share(size + count, device)
    except RuntimeError as error:
        reason = str(error)
    if parallel.least(int(shared is not None)) == 0 or shared is None:
        logger.warning("ranks cannot read each other's memory (%s): sums are gathered, which is slower", reason)
        return None
    everyone = [shared.get_buffer(rank, (size + count,), torch.int32) for rank in range(parallel.size)]
    ours = everyone[parallel.rank]
    ours.zero_()
    torch.cuda.synchronize(device)
    parallel.least(1)  # no rank sets a flag before all are cleared
    slots = torch.arange(SLOTS, dtype=torch.int64)[:, None] * 4
    starts = torch.tensor([buffer.data_ptr() for buffer in everyone], dtype=torch.int64)[None]
    peers = PeerSums(
        parallel,
        ours[:size].view(torch.float32).view(SLOTS, -1),
        ours[size:].view(SLOTS, parallel.size, MOST_PROGRAMS),
        (starts + slots * (size // SLOTS)).to(device),
        (starts + 4 * size + slots * (count // SLOTS)).to(device),
        shared,
    )
    on_abort(peers.release)
    return peers


def _share(words: int, device: torch.device) -> Any:
    """Zeroed or not: `words` int32 of this rank's memory, mapped by all ranks (a _SymmetricMemory)."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    return symmetric.rendezvous(symmetric.empty(words, dtype=torch.int32, device=device), group)
