#include "attention.h"

#include <algorithm>

#include "attention_pairs.h"
#include "memory.h"

namespace es {
namespace {

// Most cache lines of the keys and values of a block: float32, each row may begin within a line.
size_t lines_of_block(int dim) { return (size_t)2 * KEYS * (dim * 4 / 64 + 1); }

// The keys [low, high) that a row sees, and where they fall in the block that starts at `base`.
struct KeyRange {
    int low, high;
    KeyRange in_block(int base) const {
        return {std::max(low - base, 0), std::min(high - base, KEYS)};
    }
    KeyRange in_split(int split) const {
        return {std::max(low, split * SPLIT), std::min(high, (split + 1) * SPLIT)};
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

// The running softmax of rows: sums of weighted values, maximum of the raw products, sum of the weights.
struct State {
    float *sums, *max_score;  // [rows, dim], [rows]
    vf* weight_sum;           // [rows]: lanes are added up at the end only

    State(Carver& carve, int rows, int dim)
        : sums(carve.take<float>((size_t)rows * dim)), max_score(carve.take<float>(rows)),
          weight_sum(carve.take<vf>(rows)) {}

    void clear(int rows, int dim) {
        std::fill(max_score, max_score + rows, -INFINITY);
        std::fill(weight_sum, weight_sum + rows, vf{});
        std::fill(sums, sums + (size_t)rows * dim, 0.0f);
    }

    void copy_row(const State& from, int r, int dim) {
        max_score[r] = from.max_score[r];
        weight_sum[r] = from.weight_sum[r];
        memcpy(sums + (size_t)r * dim, from.sums + (size_t)r * dim, dim * sizeof(float));
    }

    // Takes in the row of a later split.
    void add_row(const State& from, int r, int dim, float scale) {
        const float now = std::max(max_score[r], from.max_score[r]);
        const vf mine = exp2v(splat((max_score[r] - now) * scale));
        const vf its = exp2v(splat((from.max_score[r] - now) * scale));
        max_score[r] = now;
        weight_sum[r] = vfma(from.weight_sum[r], its, weight_sum[r] * mine);
        float *to = sums + (size_t)r * dim, *other = from.sums + (size_t)r * dim;
        for (int i = 0; i < dim; i += VW) store(to + i, vfma(loadf(other + i), its, loadf(to + i) * mine));
    }
};

// One (tile, kv head) being worked on.
template <class Tile>
struct Work {
    const AttentionArgs& a;
    int layer, kv_head, dim, group, rows;
    const AttentionTile& tile;
    Tile keys;
    State total, part;
    const char** lines;  // [lines_of_block]: what to fetch next
    Fetch fetch = {};
    State* state = nullptr;  // the one that is being filled

    Work(const AttentionArgs& args, int layer_index, const AttentionUnit& unit, Carver carve)
        : a(args), layer(layer_index), kv_head(unit.kv_head), dim(args.stack->head_dim),
          group(args.stack->num_heads / args.stack->num_kv_heads), rows(args.plan->tiles[unit.tile].rows * group),
          tile(args.plan->tiles[unit.tile]), keys(carve, dim), total(carve, rows, dim), part(carve, rows, dim),
          lines(carve.take<const char*>(lines_of_block(dim))) {}

    using Elem = typename Tile::Elem;

    const typename Tile::Query* query(int r) const {
        const int row = tile.first_row + r / group, head = kv_head * group + r % group;
        return (const typename Tile::Query*)a.q + ((size_t)row * a.stack->num_heads + head) * dim;
    }

    const Elem* slot_row(const void* base, int slot) const {
        const int kv_heads = a.stack->num_kv_heads;
        return (const Elem*)base + (((size_t)layer * a.pool->num_slots + slot) * kv_heads + kv_head) * dim;
    }

    float scale() const { return a.stack->attention_scale * LOG2E; }
    KeyRange keys_of_row(int r) const { return keys_of(a, layer, tile.request, tile.first_row + r / group); }

    // Packs the block at `base`; `end`: where this unit's keys end.
    void load_block(int base, int end) {
        const Elem *k[KEYS], *v[KEYS];
        const int32_t* slots = a.key_slots + a.plan->key_offset[tile.request] + base;
        const int n = std::min(KEYS, a.batch->kv_len[tile.request] - base);
        for (int j = 0; j < n; j++) {
            k[j] = slot_row(a.pool->k, slots[j]);
            v[j] = slot_row(a.pool->v, slots[j]);
        }
        plan_fetch(slots + KEYS, std::min(KEYS, end - base - KEYS));
        keys.pack(k, v, n, dim, fetch);
    }

    // Lists the cache lines of the next `count` keys and values and spreads them over this block's work.
    void plan_fetch(const int32_t* slots, int count) {
        int lines_listed = 0;
        for (int j = 0; j < count; j++)
            for (const void* base : {a.pool->k, a.pool->v}) {
                const char* row = (const char*)slot_row(base, slots[j]);
                for (size_t i = 0; i < dim * sizeof(Elem); i += 64) lines[lines_listed++] = row + i;
            }
        const int turns = Tile::pack_turns(dim) + (rows + TILE_ROWS - 1) / TILE_ROWS * (dim * (int)sizeof(Elem) / 4);
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
        for (int r = 0; r < ROWS; r++) {
            factor[r] = softmax_step<Tile>(score + r * KEYS, scale(), seen.low, seen.high, state->max_score[first + r],
                                           state->weight_sum[first + r], weight + r * KEYS);
        }
        keys.template add_values<ROWS>(weight, factor, seen.low, seen.high, dim, state->sums + (size_t)first * dim);
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

    // All rows against the block at `base`: neighbours that see the same keys go together.
    void block(int base) {
        for (int r = 0; r < rows;) {
            const KeyRange seen = keys_of_row(r).in_block(base);
            int end = r + group;
            while (end < rows && keys_of_row(end).in_block(base) == seen) end += group;
            if (!seen.empty()) steps(r, end - r, seen);
            r = end;
        }
    }

    KeyRange all_keys() const {
        KeyRange all = keys_of_row(0);
        for (int r = group; r < rows; r += group) {
            const KeyRange k = keys_of_row(r);
            all = {std::min(all.low, k.low), std::max(all.high, k.high)};
        }
        return all;
    }

    void run_split(State& to, int split, KeyRange all, int end) {
        const KeyRange mine = all.in_split(split);
        state = &to;
        to.clear(rows, dim);
        for (int base = mine.low / KEYS * KEYS; base < mine.high; base += KEYS) {
            load_block(base, end);
            block(base);
        }
    }

    // Combines a later split into the total; a row's first split is taken as it is.
    void merge(const State& from, int split) {
        for (int r = 0; r < rows; r++) {
            const KeyRange k = keys_of_row(r);
            if (k.in_split(split).empty()) continue;
            if (k.low / SPLIT == split) {
                total.copy_row(from, r, dim);
            } else {
                total.add_row(from, r, dim, scale());
            }
        }
    }

    void run_all() {
        const KeyRange all = all_keys();
        const int first = all.low / SPLIT;
        run_split(total, first, all, all.high);
        for (int s = first + 1; s * SPLIT < all.high; s++) {
            run_split(part, s, all, all.high);
            merge(part, s);
        }
        finish();
    }

    State shared_state(int split) const {
        const size_t index = tile.first_state + (size_t)kv_head * tile.splits + split;
        Carver carve(a.states + index * attention_state_bytes(*a.stack, *a.plan));
        return State(carve, rows, dim);
    }

    // One split; whoever completes the last one of a tile combines them.
    void run_single(int split, std::atomic<int>& finished) {
        State mine = shared_state(split);
        run_split(mine, split, all_keys(), (split + 1) * SPLIT);
        if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < tile.splits) return;
        for (int s = 0; s < tile.splits; s++) merge(shared_state(s), s);
        finish();
    }

    void finish() {
        for (int r = 0; r < rows; r++) {
            const int row = tile.first_row + r / group, head = kv_head * group + r % group;
            const vf sum = splat(hsum(total.weight_sum[r]));
            const float* values = total.sums + (size_t)r * dim;
            for (int i = 0; i < dim; i += VW)
                put_act(a.out.row(row), (size_t)head * dim + i, loadf(values + i) / sum, a.out.kind);
        }
    }
};

template <class Tile>
void attend_with(const AttentionArgs& a, int layer, const AttentionUnit& unit, char* memory) {
    Work<Tile> work(a, layer, unit, Carver(memory));
    if (unit.split < 0) {
        work.run_all();
    } else {
        work.run_single(unit.split, a.finished[unit.tile * a.stack->num_kv_heads + unit.kv_head]);
    }
}

}  // namespace

size_t attention_state_bytes(const EsStack& stack, const AttentionPlan& plan) {
    Carver carve(nullptr);
    State(carve, plan.most_tokens * (stack.num_heads / stack.num_kv_heads), stack.head_dim);
    return carve.used();
}

size_t attention_scratch(const EsStack& stack, const AttentionPlan& plan) {
    Carver carve(nullptr);
    FloatTile<float> largest(carve, stack.head_dim);
    carve.take<const char*>(lines_of_block(stack.head_dim));
    return carve.used() + 2 * attention_state_bytes(stack, plan);
}

void attend(const AttentionArgs& args, int layer, const AttentionUnit& unit, char* memory) {
    if (args.pool->dtype == ES_F32) {
        attend_with<FloatTile<float>>(args, layer, unit, memory);
    } else {
#if ES_DPBF16
        attend_with<PairTile>(args, layer, unit, memory);
#else
        attend_with<FloatTile<uint16_t>>(args, layer, unit, memory);
#endif
    }
}

}  // namespace es
