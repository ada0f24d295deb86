#include "gemm.h"

#include <array>
#include <utility>

namespace es {
namespace {

#if defined(__clang__)
#define ES_UNROLL _Pragma("unroll")
#else
#define ES_UNROLL _Pragma("GCC unroll 16")
#endif

template <int LINES>
inline void fetch_lines(const char*& p) {
    if constexpr (LINES >= 1) __builtin_prefetch(p, 0, 2);
    if constexpr (LINES >= 2) __builtin_prefetch(p + 64, 0, 2);
    p += 64 * LINES;
}

template <int ROWS>
inline void store_acc(const vf (&sum)[ROWS][2], float* acc) {
    ES_UNROLL
    for (int r = 0; r < ROWS; r++) {
        store(acc + r * BLOCK, sum[r][0]);
        store(acc + r * BLOCK + VW, sum[r][1]);
    }
}

#if ES_DPBF16
// bf16 weights, bf16 rows: one step multiplies a pair of inputs.
template <int ROWS, int LINES>
void kernel_dp(const char* x, size_t stride, const char* w, int steps, const char* fetch, float* acc) {
    vf sum[ROWS][2] = {};
    for (int s = 0; s < steps; s++) {
        __m512bh w0 = (__m512bh)_mm512_load_si512(w), w1 = (__m512bh)_mm512_load_si512(w + 64);
        w += 128;
        fetch_lines<LINES>(fetch);
        ES_UNROLL
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + 4 * (size_t)s, 4);
            __m512bh xb = (__m512bh)_mm512_set1_epi32(pair);
            sum[r][0] = (vf)_mm512_dpbf16_ps((__m512)sum[r][0], xb, w0);
            sum[r][1] = (vf)_mm512_dpbf16_ps((__m512)sum[r][1], xb, w1);
        }
    }
    store_acc<ROWS>(sum, acc);
}
#else
// bf16 weights without dot-product hardware: the pair is widened and multiplied in float32, even input first.
template <int ROWS, int LINES>
void kernel_widen(const char* x, size_t stride, const char* w, int steps, const char* fetch, float* acc) {
    vf sum[ROWS][2] = {};
    for (int s = 0; s < steps; s++) {
        vu p0 = load<vu>(w), p1 = load<vu>(w + 4 * VW);
        w += 8 * VW;
        fetch_lines<LINES>(fetch);
        vf even0 = (vf)(p0 << 16), even1 = (vf)(p1 << 16);
        vf odd0 = (vf)(p0 & 0xffff0000u), odd1 = (vf)(p1 & 0xffff0000u);
        ES_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const float* xr = (const float*)(x + r * stride) + 2 * (size_t)s;
            sum[r][0] = vfma(splat(xr[1]), odd0, vfma(splat(xr[0]), even0, sum[r][0]));
            sum[r][1] = vfma(splat(xr[1]), odd1, vfma(splat(xr[0]), even1, sum[r][1]));
        }
    }
    store_acc<ROWS>(sum, acc);
}
#endif

template <int ROWS, int LINES>
void kernel_f32(const char* x, size_t stride, const char* w, int steps, const char* fetch, float* acc) {
    vf sum[ROWS][2] = {};
    for (int s = 0; s < steps; s++) {
        vf w0 = load<vf>(w), w1 = load<vf>(w + 4 * VW);
        w += 8 * VW;
        fetch_lines<LINES>(fetch);
        ES_UNROLL
        for (int r = 0; r < ROWS; r++) {
            vf xv = splat(((const float*)(x + r * stride))[s]);
            sum[r][0] = vfma(xv, w0, sum[r][0]);
            sum[r][1] = vfma(xv, w1, sum[r][1]);
        }
    }
    store_acc<ROWS>(sum, acc);
}

using Table = std::array<std::array<Kernel, 3>, MAX_TILE>;

template <int... R>
Table bf16_table(std::integer_sequence<int, R...>) {
#if ES_DPBF16
    return {{{{kernel_dp<R + 1, 0>, kernel_dp<R + 1, 1>, kernel_dp<R + 1, 2>}}...}};
#else
    return {{{{kernel_widen<R + 1, 0>, kernel_widen<R + 1, 1>, kernel_widen<R + 1, 2>}}...}};
#endif
}

template <int... R>
Table f32_table(std::integer_sequence<int, R...>) {
    return {{{{kernel_f32<R + 1, 0>, kernel_f32<R + 1, 1>, kernel_f32<R + 1, 2>}}...}};
}

const Table BF16_KERNELS = bf16_table(std::make_integer_sequence<int, MAX_TILE>{});
const Table F32_KERNELS = f32_table(std::make_integer_sequence<int, MAX_TILE>{});

}  // namespace

Kernel kernel_for(int dtype, int rows, int lines) {
    return (dtype == ES_BF16 ? BF16_KERNELS : F32_KERNELS)[rows - 1][lines];
}

Ahead ahead_of(const EsLinear& l, const Member& m) {
    constexpr size_t MOST = 384 << 10;  // of a second-level cache of 1 MB and more
    Range r = m.share(num_blocks(l));
    size_t bytes = (r.end - r.begin) * block_bytes(l);
    return {block_at(l, r.begin), bytes < MOST ? bytes : MOST};
}

void product_store(const EsLinear& l, const ActRows& x, int rows, Range range, Ahead next, float* y, size_t stride,
                   bool add) {
    product(l, x, rows, range, next, [&](int b, int row0, int count, const float* acc) {
        for (int v = 0; v < 2; v++) {
            const int column = b * BLOCK + v * VW, left = l.out - column;
            if (left <= 0) break;
            const vf bias = l.bias ? loadf(l.bias + column) : vf{};
            for (int r = 0; r < count; r++) {
                float* to = y + (size_t)(row0 + r) * stride + column;
                vf sum = loadf(acc + r * BLOCK + v * VW) + bias;
                if (add) sum = load_upto(to, left) + sum;
                store_upto(to, sum, left);
            }
        }
    });
}

void product_glu(const EsLinear& l, const ActRows& x, int rows, Range range, Ahead next, int activation,
                 const ActRows& out) {
    product(l, x, rows, range, next, [&](int b, int row0, int count, const float* acc) {
        const vf gate_bias = l.bias ? loadf(l.bias + b * BLOCK) : vf{};
        const vf up_bias = l.bias ? loadf(l.bias + b * BLOCK + VW) : vf{};
        for (int r = 0; r < count; r++) {
            const vf gate = loadf(acc + r * BLOCK) + gate_bias;
            const vf up = loadf(acc + r * BLOCK + VW) + up_bias;
            const vf h = (activation == ES_SILU ? silu(gate) : gelu_tanh(gate)) * up;
            put_act(out.row(row0 + r), (size_t)b * VW, h, out.kind);
        }
    });
}

}  // namespace es
