#include "attention.h"

#include <algorithm>

#include "attention_pairs.h"
#include "memory.h"

namespace es {
namespace {

constexpr int MOST_ROWS = 192;  // query rows (tokens x grouped heads) of a tile: their sums stay in the second cache

// Most cache lines of the keys and values of a block: float32, each row may begin within a line.
size_t lines_of_block(int dim) { return (size_t)2 * KEYS * (dim * 4 / 64 + 1); }

// The keys [low, high) that a row sees, and where they fall in the block that starts at `base`.
struct KeyRange {
    int low, high;
    KeyRange in_block(int base) const {
        return {std::max(low - base, 0), std::min(high - base, KEYS)};
    }
    bool empty() const { return low >= high; }
    bool operator==(const KeyRange& o) const { return low == o.low && high == o.high; }
};

KeyRange keys_of(const AttentionArgs& a, int layer, int request, int row) {
    const int position = a.batch->positions[row], kv_len = a.batch->kv_len[request];
    const int window = a.stack->layers[layer].window;
    const int high = a.batch->causal ? std::min(position + 1, kv_len) : kv_len;
    return {window > 0 ? std::max(position - window + 1, 0) : 0, high};
}

// One (tile, kv head) being worked on.
template <class Tile>
struct Work {
    const AttentionArgs& a;
    int layer, kv_head, dim, group, tokens;
    const AttentionTile& tile;
    Tile keys;
    float *sums, *max_score;  // [rows, dim], [rows]
    vf* weight_sum;           // [rows]: lanes are added up at the end only
    const char** lines;       // [lines_of_block]: what to fetch next
    Fetch fetch = {};

    using Elem = typename Tile::Elem;

    const typename Tile::Query* query(int r) const {
        const int row = tile.first_row + r / group, head = kv_head * group + r % group;
        return (const typename Tile::Query*)a.q + ((size_t)row * a.stack->num_heads + head) * dim;
    }

    const Elem* slot_row(const void* base, int slot) const {
        const int kv_heads = a.stack->num_kv_heads;
        return (const Elem*)base + (((size_t)layer * a.pool->num_slots + slot) * kv_heads + kv_head) * dim;
    }

    void load_block(int base, int kv_len) {
        const Elem *k[KEYS], *v[KEYS];
        const int32_t* slots = a.key_slots + a.key_offset[tile.request] + base;
        const int n = std::min(KEYS, kv_len - base);
        for (int j = 0; j < n; j++) {
            k[j] = slot_row(a.pool->k, slots[j]);
            v[j] = slot_row(a.pool->v, slots[j]);
        }
        keys.pack(k, v, n, dim);
        plan_fetch(slots + KEYS, std::min(KEYS, kv_len - base - KEYS));
    }

    // Lists the cache lines of the next `count` keys and values and spreads them over this block's multiplications.
    void plan_fetch(const int32_t* slots, int count) {
        int lines_listed = 0;
        for (int j = 0; j < count; j++)
            for (const void* base : {a.pool->k, a.pool->v}) {
                const char* row = (const char*)slot_row(base, slots[j]);
                for (size_t i = 0; i < dim * sizeof(Elem); i += 64) lines[lines_listed++] = row + i;
            }
        const int turns = (tokens * group + TILE_ROWS - 1) / TILE_ROWS * (dim * (int)sizeof(Elem) / 4);
        fetch = {lines, lines + lines_listed, (lines_listed + turns - 1) / turns};
    }

    // Rows [first, first + count) against the loaded block; they see the same keys of it.
    template <int ROWS>
    void step(int first, KeyRange seen) {
        alignas(64) float score[ROWS * KEYS];
        alignas(64) typename Tile::Weight weight[ROWS * KEYS];
        const typename Tile::Query* q[ROWS];
        float factor[ROWS];
        for (int r = 0; r < ROWS; r++) q[r] = query(first + r);
        keys.template scores<ROWS>(q, dim, score, fetch);
        const float scale = a.stack->attention_scale * LOG2E;
        for (int r = 0; r < ROWS; r++) {
            factor[r] = softmax_step<Tile>(score + r * KEYS, scale, seen.low, seen.high, max_score[first + r],
                                           weight_sum[first + r], weight + r * KEYS);
        }
        keys.template add_values<ROWS>(weight, factor, seen.low, seen.high, dim, sums + (size_t)first * dim);
    }

    void steps(int first, int count, KeyRange seen) {
        for (; count >= TILE_ROWS; first += TILE_ROWS, count -= TILE_ROWS) step<TILE_ROWS>(first, seen);
        if constexpr (TILE_ROWS > 4) {
            if (count >= 4) { step<4>(first, seen); first += 4; count -= 4; }
        }
        if (count == 3) step<(TILE_ROWS >= 3 ? 3 : 1)>(first, seen);
        if (count == 2) step<2>(first, seen);
        if (count == 1) step<1>(first, seen);
    }

    // All tokens against the block at `base`: neighbours that see the same keys go together.
    void block(int base) {
        for (int t = 0; t < tokens;) {
            const KeyRange seen = keys_of(a, layer, tile.request, tile.first_row + t).in_block(base);
            int end = t + 1;
            while (end < tokens &&
                   keys_of(a, layer, tile.request, tile.first_row + end).in_block(base) == seen) end++;
            if (!seen.empty()) steps(t * group, (end - t) * group, seen);
            t = end;
        }
    }

    void run() {
        const int kv_len = a.batch->kv_len[tile.request];
        int low = kv_len, high = 0;
        for (int t = 0; t < tokens; t++) {
            const KeyRange k = keys_of(a, layer, tile.request, tile.first_row + t);
            low = std::min(low, k.low);
            high = std::max(high, k.high);
        }
        std::fill(max_score, max_score + tokens * group, -INFINITY);
        std::fill(weight_sum, weight_sum + tokens * group, vf{});
        std::fill(sums, sums + (size_t)tokens * group * dim, 0.0f);
        for (int base = low / KEYS * KEYS; base < high; base += KEYS) {
            load_block(base, kv_len);
            block(base);
        }
        for (int r = 0; r < tokens * group; r++) finish(r);
    }

    void finish(int r) {
        const int row = tile.first_row + r / group, head = kv_head * group + r % group;
        const vf total = splat(hsum(weight_sum[r]));
        for (int i = 0; i < dim; i += VW)
            put_act(a.out.row(row), (size_t)head * dim + i, loadf(sums + (size_t)r * dim + i) / total, a.out.kind);
    }
};

template <class Tile>
void attend_with(const AttentionArgs& a, int layer, const AttentionTile& tile, int kv_head, char* memory) {
    const int group = a.stack->num_heads / a.stack->num_kv_heads, dim = a.stack->head_dim;
    const int rows = tile.rows * group;
    Carver carve(memory);
    Tile keys(carve, dim);
    float* sums = carve.take<float>((size_t)rows * dim);
    float* max_score = carve.take<float>(rows);
    vf* weight_sum = carve.take<vf>(rows);
    const char** lines = carve.take<const char*>(lines_of_block(dim));
    Work<Tile>{a, layer, kv_head, dim, group, tile.rows, tile, keys, sums, max_score, weight_sum, lines}.run();
}

}  // namespace

int attention_tile_tokens(const EsStack& stack) {
    return std::max(1, MOST_ROWS / (stack.num_heads / stack.num_kv_heads));
}

size_t attention_scratch(const EsStack& stack, int tile_tokens) {
    const size_t rows = (size_t)tile_tokens * (stack.num_heads / stack.num_kv_heads);
    Carver carve(nullptr);
    FloatTile<float> largest(carve, stack.head_dim);
    carve.take<float>(rows * stack.head_dim);
    carve.take<float>(rows);
    carve.take<vf>(rows);
    carve.take<const char*>(lines_of_block(stack.head_dim));
    return carve.used();
}

void attend(const AttentionArgs& args, int layer, const AttentionTile& tile, int kv_head, char* memory) {
    if (args.pool->dtype == ES_F32) {
        attend_with<FloatTile<float>>(args, layer, tile, kv_head, memory);
    } else {
#if ES_DPBF16
        attend_with<PairTile>(args, layer, tile, kv_head, memory);
#else
        attend_with<FloatTile<uint16_t>>(args, layer, tile, kv_head, memory);
#endif
    }
}

}  // namespace es
