// Operations within one row. Each reduces in an order fixed by the row's width alone.
#pragma once
#include "gemm.h"

namespace es {

// 1 / sqrt(mean(x^2) + eps): four running vectors, added in pairs at the end.
inline float inverse_rms(const float* x, int width, float eps) {
    vf s[4] = {};
    int i = 0;
    for (; i + 4 * VW <= width; i += 4 * VW) {
        for (int j = 0; j < 4; j++) {
            vf v = loadf(x + i + j * VW);
            s[j] = vfma(v, v, s[j]);
        }
    }
    for (int j = 0; i < width; i += VW, j++) {
        vf v = load_upto(x + i, width - i);
        s[j] = vfma(v, v, s[j]);
    }
    return 1.0f / sqrtf(hsum((s[0] + s[1]) + (s[2] + s[3])) / (float)width + eps);
}

// RMSNorm (Zhang & Sennrich 2019, eq. 4): to(i, lanes, v) receives the normed vector at element i.
template <class To>
inline void rms_norm_row(const float* x, const float* weight, int width, float eps, To&& to) {
    const vf scale = splat(inverse_rms(x, width, eps));
    for (int i = 0; i < width; i += VW) {
        const int n = width - i;
        to(i, n, (load_upto(x + i, n) * scale) * load_upto(weight + i, n));
    }
}

inline void round_row(const float* x, int width, const ActRows& out, int row) {
    for (int i = 0; i < width; i += VW) put_act(out.row(row), i, load_upto(x + i, width - i), out.kind);
}

inline void norm_to_act(const float* x, const float* weight, int width, float eps, const ActRows& out, int row) {
    rms_norm_row(x, weight, width, eps, [&](int i, int, vf v) { put_act(out.row(row), i, v, out.kind); });
}

inline void norm_in_place(float* x, const float* weight, int width, float eps) {
    rms_norm_row(x, weight, width, eps, [&](int i, int n, vf v) { store_upto(x + i, v, n); });
}

// Adds the norm of a branch to the residual row (post-norms).
inline void add_normed(float* x, const float* branch, const float* weight, int width, float eps) {
    rms_norm_row(branch, weight, width, eps,
                 [&](int i, int n, vf v) { store_upto(x + i, load_upto(x + i, n) + v, n); });
}

// Rotary embedding (Su et al. 2021, sec. 3.2), rotate-half pairs (i, i + half), on one head in place.
inline void rotate(float* head, const EsRope& rope, int position) {
    const float* c = rope.cos + (size_t)position * rope.half;
    const float* s = rope.sin + (size_t)position * rope.half;
    float* second = head + rope.half;
    for (int i = 0; i < rope.half; i++) {
        const float a = head[i], b = second[i];
        head[i] = a * c[i] - b * s[i];
        second[i] = b * c[i] + a * s[i];
    }
}

// Stores one head [dim, a multiple of 16] in the pool's dtype.
inline void store_head(void* to, const float* head, int dim, int dtype) {
    for (int i = 0; i < dim; i += VW) {
        if (dtype == ES_BF16) {
            store((uint16_t*)to + i, to_bf16(loadf(head + i)));
        } else {
            store((float*)to + i, loadf(head + i));
        }
    }
}

}  // namespace es
