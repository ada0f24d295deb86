// Counter-based Gumbel noise: Philox 4x32 with 7 rounds (Salmon et al. 2011, sec. 4; 7 rounds pass BigCrush there).
// Token id i takes word (i % 64) / 16 of the block with counter (i / 64 * 16 + i % 16, stream, position low, position
// high) under key (seed low, seed high). The rule does not know the vocabulary's size or the vector width.
#include "api.h"
#include "simd.h"
#include "threads.h"

namespace es {
namespace {

constexpr uint32_t MUL0 = 0xD2511F53u, MUL1 = 0xCD9E8D57u;   // multipliers of the paper
constexpr uint32_t WEYL0 = 0x9E3779B9u, WEYL1 = 0xBB67AE85u;  // key schedule
constexpr int ROUNDS = 7;
constexpr int GROUP = 64;  // tokens of 16 blocks

struct Counter {
    vu c[4];
};

inline void multiply(vu a, uint32_t b, vu& high, vu& low) {
#if ES_AVX512
    const __m512i even = _mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), _mm512_set1_epi64(b));
    high = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#else
    for (int i = 0; i < VW; i++) {
        const uint64_t p = (uint64_t)a[i] * b;
        high[i] = (uint32_t)(p >> 32);
        low[i] = (uint32_t)p;
    }
#endif
}

inline void philox(Counter& x, uint32_t k0, uint32_t k1) {
    for (int r = 0; r < ROUNDS; r++, k0 += WEYL0, k1 += WEYL1) {
        vu h0, l0, h1, l1;
        multiply(x.c[0], MUL0, h0, l0);
        multiply(x.c[2], MUL1, h1, l1);
        x = {{h1 ^ x.c[1] ^ k0, l1, h0 ^ x.c[3] ^ k1, l0}};
    }
}

// -log(-log(u)), u = (r + 1/2) / 2^32. Near 1 the distance 1 - u keeps full precision, so the right tail is exact to
// 2^-33; the result lies in [-3.2, 22.9].
inline vf gumbel_of(vu r) {
    const float unit = 0x1p-32f;
    const vf u = (__builtin_convertvector(r, vf) + 0.5f) * unit;
    const vf rest = (__builtin_convertvector(~r, vf) + 0.5f) * unit;
    vi e = ((vi)u - 0x3f3504f3) >> 23;  // 0 for u in [sqrt(1/2), 1]
    const vf m = (vf)((vi)u - (e << 23));
    const vf f = u > 0.70710678f ? -rest : m - 1.0f;
    return -logv(-vfma(__builtin_convertvector(e, vf), splat(LN2), log1p_core(f)));
}

void fill_group(uint64_t seed, uint64_t position, uint32_t stream, int group, float* to) {
    for (int half = 0; half < 16; half += VW) {
        Counter x;
        x.c[0] = (vu)lanes() + (uint32_t)(group * 16 + half);
        x.c[1] = splatu(stream);
        x.c[2] = splatu((uint32_t)position);
        x.c[3] = splatu((uint32_t)(position >> 32));
        philox(x, (uint32_t)seed, (uint32_t)(seed >> 32));
        for (int w = 0; w < 4; w++) store(to + w * 16 + half, gumbel_of(x.c[w]));
    }
}

}  // namespace
}  // namespace es

using namespace es;

extern "C" void es_gumbel(const int64_t* seeds, const int64_t* positions, uint32_t stream, int32_t rows, int32_t vocab,
                          float* y) {
    const int groups = (vocab + GROUP - 1) / GROUP;
    parallel(
        [&](const Member& m) {
            const Range mine = m.share(rows * groups);
            for (int i = mine.begin; i < mine.end; i++) {
                const int row = i / groups, group = i % groups, left = vocab - group * GROUP;
                float* to = y + (size_t)row * vocab + (size_t)group * GROUP;
                if (left >= GROUP) {
                    fill_group((uint64_t)seeds[row], (uint64_t)positions[row], stream, group, to);
                } else {
                    float last[GROUP];
                    fill_group((uint64_t)seeds[row], (uint64_t)positions[row], stream, group, last);
                    memcpy(to, last, left * sizeof(float));
                }
            }
        },
        rows * groups < 64 ? 1 : 1 << 20);
}

// One block of random words, for tests.
extern "C" void es_philox(const uint32_t* counter4, const uint32_t* key2, uint32_t* out4) {
    Counter x;
    for (int i = 0; i < 4; i++) x.c[i] = splatu(counter4[i]);
    philox(x, key2[0], key2[1]);
    for (int i = 0; i < 4; i++) out4[i] = x.c[i][0];
}
