// Attention over paged K/V. Contract: a row's result is an online softmax (Milakov & Gimelshein 2018) over blocks of
// KEYS keys, anchored at position 0 and taken in order; within a block every step is fixed by the row's own key
// range. Work is split by (request, kv head, tokens), never over keys, so no result depends on the split.
#pragma once
#include "gemm.h"

namespace es {

constexpr int KEYS = 64;
constexpr int MAX_HEAD_DIM = 512;

// Rows of one request that share packed keys.
struct AttentionTile {
    int request, first_row, rows;
};

struct AttentionArgs {
    const EsStack* stack;
    const EsBatch* batch;
    const EsPool* pool;
    const int32_t* key_slots;     // slots of all keys of all requests, in order
    const int64_t* key_offset;    // per request: where its keys start in key_slots
    const char* q;                // rows [num_heads * head_dim], rotated, bf16 or float32 (query_bf16)
    ActRows out;                  // [num_heads * head_dim]
};

// Are queries kept in bf16 for this pool?
inline bool query_bf16(int pool_dtype) { return ES_DPBF16 && pool_dtype == ES_BF16; }

// Bytes of working memory for one thread and the largest number of tokens in a tile.
size_t attention_scratch(const EsStack& stack, int tile_tokens);
int attention_tile_tokens(const EsStack& stack);

void attend(const AttentionArgs& args, int layer, const AttentionTile& tile, int kv_head, char* scratch);

}  // namespace es
