// Prepacking: a block holds 2 vectors of outputs; inside it the inputs follow each other, so that a product reads
// its weights as one stream. bf16 inputs are kept in pairs, as dot-product instructions want them.
#include "gemm.h"

namespace es {
namespace {

// The row of the weight matrix behind lane `lane` of a block, or -1 for padding.
int source_row(const EsLinear& l, int block, int lane) {
    if (!l.glu) {
        const int row = block * BLOCK + lane;
        return row < l.out ? row : -1;
    }
    const int half = l.out / 2, row = block * VW + lane % VW;
    return row >= half ? -1 : lane < VW ? row : half + row;
}

void pack_bf16(const EsLinear& l, const uint16_t* weight, int block) {
    uint16_t* to = (uint16_t*)block_at(l, block);
    const int steps = num_steps(l);
    for (int lane = 0; lane < BLOCK; lane++) {
        const int row = source_row(l, block, lane);
        const uint16_t* from = weight + (size_t)(row < 0 ? 0 : row) * l.in;
        for (int k = 0; k < 2 * steps; k++)
            to[((size_t)(k / 2) * BLOCK + lane) * 2 + k % 2] = row < 0 || k >= l.in ? 0 : from[k];
    }
}

void pack_f32(const EsLinear& l, const float* weight, int block) {
    float* to = (float*)block_at(l, block);
    for (int lane = 0; lane < BLOCK; lane++) {
        const int row = source_row(l, block, lane);
        const float* from = weight + (size_t)(row < 0 ? 0 : row) * l.in;
        for (int k = 0; k < l.in; k++) to[(size_t)k * BLOCK + lane] = row < 0 ? 0.0f : from[k];
    }
}

size_t data_bytes(const EsLinear& l) { return num_blocks(l) * block_bytes(l); }

}  // namespace
}  // namespace es

using namespace es;

extern "C" int64_t es_packed_bytes(int32_t out, int32_t in, int32_t dtype, int32_t glu) {
    EsLinear l{nullptr, nullptr, in, out, dtype, glu};
    return (int64_t)(data_bytes(l) + (size_t)num_blocks(l) * BLOCK * sizeof(float) + 64);
}

extern "C" void es_pack(const void* weight, const float* bias, int32_t out, int32_t in, int32_t dtype, int32_t glu,
                        void* memory, EsLinear* linear) {
    EsLinear& l = *linear;
    l = EsLinear{memory, nullptr, in, out, dtype, glu};
    parallel([&](const Member& m) {
        const Range r = m.share(num_blocks(l));
        for (int b = r.begin; b < r.end; b++) {
            if (dtype == ES_BF16) {
                pack_bf16(l, (const uint16_t*)weight, b);
            } else {
                pack_f32(l, (const float*)weight, b);
            }
        }
    });
    if (!bias) return;
    l.bias = (float*)((char*)memory + data_bytes(l));
    for (int b = 0; b < num_blocks(l); b++) {
        for (int lane = 0; lane < BLOCK; lane++) {
            const int row = source_row(l, b, lane);
            l.bias[b * BLOCK + lane] = row < 0 ? 0.0f : bias[row];
        }
    }
}
