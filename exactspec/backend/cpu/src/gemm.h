// Matrix products with prepacked weights. Contract: each output is one chain of multiply-adds over K from first to
// last, started at zero, whatever the number of rows, the row tile, the block or the thread. Work is split by output
// blocks only.
#pragma once
#include <algorithm>

#include "api.h"
#include "simd.h"
#include "threads.h"

namespace es {

constexpr int BLOCK = 2 * VW;                    // outputs of a block
constexpr int MAX_TILE = ES_AVX512 ? 10 : 4;     // rows of a register tile: 20 (8) accumulators

// How rows are stored where they meet a weight.
enum class Act { bf16, f32_rounded, f32 };

inline Act act_of(int dtype) {
    if (dtype == ES_F32) return Act::f32;
    return ES_DPBF16 ? Act::bf16 : Act::f32_rounded;
}

inline size_t act_size(Act kind) { return kind == Act::bf16 ? 2 : 4; }

// Stores one vector of a row at element i, rounded as the weight's dtype asks.
inline void put_act(void* row, size_t i, vf v, Act kind) {
    if (kind == Act::bf16) {
        store((uint16_t*)row + i, to_bf16(v));
    } else {
        store((float*)row + i, kind == Act::f32 ? v : from_bf16(to_bf16(v)));
    }
}

// Rows of activations. The stride is an odd number of cache lines, so that rows of a tile do not share cache sets;
// elements from the width up to a whole vector are zero because put_act stores whole vectors.
struct ActRows {
    char* data = nullptr;
    size_t stride = 0;  // bytes
    Act kind = Act::f32;

    static size_t stride_of(int width, Act kind) {
        size_t lines = ((size_t)(width + BLOCK) * act_size(kind) + 63) / 64;
        return (lines | 1) * 64;
    }
    void* row(int r) const { return data + (size_t)r * stride; }
};

inline int num_blocks(const EsLinear& l) { return l.glu ? (l.out / 2 + VW - 1) / VW : (l.out + BLOCK - 1) / BLOCK; }
inline int num_steps(const EsLinear& l) { return l.dtype == ES_BF16 ? (l.in + 1) / 2 : l.in; }
inline size_t block_bytes(const EsLinear& l) { return (size_t)num_steps(l) * BLOCK * 4; }
inline const char* block_at(const EsLinear& l, int b) { return (const char*)l.data + b * block_bytes(l); }

// The weights that a member reads first in its share of a product: worth fetching before the barrier.
Ahead ahead_of(const EsLinear& l, const Member& m);

// acc[MAX_TILE][2][VW]: the products of `rows` rows (<= MAX_TILE) with one block. `fetch` points at the memory to
// prefetch meanwhile, `lines` (0, 1 or 2) cache lines per step.
using Kernel = void (*)(const char* x, size_t stride, const char* w, int steps, const char* fetch, float* acc);
Kernel kernel_for(int dtype, int rows, int lines);

// Calls epilogue(block, first_row, rows, acc) for every tile of blocks [range). Tiles are of nearly equal height.
template <class Epilogue>
void product(const EsLinear& l, const ActRows& x, int rows, Range range, Ahead next, Epilogue&& epilogue) {
    constexpr size_t CHUNK = 512 << 10;  // bytes of rows that stay in the second-level cache while blocks go by
    alignas(64) float acc[MAX_TILE * BLOCK];
    const int chunk = std::max<int>(4, CHUNK / (x.stride * MAX_TILE)) * MAX_TILE, chunks = (rows + chunk - 1) / chunk;
    const int steps = num_steps(l);
    const size_t bytes = block_bytes(l);
    for (int c = 0; c < chunks; c++) {
        const Range part = share(rows, c, chunks);
        const int tiles = (part.end - part.begin + MAX_TILE - 1) / MAX_TILE;
        const char* after = c + 1 < chunks ? block_at(l, range.begin) : next.bytes >= bytes ? next.begin : nullptr;
        for (int b = range.begin; b < range.end; b++) {
            const char* w = block_at(l, b);
            const char* fetch = b + 1 < range.end ? w + bytes : after;
            for (int t = 0; t < tiles; t++) {
                const Range r = share(part.end - part.begin, t, tiles);
                const int first = part.begin + r.begin, count = r.end - r.begin;
                // The next block's lines are spread over the first tile, or over the first two.
                const int lines = !fetch ? 0 : tiles == 1 ? 2 : t < 2 ? 1 : 0;
                const char* from = fetch ? fetch + (t < 2 ? t * (bytes / 2) : 0) : w;
                kernel_for(l.dtype, count, lines)((const char*)x.row(first), x.stride, w, steps, from, acc);
                epilogue(b, first, count, acc);
            }
        }
    }
}

// y[row * stride + column] = product + bias (add: += ), for columns below l.out.
void product_store(const EsLinear& l, const ActRows& x, int rows, Range range, Ahead next, float* y, size_t stride,
                   bool add);

// out row = activation(gate) * up, for the glu layout.
void product_glu(const EsLinear& l, const ActRows& x, int rows, Range range, Ahead next, int activation,
                 const ActRows& out);

}  // namespace es
