// One vector vocabulary for every CPU: float vectors of VW lanes, written with compiler vector types so that the
// same source compiles to AVX-512, AVX2, NEON or plain SSE. Contract: every operation here rounds the same way in
// every place it is used. The sources are compiled with -ffp-contract=off, so a fused multiply-add happens where
// vfma() is written and nowhere else.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ES_AVX512 1
#else
#define ES_AVX512 0
#endif
// bf16 dot products in hardware. A tile unit (AMX) would be a further kernel kind beside this one.
#if ES_AVX512 && defined(__AVX512BF16__)
#define ES_DPBF16 1
#else
#define ES_DPBF16 0
#endif

namespace es {

constexpr int VW = ES_AVX512 ? 16 : 8;

typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vh __attribute__((vector_size(2 * VW)));

template <class T, class P>
inline T load(const P* p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class T, class P>
inline void store(P* p, T v) {
    memcpy(p, &v, sizeof v);
}

inline vf loadf(const float* p) { return load<vf>(p); }

inline vf splat(float x) {
#if ES_AVX512
    return (vf)_mm512_set1_ps(x);
#else
    return x - vf{};
#endif
}

// The first n lanes; the others are zero.
inline vf load_part(const float* p, int n) {
#if ES_AVX512
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    vf v = {};
    memcpy(&v, p, sizeof(float) * n);
    return v;
#endif
}

// The first n lanes; the others hold `rest`.
inline vf load_or(const float* p, int n, float rest) {
    vf v = splat(rest);
    memcpy(&v, p, sizeof(float) * n);
    return v;
}

inline vf load_upto(const float* p, int n) { return n >= VW ? loadf(p) : load_part(p, n); }

inline void store_upto(float* p, vf v, int n) {
    if (n >= VW) {
        store(p, v);
    } else {
        memcpy(p, &v, sizeof(float) * n);
    }
}

inline vi splati(int32_t x) { return x - vi{}; }
inline vu splatu(uint32_t x) { return x - vu{}; }

inline vi lanes() {  // 0, 1, 2, ..
    vi v;
    for (int i = 0; i < VW; i++) v[i] = i;
    return v;
}

inline vf vfma(vf a, vf b, vf c) {
#if ES_AVX512
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline vf vmax(vf a, vf b) {
#if ES_AVX512
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Sum and maximum over the lanes, always by halves.
inline float hsum(vf v) {
#if ES_AVX512
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
#else
    for (int w = VW / 2; w; w /= 2)
        for (int i = 0; i < w; i++) v[i] += v[i + w];
    return v[0];
#endif
}

inline float hmax(vf v) {
#if ES_AVX512
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
#else
    float m = v[0];
    for (int i = 1; i < VW; i++) m = v[i] > m ? v[i] : m;
    return m;
#endif
}

// float32 -> bfloat16, nearest even; a NaN stays a NaN.
inline vh to_bf16(vf v) {
#if ES_DPBF16
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v;
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (u >> 16) | 0x40u;
    r = (vu)((u & 0x7fffffffu) > 0x7f800000u ? nan : r);
    return __builtin_convertvector(r, vh);
#endif
}

inline vf from_bf16(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }
inline vf load_bf16(const uint16_t* p) { return from_bf16(load<vh>(p)); }

#if ES_AVX512
// 2^x = 2^floor(x) * 2^f with f in [0, 1): one instruction each for f and for the scaling; 2^-inf = 0.
template <int N>
inline vf exp2_poly(vf x, const float (&c)[N]) {
    const vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);
    vf p = splat(c[N - 1]);
    for (int i = N - 2; i >= 0; i--) p = vfma(p, f, splat(c[i]));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// |relative error| < 1e-7; least-maximum fit of 2^f on [0, 1] with p(0) = 1.
inline vf exp2v(vf x) {
    constexpr float c[] = {1.0f, 0.69314706f, 0.2402293f, 0.055485282f, 0.0096754516f, 0.0012467847f, 0.00021612915f};
    return exp2_poly(x, c);
}

// |relative error| < 3e-6: enough where the result is rounded to bf16.
inline vf exp2_short(vf x) {
    constexpr float c[] = {1.0f, 0.69304484f, 0.2412802f, 0.052242473f, 0.013426685f};
    return exp2_poly(x, c);
}
#else
// 2^x for x <= 127, 0 below -126. |relative error| < 2e-7. Polynomial: least-maximum fit of 2^f on [-1/2, 1/2].
inline vf exp2v(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
    vf t = x + magic;
    vf f = x - (t - magic);
    vf p = splat(0.0001534580806f);
    p = vfma(p, f, splat(0.0013399930904f));
    p = vfma(p, f, splat(0.0096184890717f));
    p = vfma(p, f, splat(0.0555032864213f));
    p = vfma(p, f, splat(0.2402264624834f));
    p = vfma(p, f, splat(0.6931471824646f));
    p = vfma(p, f, splat(1.0f));
    vf r = (vf)((vi)p + ((vi)t << 23));
    return x < -126.0f ? vf{} : r;
}
#endif

constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.693147180559945f;

// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)]: f - f^2/2 + f^3 P(f), P a least-maximum fit.
inline vf log1p_core(vf f) {
    vf p = splat(-0.07859611511230469f);
    p = vfma(p, f, splat(0.12881647050380707f));
    p = vfma(p, f, splat(-0.13128754496574402f));
    p = vfma(p, f, splat(0.14181192219257355f));
    p = vfma(p, f, splat(-0.16624553501605988f));
    p = vfma(p, f, splat(0.2000228613615036f));
    p = vfma(p, f, splat(-0.25000810623168945f));
    p = vfma(p, f, splat(0.33333316445350647f));
    vf f2 = f * f;
    return vfma(f2, vfma(p, f, splat(-0.5f)), f);
}

// Natural logarithm of a positive normal float. |error| < 2e-7 * max(1, |result|).
inline vf logv(vf x) {
    vi b = (vi)x;
    vi e = (b - 0x3f3504f3) >> 23;  // exponent that leaves a mantissa in [sqrt(1/2), sqrt(2))
    vf m = (vf)(b - (e << 23));
    return vfma(__builtin_convertvector(e, vf), splat(LN2), log1p_core(m - 1.0f));
}

inline vf sigmoid_times(vf x, vf slope_times_x) {  // x / (1 + exp(-slope_times_x))
    vf z = slope_times_x * splat(-LOG2E);
    z = z < 126.0f ? z : splat(126.0f);
    vf y = x / (1.0f + exp2v(z));
    return slope_times_x < -87.0f ? vf{} : y;
}

inline vf silu(vf x) { return sigmoid_times(x, x); }

// GELU with tanh: x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline vf gelu_tanh(vf x) {
    vf u = vfma(x * x * x, splat(0.044715f), x) * splat(1.5957691216057308f);
    return sigmoid_times(x, u);
}

}  // namespace es
