"""Exact GEMM: x [M, K] @ w [N, K].T with one reduction order over K for every M.

One program computes one output tile with K in order and a float32 accumulator; K is never split. The order of the sum
inside a tile is that of the matrix instructions (16 terms each), which is the same in the 16-row kernels (mma) and the
64-row ones (wgmma); so a row's bits do not depend on the tile, the row count or the other rows. Twin: twins.gemm.
"""

from __future__ import annotations

# ruff: noqa: N803 (kernels write sizes in capitals, as the field does)
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from exactspec.backend.cuda.launch import OFF, launch_options, release_late, wait_for_input
from exactspec.backend.cuda.tiles import Tile

PLAIN, SILU_MUL, GELU_MUL = 0, 1, 2


@triton.jit
def _prefetch_rows(w, num_rows, stride, BYTES: tl.constexpr, LANES: tl.constexpr):
    """Asks for the first BYTES of num_rows rows to be brought into the L2 cache, for each once; changes no value.

    w: two-byte elements. LANES at least 4 * num_rows; as many as threads or more, or else threads repeat each other.
    """
    pieces: tl.constexpr = 4 if BYTES >= 256 and BYTES % 64 == 0 else 1
    lane = tl.arange(0, LANES)
    ptrs = w + (lane // pieces).to(tl.int64) * stride + lane % pieces * (BYTES // pieces // 2)
    tl.inline_asm_elementwise(
        f"""{{
        .reg .pred there;
        setp.ne.u32 there, $2, 0;
        @there cp.async.bulk.prefetch.L2.global [$1], {BYTES // pieces};
        mov.u32 $0, 0;
        }}""",
        "=r,l,r",
        [ptrs, (lane < num_rows * pieces).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tanh(x):
    # 1 - 2 / (exp(2x) + 1): exact at both ends, no library call
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _gate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        act = gate / (1.0 + tl.exp(-gate))
    else:
        act = 0.5 * gate * (1.0 + _tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return act * up


@triton.jit
def _load_tile(matrix, M, N, m0, n0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    ok = (m < M)[:, None] & (n < N)[None, :]
    return tl.load(matrix + m.to(tl.int64)[:, None] * N + n[None, :], mask=ok, other=0.0)


@triton.jit
def _store_tile(
    acc, acc_up, out, bias, added, copy, copy_stride, M, N, m0, n0,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_COPY: tl.constexpr,
):  # fmt: skip
    """bias, gate, residual (`added`), rounding to the output's dtype; `copy` takes the same values once more."""
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    n_ok = n < N
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n_ok, other=0.0)[None, :]
        if ACTIVATION != 0:
            acc_up += tl.load(bias + N + n, mask=n_ok, other=0.0)[None, :]
    if ACTIVATION != 0:
        acc = _gate(acc, acc_up, ACTIVATION)
    ok = (m < M)[:, None] & n_ok[None, :]
    offsets = m.to(tl.int64)[:, None] * N + n[None, :]
    if HAS_RESIDUAL:
        acc += added
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=ok)
    if HAS_COPY:
        tl.store(copy + m.to(tl.int64)[:, None] * copy_stride + n[None, :], acc, mask=ok)


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x, w, out, bias, residual, copy, copy_stride, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_COPY: tl.constexpr,
    RESIDUAL_FIRST: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N counts outputs; with a gate, w has 2N rows (gate first) and one program computes both halves of its columns."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_M * num_n)
    first_m = group * GROUP_M
    size_m = min(num_m - first_m, GROUP_M)
    pid_m = first_m + (pid % (GROUP_M * num_n)) % size_m
    pid_n = (pid % (GROUP_M * num_n)) // size_m
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    n_in = tl.where(n < N, n, 0)
    if PREFETCH > 0:
        rows = w + tl.cast(pid_n * BLOCK_N, tl.int64) * K
        _prefetch_rows(rows, min(BLOCK_N, N - pid_n * BLOCK_N), K, PREFETCH, 4 * BLOCK_N)
        if ACTIVATION != 0:
            up_rows = rows + tl.cast(N, tl.int64) * K
            _prefetch_rows(up_rows, min(BLOCK_N, N - pid_n * BLOCK_N), K, PREFETCH, 4 * BLOCK_N)
    wait_for_input(PDL)
    m_ok = (m < M)[:, None]
    x_ptr = x + m.to(tl.int64)[:, None] * K + k[None, :]
    w_ptr = w + n_in.to(tl.int64)[None, :] * K + k[:, None]
    up_ptr = w_ptr + tl.cast(N, tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    added = acc
    if HAS_RESIDUAL and RESIDUAL_FIRST:
        added = _load_tile(residual, M, N, pid_m * BLOCK_M, pid_n * BLOCK_N, BLOCK_M, BLOCK_N)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_ptr, mask=m_ok, other=0.0)
            b = tl.load(w_ptr)
        else:
            k_ok = k < K - start
            a = tl.load(x_ptr, mask=m_ok & k_ok[None, :], other=0.0)
            b = tl.load(w_ptr, mask=k_ok[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
        if ACTIVATION != 0:
            b_up = tl.load(up_ptr) if EVEN_K else tl.load(up_ptr, mask=(k < K - start)[:, None], other=0.0)
            acc_up = tl.dot(a, b_up, acc_up)
            up_ptr += BLOCK_K
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K
    release_late(PDL)
    if HAS_RESIDUAL and not RESIDUAL_FIRST:
        added = _load_tile(residual, M, N, pid_m * BLOCK_M, pid_n * BLOCK_N, BLOCK_M, BLOCK_N)
    _store_tile(
        acc, acc_up, out, bias, added, copy, copy_stride, M, N, pid_m * BLOCK_M, pid_n * BLOCK_N,
        BLOCK_M, BLOCK_N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, HAS_COPY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _gemm_wide_kernel(
    x_desc, w_desc, out, bias, residual, copy, copy_stride, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    HAS_COPY: tl.constexpr,
):  # fmt: skip
    """Persistent: each program walks over output tiles; tiles arrive through the tensor memory engine."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, NUM_PROGRAMS):
        group = tile // (GROUP_M * num_n)
        first_m = group * GROUP_M
        size_m = min(num_m - first_m, GROUP_M)
        m0 = (first_m + (tile % (GROUP_M * num_n)) % size_m) * BLOCK_M
        n0 = ((tile % (GROUP_M * num_n)) // size_m) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc_up = acc
        for start in range(0, K, BLOCK_K):
            a = x_desc.load([m0, start])
            acc = tl.dot(a, w_desc.load([n0, start]).T, acc)
            if ACTIVATION != 0:
                acc_up = tl.dot(a, w_desc.load([N + n0, start]).T, acc_up)
        added = acc
        if HAS_RESIDUAL:
            added = _load_tile(residual, M, N, m0, n0, BLOCK_M, BLOCK_N)
        _store_tile(
            acc, acc_up, out, bias, added, copy, copy_stride, M, N, m0, n0,
            BLOCK_M, BLOCK_N, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, HAS_COPY,
        )  # fmt: skip


def gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tile: Tile,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    copy: Tensor | None = None,
    activation: int = PLAIN,
    pdl: int = OFF,
    prefetch: int = 0,
    num_sms: int = 132,
    residual_first: bool = False,
) -> Tensor:
    """out = activation(x @ weight.T + bias) + residual; `copy` (a column slice of a float32 matrix) gets it too.

    x [M, K] and weight [N or 2N, K] in bfloat16 or float16; out [M, N] float32 or the weights' dtype; bias float32
    [N or 2N]. `residual` may be `out` itself: a program reads its tile before it writes it. residual_first: it does so
    before the product, which hides the read but holds registers: for tiles of few rows.
    """
    rows, depth = x.shape
    cols = out.shape[1]
    flags: dict[str, Any] = {
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_COPY": copy is not None,
    }
    copy_stride = 0 if copy is None else copy.stride(0)
    extra = (
        out if bias is None else bias,
        out if residual is None else residual,
        out if copy is None else copy,
        copy_stride,
    )
    block_cols = tile.cols if activation == PLAIN else max(16, tile.cols // 2)
    num_tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(cols, block_cols)
    if tile.wide:
        num_programs = num_sms * tile.per_sm
        x_desc = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        w_desc = TensorDescriptor.from_tensor(weight, [block_cols, tile.depth])
        _gemm_wide_kernel[(min(num_programs, num_tiles),)](
            x_desc, w_desc, out, *extra, rows, cols, depth,
            BLOCK_M=tile.rows, BLOCK_N=block_cols, BLOCK_K=tile.depth, GROUP_M=tile.group,
            NUM_PROGRAMS=num_programs, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **flags,
        )  # fmt: skip
        return out
    launch = launch_options(pdl)
    _gemm_kernel[(num_tiles,)](
        x, weight, out, *extra, rows, cols, depth,
        BLOCK_M=tile.rows, BLOCK_N=block_cols, BLOCK_K=tile.depth, GROUP_M=tile.group, EVEN_K=depth % tile.depth == 0,
        RESIDUAL_FIRST=residual_first and residual is not None,
        PREFETCH=min(prefetch, depth * x.element_size()) // 16 * 16, PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages, enable_fp_fusion=False, **launch, **flags,
    )  # fmt: skip
    return out


def gemm_dtype_ok(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)
