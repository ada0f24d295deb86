// Reductions over rows of logits. A row is cut into chunks of fixed width whose results are combined in order, so
// that a value does not depend on the number of threads.
#include <algorithm>
#include <vector>

#include "api.h"
#include "simd.h"
#include "threads.h"

namespace es {
namespace {

constexpr int CHUNK = 4096;

struct Best {
    float value;
    int64_t index;
};

struct MaxSum {
    float max, sum;  // sum of exp(x - max)
};

// The largest value and its lowest index; a NaN never wins.
Best best_of(const float* x, int64_t first, int width) {
    vf top = splat(-INFINITY);
    vi where = lanes(), at = where;
    int i = 0;
    for (; i + VW <= width; i += VW, at += VW) {
        const vf v = loadf(x + i);
        where = v > top ? at : where;
        top = v > top ? v : top;
    }
    Best best{-INFINITY, first};
    for (int j = 0; j < VW && i > 0; j++) {
        const int64_t index = first + where[j];
        if (top[j] > best.value || (top[j] == best.value && index < best.index)) best = {top[j], index};
    }
    for (; i < width; i++)
        if (x[i] > best.value) best = {x[i], first + i};
    return best;
}

MaxSum max_sum_of(const float* x, int width) {
    vf top = splat(-INFINITY);
    int i = 0;
    for (; i + VW <= width; i += VW) top = vmax(top, loadf(x + i));
    float max = hmax(top);
    for (; i < width; i++) max = std::max(max, x[i]);
    if (max == -INFINITY) return {max, 0.0f};
    vf sum[4] = {};
    for (i = 0; i < width; i += VW) {
        const int n = width - i;
        const vf v = n >= VW ? loadf(x + i) : load_or(x + i, n, -INFINITY);
        sum[i / VW % 4] = sum[i / VW % 4] + exp2v((v - max) * LOG2E);
    }
    return {max, hsum((sum[0] + sum[1]) + (sum[2] + sum[3]))};
}

bool worse(const Best& a, const Best& b) { return a.value > b.value || (a.value == b.value && a.index < b.index); }

// The k best of a row, falling, equal values by rising index. A NaN counts as -infinity.
void top_of(const float* x, int width, int k, float* values, int64_t* index) {
    std::vector<Best> heap;  // the worst kept one first
    heap.reserve(k);
    int i = 0;
    for (; i < k; i++) heap.push_back({x[i] == x[i] ? x[i] : -INFINITY, i});
    std::make_heap(heap.begin(), heap.end(), worse);
    auto offer = [&](int j) {
        if (!(x[j] > heap.front().value)) return;
        std::pop_heap(heap.begin(), heap.end(), worse);
        heap.back() = {x[j], j};
        std::push_heap(heap.begin(), heap.end(), worse);
    };
    for (; i < width && i % VW; i++) offer(i);
    for (; i + VW <= width; i += VW) {
        if (!(hmax(loadf(x + i)) > heap.front().value)) continue;
        for (int j = 0; j < VW; j++) offer(i + j);
    }
    for (; i < width; i++) offer(i);
    std::sort(heap.begin(), heap.end(), worse);
    for (int j = 0; j < k; j++) {
        values[j] = heap[j].value;
        index[j] = heap[j].index;
    }
}

int threads_for(int64_t elements) { return elements < 16384 ? 1 : 1 << 20; }

template <class T, class F>
std::vector<T> by_chunks(const float* x, int64_t stride, int rows, int width, int chunks, F&& one) {
    std::vector<T> out((size_t)rows * chunks);
    parallel(
        [&](const Member& m) {
            const Range mine = m.share(rows * chunks);
            for (int i = mine.begin; i < mine.end; i++) {
                const int first = i % chunks * CHUNK;
                out[i] = one(x + i / chunks * stride + first, first, std::min(CHUNK, width - first));
            }
        },
        threads_for((int64_t)rows * width));
    return out;
}

}  // namespace
}  // namespace es

using namespace es;

extern "C" void es_argmax(const float* x, int64_t stride, int32_t rows, int32_t width, int64_t* index) {
    const int chunks = (width + CHUNK - 1) / CHUNK;
    const auto parts = by_chunks<Best>(x, stride, rows, width, chunks, best_of);
    for (int r = 0; r < rows; r++) {
        Best best = parts[(size_t)r * chunks];
        for (int c = 1; c < chunks; c++) {
            const Best& p = parts[(size_t)r * chunks + c];
            if (p.value > best.value) best = p;
        }
        index[r] = best.index;
    }
}

extern "C" void es_logsumexp(const float* x, int64_t stride, int32_t rows, int32_t width, float* max,
                              float* logsumexp) {
    const int chunks = (width + CHUNK - 1) / CHUNK;
    const auto parts = by_chunks<MaxSum>(x, stride, rows, width, chunks,
                                         [](const float* p, int, int n) { return max_sum_of(p, n); });
    for (int r = 0; r < rows; r++) {
        const MaxSum* p = parts.data() + (size_t)r * chunks;
        float top = -INFINITY, sum = 0;
        for (int c = 0; c < chunks; c++) top = std::max(top, p[c].max);
        for (int c = 0; c < chunks && top > -INFINITY; c++)
            sum += p[c].sum * exp2v(splat((p[c].max - top) * LOG2E))[0];
        max[r] = top;
        logsumexp[r] = top > -INFINITY ? top + logv(splat(sum))[0] : top;
    }
}

extern "C" void es_topk(const float* x, int64_t stride, int32_t rows, int32_t width, int32_t k, float* values,
                        int64_t* index) {
    parallel(
        [&](const Member& m) {
            const Range mine = m.share(rows);
            for (int r = mine.begin; r < mine.end; r++)
                top_of(x + r * stride, width, k, values + (size_t)r * k, index + (size_t)r * k);
        },
        rows == 1 ? 1 : threads_for((int64_t)rows * width));
}
