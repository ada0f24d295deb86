// Attention over paged K/V. Contract: a row's result is an online softmax (Milakov & Gimelshein 2018) over blocks of
// KEYS keys, anchored at position 0 and taken in order, each SPLIT keys on their own; the splits are then combined in
// order (as in Dao et al., "Flash-Decoding", 2023, but with fixed splits). Every step is fixed by the row's own key
// range, so it does not matter how rows and splits are dealt out to the threads.
#pragma once
#include <atomic>
#include <vector>

#include "gemm.h"

namespace es {

constexpr int KEYS = 64;
constexpr int SPLIT = 4 * KEYS;
constexpr int MAX_HEAD_DIM = 512;

// Rows of one request that share packed keys. `splits` covers all keys of the request.
struct AttentionTile {
    int request, first_row, rows, splits;
    int first_state;  // of kv head 0 in the shared states
};

// What one thread does at a time: all splits of a tile for one kv head, or (split >= 0) one of them.
struct AttentionUnit {
    int tile, kv_head, split;
};

struct AttentionPlan {
    std::vector<AttentionTile> tiles;
    std::vector<AttentionUnit> units;
    std::vector<int64_t> key_offset;  // per request: where its keys start in key_slots; at the end, their number
    int most_tokens = 1;              // of a tile
    int num_states = 0;               // shared states of units that are single splits
};

AttentionPlan plan_attention(const EsStack& stack, const EsBatch& batch, int threads);

struct AttentionArgs {
    const EsStack* stack;
    const EsBatch* batch;
    const EsPool* pool;
    const AttentionPlan* plan;
    const int32_t* key_slots;   // slots of all keys of all requests, in order
    const char* q;              // rows [num_heads * head_dim], rotated, bf16 or float32 (query_bf16)
    ActRows out;                // [num_heads * head_dim]
    char* states;               // [num_states * state_bytes]
    std::atomic<int>* finished;  // [tiles * kv_heads] of this layer: splits done
};

// Are queries kept in bf16 for this pool?
inline bool query_bf16(int pool_dtype) { return ES_DPBF16 && pool_dtype == ES_BF16; }

// Bytes of working memory: of one thread, and of one shared state.
size_t attention_scratch(const EsStack& stack, const AttentionPlan& plan);
size_t attention_state_bytes(const EsStack& stack, const AttentionPlan& plan);

void attend(const AttentionArgs& args, int layer, const AttentionUnit& unit, char* scratch);

}  // namespace es
