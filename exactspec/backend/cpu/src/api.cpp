// The small entry points; the large ones are beside what they call.
#include "api.h"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>

#include "errors.h"
#include "memory.h"
#include "rows.h"

namespace es {
namespace {

thread_local char message[512] = "";

// Rows below this much work are not worth waking the team for.
int threads_for(int64_t elements) { return elements < 16384 ? 1 : 1 << 20; }

float read_once(const char* p, size_t bytes) {
    vu a = {}, b = {}, c = {}, d = {};
    const size_t line = sizeof(vu);
    for (size_t i = 0; i + 4 * line <= bytes; i += 4 * line) {
        a ^= load<vu>(p + i);
        b ^= load<vu>(p + i + line);
        c ^= load<vu>(p + i + 2 * line);
        d ^= load<vu>(p + i + 3 * line);
    }
    return (float)((a ^ b) ^ (c ^ d))[0];
}

}  // namespace

int fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return -1;
}

}  // namespace es

using namespace es;

extern "C" const char* es_last_error(void) { return message; }

extern "C" const char* es_build_info(void) {
    return ES_DPBF16 ? "avx512-bf16" : ES_AVX512 ? "avx512" :
#if defined(__FMA__)
                     "avx2";
#else
                     "portable";
#endif
}

extern "C" void es_set_threads(int32_t count) { set_team_size(count); }
extern "C" int32_t es_threads(void) { return team_size(); }
extern "C" void* es_alloc(int64_t bytes) { return alloc_pages((size_t)bytes); }
extern "C" void es_free(void* memory, int64_t bytes) { free_pages(memory, (size_t)bytes); }

extern "C" void es_advise(void* memory, int64_t bytes) { advise_pages(memory, (size_t)bytes); }

extern "C" int32_t es_linear(const EsLinear* linear, const float* x, int32_t rows, float* y) {
    const EsLinear& l = *linear;
    if (rows == 0) return 0;
    ActRows in;
    in.kind = act_of(l.dtype);
    in.stride = ActRows::stride_of(l.in, in.kind);
    in.data = scratch(rows * in.stride);
    if (!in.data) return fail("no memory for %d rows of %d inputs", rows, l.in);
    parallel(
        [&](const Member& m) {
            const Range mine = m.share(rows);
            for (int t = mine.begin; t < mine.end; t++) round_row(x + (size_t)t * l.in, l.in, in, t);
            m.barrier(ahead_of(l, m));
            product_store(l, in, rows, m.share(num_blocks(l)), {}, y, l.out, false);
        },
        threads_for((int64_t)l.in * l.out));
    return 0;
}

extern "C" void es_rms_norm(const float* x, const float* weight, float eps, int32_t rows, int32_t width, float* y) {
    parallel(
        [&](const Member& m) {
            const Range mine = m.share(rows);
            for (int t = mine.begin; t < mine.end; t++) {
                float* to = y + (size_t)t * width;
                rms_norm_row(x + (size_t)t * width, weight, width, eps,
                             [&](int i, int n, vf v) { store_upto(to + i, v, n); });
            }
        },
        threads_for((int64_t)rows * width));
}

// The best of several passes over `bytes` of memory, all threads reading their share: bytes per second.
extern "C" double es_read_bandwidth(int64_t bytes) {
    char* p = (char*)alloc_pages((size_t)bytes);
    if (!p) return fail("no memory for %lld bytes", (long long)bytes);
    memset(p, 1, (size_t)bytes);
    double best = 1e30;
    volatile float sink = 0;
    for (int pass = 0; pass < 12; pass++) {
        const auto start = std::chrono::steady_clock::now();
        parallel([&](const Member& m) {
            const size_t part = (size_t)bytes / m.size / 64 * 64;
            const float sum = read_once(p + part * m.tid, part);
            if (m.tid == 0) sink = sink + sum;
            else if (sum == 12345.678f) sink = sum;
        });
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    free_pages(p, (size_t)bytes);
    return (double)bytes / best;
}
