// The C interface that Python calls through ctypes. native.py mirrors these structs: keep both in step.
// Every function that can fail returns 0 or -1; es_last_error() then holds the reason (per thread).
#pragma once
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#if defined(__cplusplus)
extern "C" {
#endif

enum { ES_BF16 = 0, ES_F32 = 1 };          // dtypes of weights and pools
enum { ES_SILU = 0, ES_GELU_TANH = 1 };    // activations

// A prepacked weight [out, in] and its bias. `glu`: rows are two halves (gate, up), packed side by side.
typedef struct {
    void* data;
    float* bias;  // packed order, or null
    int32_t in, out, dtype, glu;
} EsLinear;

typedef struct {
    EsLinear qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm;
    const float *q_norm, *k_norm, *post_attention_norm, *post_mlp_norm;  // null: absent
    int32_t window;  // 0: none
    int32_t rope;    // index of the table
} EsLayer;

typedef struct {
    const float *cos, *sin;  // [positions, half]
    int32_t positions, half;
} EsRope;

typedef struct {
    int32_t hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim, activation, num_ropes;
    float rms_eps, attention_scale;
    const EsLayer* layers;
    const EsRope* ropes;
} EsStack;

typedef struct {
    const int32_t *positions, *slots, *q_start, *kv_len, *page_table;
    int32_t num_rows, num_requests, pages_per_request, page_size, causal;
} EsBatch;

typedef struct {
    void *k, *v;  // [layers, slots, kv_heads, head_dim]
    int64_t num_slots;
    int32_t dtype;
} EsPool;

const char* es_last_error(void);
const char* es_build_info(void);
void es_set_threads(int32_t count);
int32_t es_threads(void);

// Memory on huge pages; null when there is none.
void* es_alloc(int64_t bytes);
void es_free(void* memory, int64_t bytes);
void es_advise(void* memory, int64_t bytes);  // huge pages for fresh memory of others

// Packs weight [out, in] (dtype, row-major) and bias [out] (or null) into `memory` of es_packed_bytes() bytes.
int64_t es_packed_bytes(int32_t out, int32_t in, int32_t dtype, int32_t glu);
void es_pack(const void* weight, const float* bias, int32_t out, int32_t in, int32_t dtype, int32_t glu, void* memory,
             EsLinear* linear);

// y [rows, out] = x [rows, in] times the weight, plus the bias.
int32_t es_linear(const EsLinear* linear, const float* x, int32_t rows, float* y);

// Blocks of draft tokens, left to right: tokens[r, k] is the lowest argmax over v of
//   (base[r, k, v] + W2 W1[token before] [v]) * inverse_temperature[r] + noise[r, k, v].
// w1 [vocab, rank] in w2's dtype; base, noise [requests, gamma, vocab]; anchors [requests] come before the first
// position; noise and inverse_temperature may be null.
int32_t es_draw_chain(const EsLinear* w2, const void* w1, const float* base, const float* noise,
                      const float* inverse_temperature, const int64_t* anchors, int32_t requests, int32_t gamma,
                      int64_t* tokens);

// All layers. x [rows, hidden] is overwritten with the last layer's output. captured [rows, num_capture * hidden].
int32_t es_stack_forward(const EsStack* stack, const EsBatch* batch, const EsPool* pool, float* x,
                         const int32_t* capture, int32_t num_capture, float* captured);
// K/V of every layer from context [rows, hidden], at slots.
int32_t es_write_context(const EsStack* stack, const float* context, const int32_t* positions, const int32_t* slots,
                         int32_t rows, const EsPool* pool);

void es_rms_norm(const float* x, const float* weight, float eps, int32_t rows, int32_t width, float* y);
void es_gumbel(const int64_t* seeds, const int64_t* positions, uint32_t stream, int32_t rows, int32_t vocab, float* y);
void es_philox(const uint32_t* counter4, const uint32_t* key2, uint32_t* out4);  // one block, for tests
// Rows of x are `stride` elements apart.
void es_argmax(const float* x, int64_t stride, int32_t rows, int32_t width, int64_t* index);
void es_logsumexp(const float* x, int64_t stride, int32_t rows, int32_t width, float* max, float* logsumexp);
void es_topk(const float* x, int64_t stride, int32_t rows, int32_t width, int32_t k, float* values,
             int64_t* index);
double es_read_bandwidth(int64_t bytes);

#if defined(__cplusplus)
}
#endif
#pragma GCC visibility pop
