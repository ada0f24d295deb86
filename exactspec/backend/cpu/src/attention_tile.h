// One block of KEYS keys and values of one kv head, packed once and used by all rows that see it.
#pragma once
#include "attention.h"
#include "memory.h"

namespace es {

#if defined(__clang__)
#define ES_UNROLL_TILE _Pragma("unroll")
#else
#define ES_UNROLL_TILE _Pragma("GCC unroll 16")
#endif

constexpr int TILE_ROWS = ES_AVX512 ? 6 : 2;  // rows of a register tile
constexpr int VECS = 4;                       // vectors of a register tile

// Cache lines of the next block, fetched a few at a time between multiplications: asking for all of them at once would
// fill the queue of outstanding misses and stall everything behind it.
struct Fetch {
    const char* const* next = nullptr;
    const char* const* end = nullptr;
    int per_turn = 0;
    void turn() {
        for (int i = 0; i < per_turn && next < end; i++) __builtin_prefetch(*next++, 0, 2);
    }
};

// One row's step of the online softmax over a block. score [KEYS]: raw products; keys outside [low, high) get weight 0.
// Writes the weights 2^(scale * (score - max)), updates the row's maximum (of the raw products, so scale must be
// positive) and its sum of weights; returns the factor for what was summed before.
template <class Tile>
inline float softmax_step(const float* score, float scale, int low, int high, float& max_score, vf& sum,
                          typename Tile::Weight* weight) {
    constexpr int N = KEYS / VW;
    vf s[N];
    vf top = splat(-INFINITY);
    for (int i = 0; i < N; i++) s[i] = loadf(score + i * VW);
    if (low != 0 || high != KEYS) {
        vi lane = lanes();
        for (int i = 0; i < N; i++, lane += VW) s[i] = (lane >= low) & (lane < high) ? s[i] : splat(-INFINITY);
    }
    for (int i = 0; i < N; i++) top = vmax(top, s[i]);
    const float before = max_score, now = std::max(before, hmax(top));
    max_score = now;
    for (int i = 0; i < N; i++) s[i] = vfma(s[i], splat(scale), splat(-now * scale));
    const vf total = Tile::weights(s, weight);
    const float factor = exp2v(splat((before - now) * scale))[0];
    sum = vfma(sum, splat(factor), total);
    return factor;
}

// Keys and values as float32: for float32 pools, and for bf16 pools without dot-product hardware.
template <class E>
class FloatTile {
  public:
    using Elem = E;
    using Query = float;
    using Weight = float;

    FloatTile(Carver& carve, int dim)
        : k_(carve.take<float>((size_t)KEYS * dim)), v_(carve.take<float>((size_t)KEYS * dim)) {}

    static vf weights(const vf (&x)[KEYS / VW], float* to) {
        vf total = {};
        for (int i = 0; i < KEYS / VW; i++) {
            const vf w = exp2v(x[i]);
            store(to + i * VW, w);
            total = total + w;
        }
        return total;
    }

    static int pack_turns(int dim) { return KEYS * dim / VW; }

    // k_ [dim][KEYS], v_ [KEYS][dim]; keys from n on are zero.
    void pack(const Elem* const* k, const Elem* const* v, int n, int dim, Fetch& fetch) {
        for (int j = 0; j < KEYS; j++)
            for (int i = 0; i < dim; i += VW) {
                fetch.turn();
                store(v_ + (size_t)j * dim + i, j < n ? widen(v[j] + i) : vf{});
                const vf key = j < n ? widen(k[j] + i) : vf{};
                for (int l = 0; l < VW; l++) k_[(size_t)(i + l) * KEYS + j] = key[l];
            }
    }

    template <int ROWS>
    void scores(const Query* const* q, int dim, float* out, Fetch& fetch) const {
        for (int c = 0; c < KEYS; c += VECS * VW) {
            vf s[ROWS][VECS] = {};
            for (int d = 0; d < dim; d++) {
                fetch.turn();
                vf key[VECS];
                for (int i = 0; i < VECS; i++) key[i] = loadf(k_ + (size_t)d * KEYS + c + i * VW);
                ES_UNROLL_TILE
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < VECS; i++) s[r][i] = vfma(splat(q[r][d]), key[i], s[r][i]);
            }
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < VECS; i++) store(out + r * KEYS + c + i * VW, s[r][i]);
        }
    }

    template <int ROWS>
    void add_values(const Weight* w, const float* factor, int low, int high, int dim, float* sums) const {
        int c = 0;
        for (; c + VECS * VW <= dim; c += VECS * VW) add_chunk<ROWS, VECS>(w, factor, low, high, dim, c, sums);
        for (; c < dim; c += VW) add_chunk<ROWS, 1>(w, factor, low, high, dim, c, sums);
    }

  private:
    static vf widen(const float* p) { return loadf(p); }
    static vf widen(const uint16_t* p) { return load_bf16(p); }

    template <int ROWS, int N>
    void add_chunk(const Weight* w, const float* factor, int low, int high, int dim, int c, float* sums) const {
        vf s[ROWS][N];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++) s[r][i] = loadf(sums + (size_t)r * dim + c + i * VW) * factor[r];
        for (int j = low; j < high; j++) {
            vf value[N];
            for (int i = 0; i < N; i++) value[i] = loadf(v_ + (size_t)j * dim + c + i * VW);
            ES_UNROLL_TILE
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < N; i++) s[r][i] = vfma(splat(w[r * KEYS + j]), value[i], s[r][i]);
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < N; i++) store(sums + (size_t)r * dim + c + i * VW, s[r][i]);
    }

    float *k_, *v_;
};

}  // namespace es
