// The block of keys and values for bf16 dot-product hardware: keys as [dim / 2][KEYS] pairs of neighbouring
// dimensions, values as [KEYS / 2][dim] pairs of neighbouring keys.
#pragma once
#include "attention_tile.h"

#if ES_DPBF16
namespace es {

// 16 rows of 16 dwords -> 16 columns.
inline void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {  // r[4 g + i] holds column 4 lane + i of rows 4 g .. 4 g + 3
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// Word 2 i of half h is word 16 h + i of the first operand, word 2 i + 1 the same of the second (index + 32).
struct InterleaveTable {
    alignas(64) uint16_t half[2][32];
    constexpr InterleaveTable() : half{} {
        for (int i = 0; i < 64; i++) half[i / 32][i % 32] = (uint16_t)(i / 2 + i % 2 * 32);
    }
    constexpr const uint16_t* operator[](int i) const { return half[i]; }
};
inline constexpr InterleaveTable INTERLEAVE;

class PairTile {
  public:
    using Elem = uint16_t;
    using Query = uint16_t;
    using Weight = uint16_t;

    PairTile(Carver& carve, int dim)
        : k_(carve.take<uint32_t>((size_t)KEYS * dim / 2)), v_(carve.take<uint32_t>((size_t)KEYS * dim / 2)) {}

    // Weights meet the values in bf16; their sum is taken of the rounded ones, so that they still add up to one.
    static vf weights(const vf (&x)[4], uint16_t* to) {
        const __m512bh one = (__m512bh)_mm512_set1_epi16(0x3f80);
        __m512 total = _mm512_setzero_ps();
        for (int i = 0; i < 4; i += 2) {
            const __m512bh w = _mm512_cvtne2ps_pbh((__m512)exp2_short(x[i + 1]), (__m512)exp2_short(x[i]));
            _mm512_store_si512(to + i * 16, (__m512i)w);
            total = _mm512_dpbf16_ps(total, w, one);
        }
        return (vf)total;
    }

    static int pack_turns(int dim) { return KEYS * ((dim / 2 + 15) / 16) + KEYS / 2; }

    void pack(const Elem* const* k, const Elem* const* v, int n, int dim, Fetch& fetch) {
        const int pairs = dim / 2;
        for (int g = 0; g < KEYS; g += 16)
            for (int c = 0; c < pairs; c += 16) pack_keys(k, g, n, c, pairs, fetch);
        for (int j = 0; j < KEYS; j += 2) {
            fetch.turn();
            pack_values(j < n ? v[j] : nullptr, j + 1 < n ? v[j + 1] : nullptr, j, dim);
        }
    }

    template <int ROWS>
    void scores(const Query* const* q, int dim, float* out, Fetch& fetch) const {
        __m512 s[ROWS][VECS];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < VECS; i++) s[r][i] = _mm512_setzero_ps();
        for (int d = 0; d < dim / 2; d++) {
            fetch.turn();
            __m512bh key[VECS];
            for (int i = 0; i < VECS; i++) key[i] = (__m512bh)_mm512_load_si512(k_ + (size_t)d * KEYS + i * 16);
            ES_UNROLL_TILE
            for (int r = 0; r < ROWS; r++) {
                const __m512bh x = pair_at(q[r] + 2 * d);
                for (int i = 0; i < VECS; i++) s[r][i] = _mm512_dpbf16_ps(s[r][i], x, key[i]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < VECS; i++) store(out + r * KEYS + i * 16, s[r][i]);
    }

    template <int ROWS>
    void add_values(const Weight* w, const float* factor, int low, int high, int dim, float* sums) const {
        int c = 0;
        for (; c + VECS * VW <= dim; c += VECS * VW) add_chunk<ROWS, VECS>(w, factor, low, high, dim, c, sums);
        for (; c < dim; c += VW) add_chunk<ROWS, 1>(w, factor, low, high, dim, c, sums);
    }

  private:
    static __m512bh pair_at(const uint16_t* p) {
        int32_t pair;
        memcpy(&pair, p, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }

    void pack_keys(const Elem* const* k, int g, int n, int c, int pairs, Fetch& fetch) {
        __m512i r[16];
        const int count = pairs - c < 16 ? pairs - c : 16;
        const __mmask16 mask = (__mmask16)((1u << count) - 1);
        for (int j = 0; j < 16; j++) {
            r[j] = g + j < n ? _mm512_maskz_loadu_epi32(mask, k[g + j] + 2 * c) : _mm512_setzero_si512();
            fetch.turn();
        }
        transpose16(r);
        for (int j = 0; j < count; j++) _mm512_store_si512(k_ + (size_t)(c + j) * KEYS + g, r[j]);
    }

    // Neighbouring keys a and b (zeros where absent), interleaved 32 dimensions at a time.
    void pack_values(const Elem* a, const Elem* b, int j, int dim) {
        uint32_t* to = v_ + (size_t)(j / 2) * dim;
        const __m512i first = _mm512_load_si512(INTERLEAVE[0]), second = _mm512_load_si512(INTERLEAVE[1]);
        for (int i = 0; i < dim; i += 32) {
            const __mmask32 mask = dim - i >= 32 ? 0xffffffffu : 0xffffu;
            const __m512i lo = a ? _mm512_maskz_loadu_epi16(mask, a + i) : _mm512_setzero_si512();
            const __m512i hi = b ? _mm512_maskz_loadu_epi16(mask, b + i) : _mm512_setzero_si512();
            _mm512_store_si512(to + i, _mm512_permutex2var_epi16(lo, first, hi));
            if (dim - i >= 32) _mm512_store_si512(to + i + 16, _mm512_permutex2var_epi16(lo, second, hi));
        }
    }

    // Keys low .. high - 1, whole pairs in the middle; at an odd end the other key of the pair is masked out, so that
    // whatever it holds (a NaN of a later row) cannot reach this row.
    template <int ROWS, int N>
    void add_chunk(const Weight* w, const float* factor, int low, int high, int dim, int c, float* sums) const {
        __m512 s[ROWS][N];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++) {
                const __m512 before = _mm512_loadu_ps(sums + (size_t)r * dim + c + i * 16);
                s[r][i] = _mm512_mul_ps(before, _mm512_set1_ps(factor[r]));
            }
        if (low % 2) add_pair<ROWS, N>(s, w, low / 2, dim, c, 0xffff0000u);
        for (int p = (low + 1) / 2; p < high / 2; p++) add_pair<ROWS, N>(s, w, p, dim, c, 0xffffffffu);
        if (high % 2) add_pair<ROWS, N>(s, w, high / 2, dim, c, 0x0000ffffu);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++) _mm512_storeu_ps(sums + (size_t)r * dim + c + i * 16, s[r][i]);
    }

    template <int ROWS, int N>
    void add_pair(__m512 (&s)[ROWS][N], const Weight* w, int p, int dim, int c, uint32_t mask) const {
        __m512bh value[N];
        for (int i = 0; i < N; i++) {
            __m512i v = _mm512_load_si512(v_ + (size_t)p * dim + c + i * 16);
            if (mask != 0xffffffffu) v = _mm512_and_si512(v, _mm512_set1_epi32((int32_t)mask));
            value[i] = (__m512bh)v;
        }
        ES_UNROLL_TILE
        for (int r = 0; r < ROWS; r++) {
            const __m512bh x = pair_at(w + r * KEYS + 2 * p);
            for (int i = 0; i < N; i++) s[r][i] = _mm512_dpbf16_ps(s[r][i], x, value[i]);
        }
    }

    uint32_t *k_, *v_;
};

}  // namespace es
#endif
