// A forward of all layers as one job: the members meet at barriers between phases, and each member fetches the
// weights of its next product while it waits.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <vector>

#include "attention.h"
#include "errors.h"
#include "memory.h"
#include "rows.h"

namespace es {
namespace {

struct Forward {
    const EsStack& st;
    const EsBatch& batch;
    const EsPool& pool;
    float* x;  // [rows, hidden]: the residual stream
    const int32_t* capture;
    int num_capture;
    float* captured;

    int threads = team_size();  // as planned for; another caller may change the team meanwhile
    int q_width = 0;
    size_t qkv_stride = 0;
    float *qkv = nullptr, *branch = nullptr;  // fused projections; output of a branch that has a post-norm
    char* q = nullptr;                        // rotated queries
    ActRows normed = {}, attended = {}, hidden = {};
    char* attention_memory = nullptr;
    size_t attention_bytes = 0;
    AttentionPlan plan = {};
    char* states = nullptr;
    int32_t* key_slots = nullptr;
    std::atomic<int>*next_unit = nullptr, *finished = nullptr;  // per layer: units handed out; splits done of each tile

    const EsLayer& layer(int i) const { return st.layers[i]; }
    size_t pairs() const { return plan.tiles.size() * st.num_kv_heads; }
};

size_t carve(Forward& f, char* base) {
    const size_t rows = f.batch.num_rows;
    const Act kind = act_of(f.layer(0).qkv.dtype);
    Carver c(base);
    f.qkv = c.take<float>(rows * f.qkv_stride);
    f.branch = c.take<float>(rows * f.st.hidden);
    f.q = c.take<char>(rows * f.q_width * 4);
    auto act = [&](ActRows& a, int width) {
        a.kind = kind;
        a.stride = ActRows::stride_of(width, kind);
        a.data = c.take<char>(rows * a.stride);
    };
    act(f.normed, f.st.hidden);
    act(f.attended, f.q_width);
    act(f.hidden, f.st.intermediate);
    f.key_slots = c.take<int32_t>(f.plan.key_offset.back());
    f.next_unit = c.take<std::atomic<int>>(f.st.num_layers);
    f.finished = c.take<std::atomic<int>>(f.st.num_layers * f.pairs());
    f.states = c.take<char>(f.plan.num_states * attention_state_bytes(f.st, f.plan));
    f.attention_bytes = attention_scratch(f.st, f.plan);
    f.attention_memory = c.take<char>(f.attention_bytes * f.threads);
    return c.used();
}

bool allocate(Forward& f) {
    f.q_width = f.st.num_heads * f.st.head_dim;
    f.qkv_stride = (size_t)num_blocks(f.layer(0).qkv) * BLOCK + VW;
    char* base = scratch(carve(f, nullptr));
    if (!base) return fail("no memory for the activations of %d rows", f.batch.num_rows) == 0;
    carve(f, base);
    return true;
}

void fill_key_slots(const Forward& f, const Member& m) {
    const EsBatch& b = f.batch;
    const Range requests = m.share(b.num_requests);
    for (int r = requests.begin; r < requests.end; r++) {
        const int32_t* pages = b.page_table + (size_t)r * b.pages_per_request;
        int32_t* to = f.key_slots + f.plan.key_offset[r];
        for (int i = 0, page = 0, offset = 0; i < b.kv_len[r]; i++) {
            to[i] = pages[page] * b.page_size + offset;
            if (++offset == b.page_size) offset = 0, page++;
        }
    }
}

// Rows between two layers: the MLP branch's post-norm of the layer before, captures, then the layer's input norm.
void begin_layer(const Forward& f, const Member& m, int i) {
    const int h = f.st.hidden;
    const Range rows = m.share(f.batch.num_rows);
    for (int t = rows.begin; t < rows.end; t++) {
        float* x = f.x + (size_t)t * h;
        if (i > 0 && f.layer(i - 1).post_mlp_norm)
            add_normed(x, f.branch + (size_t)t * h, f.layer(i - 1).post_mlp_norm, h, f.st.rms_eps);
        for (int c = 0; c < f.num_capture; c++)
            if (f.capture[c] == i - 1) memcpy(f.captured + ((size_t)t * f.num_capture + c) * h, x, h * sizeof(float));
        if (i < f.st.num_layers) norm_to_act(x, f.layer(i).input_norm, h, f.st.rms_eps, f.normed, t);
    }
}

void begin_mlp(const Forward& f, const Member& m, const EsLayer& l) {
    const int h = f.st.hidden;
    const Range rows = m.share(f.batch.num_rows);
    for (int t = rows.begin; t < rows.end; t++) {
        float* x = f.x + (size_t)t * h;
        if (l.post_attention_norm) add_normed(x, f.branch + (size_t)t * h, l.post_attention_norm, h, f.st.rms_eps);
        norm_to_act(x, l.mlp_norm, h, f.st.rms_eps, f.normed, t);
    }
}

void* pool_row(const EsStack& st, const EsPool& pool, void* base, int layer, int slot, int kv_head) {
    const size_t index = (((size_t)layer * pool.num_slots + slot) * st.num_kv_heads + kv_head) * st.head_dim;
    return (char*)base + index * (pool.dtype == ES_BF16 ? 2 : 4);
}

// One head of a fused projection row: q goes to the queries, k and v to the pool.
void place_head(const EsStack& st, const EsPool& pool, int layer, float* qkv, int head, int position, int slot,
                char* q) {
    const EsLayer& l = st.layers[layer];
    const int d = st.head_dim, kv = head - st.num_heads;
    float* from = qkv + (size_t)head * d;
    if (kv >= st.num_kv_heads) {
        const int kv_head = kv - st.num_kv_heads;
        store_head(pool_row(st, pool, pool.v, layer, slot, kv_head), from, d, pool.dtype);
        return;
    }
    const float* norm = kv < 0 ? l.q_norm : l.k_norm;
    if (norm) norm_in_place(from, norm, d, st.rms_eps);
    rotate(from, st.ropes[l.rope], position);
    if (kv >= 0) {
        store_head(pool_row(st, pool, pool.k, layer, slot, kv), from, d, pool.dtype);
    } else {
        const int dtype = query_bf16(pool.dtype) ? ES_BF16 : ES_F32;
        store_head(q + (size_t)head * d * (dtype == ES_BF16 ? 2 : 4), from, d, dtype);
    }
}

void place_heads(const Forward& f, const Member& m, int layer) {
    const int heads = f.st.num_heads + 2 * f.st.num_kv_heads;
    const size_t q_bytes = (size_t)f.q_width * (query_bf16(f.pool.dtype) ? 2 : 4);
    const Range items = m.share(f.batch.num_rows * heads);
    for (int i = items.begin; i < items.end; i++) {
        const int t = i / heads;
        place_head(f.st, f.pool, layer, f.qkv + t * f.qkv_stride, i % heads, f.batch.positions[t], f.batch.slots[t],
                   f.q + t * q_bytes);
    }
}

void attend_units(const Forward& f, const Member& m, int layer) {
    const AttentionArgs args{&f.st,       &f.batch, &f.pool,  &f.plan, f.key_slots, f.q,
                             f.attended, f.states, f.finished + layer * f.pairs()};
    char* memory = f.attention_memory + m.tid * f.attention_bytes;
    const int count = (int)f.plan.units.size();
    for (int i; (i = f.next_unit[layer].fetch_add(1, std::memory_order_relaxed)) < count;)
        attend(args, layer, f.plan.units[i], memory);
}

// A projection back to the residual stream; with a post-norm it waits in `branch` until the row is complete.
void project(const Forward& f, const Member& m, const EsLinear& l, const ActRows& in, bool post_norm, Ahead next) {
    product_store(l, in, f.batch.num_rows, m.share(num_blocks(l)), next, post_norm ? f.branch : f.x, f.st.hidden,
                  !post_norm);
}

void run_layer(const Forward& f, const Member& m, int i) {
    const EsLayer& l = f.layer(i);
    const int rows = f.batch.num_rows;
    const Ahead after_mlp = i + 1 < f.st.num_layers ? ahead_of(f.layer(i + 1).qkv, m) : Ahead{};
    begin_layer(f, m, i);
    m.barrier(ahead_of(l.qkv, m));
    product_store(l.qkv, f.normed, rows, m.share(num_blocks(l.qkv)), {}, f.qkv, f.qkv_stride, false);
    m.barrier(ahead_of(l.o, m));
    place_heads(f, m, i);
    m.barrier(ahead_of(l.o, m));
    attend_units(f, m, i);
    m.barrier(ahead_of(l.o, m));
    project(f, m, l.o, f.attended, l.post_attention_norm != nullptr, ahead_of(l.gate_up, m));
    m.barrier(ahead_of(l.gate_up, m));
    begin_mlp(f, m, l);
    m.barrier(ahead_of(l.gate_up, m));
    product_glu(l.gate_up, f.normed, rows, m.share(num_blocks(l.gate_up)), ahead_of(l.down, m), f.st.activation,
                f.hidden);
    m.barrier(ahead_of(l.down, m));
    project(f, m, l.down, f.hidden, l.post_mlp_norm != nullptr, after_mlp);
    m.barrier(after_mlp);
}

// Positions, slots and pages come from outside; one out of range would write into foreign memory.
bool check_rows(const EsStack& st, const EsPool& pool, const int32_t* positions, const int32_t* slots, int rows) {
    for (int t = 0; t < rows; t++) {
        if (slots[t] < 0 || slots[t] >= pool.num_slots)
            return fail("slots[%d] = %d is outside the pool of %lld slots", t, slots[t],
                        (long long)pool.num_slots) == 0;
        for (int i = 0; i < st.num_ropes; i++)
            if (positions[t] < 0 || positions[t] >= st.ropes[i].positions)
                return fail("positions[%d] = %d is outside the rotary table of %d positions", t, positions[t],
                            st.ropes[i].positions) == 0;
    }
    return true;
}

bool check_requests(const EsBatch& b, const EsPool& pool) {
    if (b.q_start[0] != 0 || b.q_start[b.num_requests] != b.num_rows)
        return fail("q_start must run from 0 to the number of rows, %d", b.num_rows) == 0;
    for (int r = 0; r < b.num_requests; r++) {
        const int rows = b.q_start[r + 1] - b.q_start[r], keys = b.kv_len[r];
        if (rows < 0 || keys < rows || keys > (int64_t)b.pages_per_request * b.page_size)
            return fail("kv_len[%d] = %d does not fit %d rows and %d pages of %d", r, keys, rows, b.pages_per_request,
                        b.page_size) == 0;
        for (int p = 0; p * b.page_size < keys; p++) {
            const int64_t page = b.page_table[(size_t)r * b.pages_per_request + p];
            const int used = std::min(b.page_size, keys - p * b.page_size);
            if (page < 0 || page * b.page_size + used > pool.num_slots)
                return fail("page_table[%d, %d] = %lld is outside the pool of %lld slots", r, p, (long long)page,
                            (long long)pool.num_slots) == 0;
        }
    }
    return true;
}

}  // namespace
}  // namespace es

using namespace es;

extern "C" int32_t es_stack_forward(const EsStack* stack, const EsBatch* batch, const EsPool* pool, float* x,
                                    const int32_t* capture, int32_t num_capture, float* captured) {
    if (!check_rows(*stack, *pool, batch->positions, batch->slots, batch->num_rows)) return -1;
    if (!check_requests(*batch, *pool)) return -1;
    if (batch->num_rows == 0) return 0;
    Forward f{*stack, *batch, *pool, x, capture, num_capture, captured};
    f.plan = plan_attention(*stack, *batch, f.threads);
    if (!allocate(f)) return -1;
    for (int i = 0; i < stack->num_layers; i++) f.next_unit[i] = 0;
    for (size_t i = 0; i < stack->num_layers * f.pairs(); i++) f.finished[i] = 0;
    auto layers = [&](const Member& m) {
        fill_key_slots(f, m);
        for (int i = 0; i < stack->num_layers; i++) run_layer(f, m, i);
        begin_layer(f, m, stack->num_layers);
    };
    parallel(layers, f.threads);
    return 0;
}

extern "C" int32_t es_write_context(const EsStack* stack, const float* context, const int32_t* positions,
                                    const int32_t* slots, int32_t rows, const EsPool* pool) {
    if (!check_rows(*stack, *pool, positions, slots, rows)) return -1;
    if (rows == 0) return 0;
    const EsStack& st = *stack;
    const EsLinear& first = st.layers[0].qkv;
    const size_t stride = (size_t)num_blocks(first) * BLOCK + VW;
    const Act kind = act_of(first.dtype);
    const int q_blocks = st.num_heads * st.head_dim / BLOCK;  // whole blocks of queries are left out
    auto carve = [&](char* base, ActRows& in, float*& qkv) {
        Carver c(base);
        in.kind = kind;
        in.stride = ActRows::stride_of(st.hidden, kind);
        in.data = c.take<char>(rows * in.stride);
        qkv = c.take<float>(2 * rows * stride);  // two, so that one barrier a layer is enough
        return c.used();
    };
    ActRows in;
    float* qkv;
    char* base = scratch(carve(nullptr, in, qkv));
    if (!base) return fail("no memory for the context of %d rows", rows);
    carve(base, in, qkv);
    parallel([&](const Member& m) {
        const Range mine = m.share(rows);
        for (int t = mine.begin; t < mine.end; t++) round_row(context + (size_t)t * st.hidden, st.hidden, in, t);
        m.barrier();
        for (int i = 0; i < st.num_layers; i++) {
            const EsLinear& l = st.layers[i].qkv;
            float* to = qkv + (i % 2) * rows * stride;
            const Range part = m.share(num_blocks(l) - q_blocks);
            product_store(l, in, rows, {part.begin + q_blocks, part.end + q_blocks}, {}, to, stride, false);
            m.barrier();
            const int heads = 2 * st.num_kv_heads;
            const Range items = m.share(rows * heads);
            for (int j = items.begin; j < items.end; j++) {
                const int t = j / heads;
                place_head(st, *pool, i, to + t * stride, st.num_heads + j % heads, positions[t], slots[t], nullptr);
            }
        }
    });
    return 0;
}
