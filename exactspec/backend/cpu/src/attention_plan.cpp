// How the rows and keys of a step are dealt out to the threads.
#include <algorithm>

#include "attention.h"

namespace es {
namespace {

constexpr int MOST_ROWS = 192;  // query rows (tokens x grouped heads) of a tile: their sums stay in the second cache
constexpr int FEW_ROWS = 12;    // a tile is not cut below this: packing its keys again would cost more

// Adds the tiles of one request, the costly ones (last rows) first.
void add_tiles(AttentionPlan& plan, const EsBatch& batch, int request, int parts) {
    const int begin = batch.q_start[request], rows = batch.q_start[request + 1] - begin;
    const int splits = (batch.kv_len[request] + SPLIT - 1) / SPLIT;
    for (int p = parts - 1; p >= 0; p--) {
        const Range t = share(rows, p, parts);
        if (t.begin == t.end) continue;
        plan.tiles.push_back({request, begin + t.begin, t.end - t.begin, splits, 0});
        plan.most_tokens = std::max(plan.most_tokens, t.end - t.begin);
    }
}

void add_units(AttentionPlan& plan, int kv_heads, bool single_splits) {
    for (int t = 0; t < (int)plan.tiles.size(); t++) {
        AttentionTile& tile = plan.tiles[t];
        tile.first_state = plan.num_states;
        const bool single = single_splits && tile.splits > 1;
        if (single) plan.num_states += kv_heads * tile.splits;
        // Heads in the inner loop: the heads of a slot lie side by side in memory.
        for (int s = 0; s < (single ? tile.splits : 1); s++)
            for (int h = 0; h < kv_heads; h++) plan.units.push_back({t, h, single ? s : -1});
    }
}

}  // namespace

AttentionPlan plan_attention(const EsStack& stack, const EsBatch& batch, int threads) {
    AttentionPlan plan;
    const int group = stack.num_heads / stack.num_kv_heads, most = std::max(1, MOST_ROWS / group);
    const int wanted = threads > 1 ? 2 * threads : 1;  // units, so that the threads end at about the same time
    int64_t keys = 0;
    int whole = 0, single = 0;  // units, by whole tiles and by splits
    for (int r = 0; r < batch.num_requests; r++) {
        plan.key_offset.push_back(keys);
        keys += batch.kv_len[r];
        const int rows = batch.q_start[r + 1] - batch.q_start[r], tiles = (rows + most - 1) / most;
        whole += tiles * stack.num_kv_heads;
        single += tiles * stack.num_kv_heads * ((batch.kv_len[r] + SPLIT - 1) / SPLIT);
    }
    plan.key_offset.push_back(keys);
    const int more = whole >= wanted || single >= wanted || single == 0 ? 1 : (wanted + single - 1) / single;
    for (int r = 0; r < batch.num_requests; r++) {
        const int rows = batch.q_start[r + 1] - batch.q_start[r];
        const int cut = std::min(more, std::max(1, rows * group / FEW_ROWS));
        add_tiles(plan, batch, r, std::max((rows + most - 1) / most, std::min(cut, rows)));
    }
    add_units(plan, stack.num_kv_heads, whole < wanted);
    return plan;
}

}  // namespace es
