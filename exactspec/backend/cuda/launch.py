"""Programmatic dependent launch: a kernel may start before the one it depends on has ended, and waits inside.

Rules that keep it safe. A kernel writes nothing, and reads nothing that another kernel of the forward wrote, before its
wait returns; the wait returns when the kernel before it has ended, which had itself waited, so everything earlier has
ended too. Before the wait it may read weights, and what ordinary launches before the first layer wrote (the batch, the
attention plan). Modes differ only in when the next kernel may start:

    OFF          no early start at all
    AFTER_WAIT   as soon as this kernel has its input: one kernel of lookahead
    BEFORE_WAIT  at once: for small kernels, so that the next GEMM can already ask for its weights
    LATE         after the main loop: for GEMMs that fill the device themselves
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OFF, AFTER_WAIT, BEFORE_WAIT, LATE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class EarlyStarts:
    """The mode of each kernel of a layer, in their order; `merge` joins the splits of attention."""

    norm: int
    qkv: int
    rope: int
    attention: int
    merge: int
    o: int
    mlp_norm: int
    gate_up: int
    down: int


NO_STARTS = EarlyStarts(OFF, OFF, OFF, OFF, OFF, OFF, OFF, OFF, OFF)
# kernels of a few microseconds: each hides its launch behind those before it
SMALL_STARTS = EarlyStarts(
    norm=BEFORE_WAIT, qkv=AFTER_WAIT, rope=BEFORE_WAIT, attention=BEFORE_WAIT, merge=BEFORE_WAIT, o=AFTER_WAIT,
    mlp_norm=BEFORE_WAIT, gate_up=AFTER_WAIT, down=AFTER_WAIT,
)  # fmt: skip
# GEMMs that fill the device: small kernels wait beside them, but the programs of the next GEMM or of attention do not
# (they would take the room of few multiprocessors and run there side by side)
LARGE_STARTS = EarlyStarts(
    norm=AFTER_WAIT, qkv=AFTER_WAIT, rope=AFTER_WAIT, attention=BEFORE_WAIT, merge=AFTER_WAIT, o=AFTER_WAIT,
    mlp_norm=BEFORE_WAIT, gate_up=LATE, down=AFTER_WAIT,
)  # fmt: skip


@triton.jit
def wait_for_input(MODE: tl.constexpr):
    """Returns when the kernel before this one has ended and its writes can be seen."""
    if MODE == 2:
        gdc_launch_dependents()
    if MODE != 0:
        gdc_wait()
    if MODE == 1:
        gdc_launch_dependents()


@triton.jit
def release_late(MODE: tl.constexpr):
    """In mode LATE: lets the next kernel start now."""
    if MODE == 3:
        gdc_launch_dependents()


def launch_options(mode: int) -> dict[str, Any]:
    return {"launch_pdl": True} if mode != OFF else {}
