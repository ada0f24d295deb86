// The left-to-right draw of a Markov head as one job (DSpark, arXiv 2607.05147, section 3.1): the token of a position
// picks the row of W1 that goes through W2 at the next. Separate calls would wake the team twice for every position.
#include <vector>

#include "errors.h"
#include "gemm.h"
#include "memory.h"

namespace es {
namespace {

struct Best {
    float value;
    int64_t index;
};

// One member's working memory.
struct Seat {
    ActRows latent;        // [requests], W1 rows of the tokens before
    float* value;          // [requests, VW] largest score of each lane so far
    int32_t* index;        // [requests, VW] and where it was
    int64_t* previous;     // [requests]
    Best* best[2];         // [requests] by the position's parity: others may still read the last ones
};

Seat take_seat(Carver& memory, const EsLinear& l, int requests) {
    Seat seat;
    seat.latent.kind = act_of(l.dtype);
    seat.latent.stride = ActRows::stride_of(l.in, seat.latent.kind);
    seat.latent.data = memory.take<char>(requests * seat.latent.stride);
    seat.value = memory.take<float>((size_t)requests * VW);
    seat.index = memory.take<int32_t>((size_t)requests * VW);
    seat.previous = memory.take<int64_t>(requests);
    for (Best*& best : seat.best) best = memory.take<Best>(requests);
    return seat;
}

void put_latent(const EsLinear& l, const void* w1, int64_t token, const ActRows& out, int row) {
    for (int i = 0; i < l.in; i += VW) {
        const int n = std::min(VW, l.in - i);
        alignas(64) float wide[VW] = {};
        for (int j = 0; j < n; j++) {
            const size_t at = (size_t)token * l.in + i + j;
            if (l.dtype == ES_BF16) {
                const uint32_t bits = (uint32_t)((const uint16_t*)w1)[at] << 16;
                memcpy(wide + j, &bits, 4);
            } else {
                wide[j] = ((const float*)w1)[at];
            }
        }
        put_act(out.row(row), i, loadf(wide), out.kind);
    }
}

// The best of a member's lanes: equal values by the lowest index.
Best best_lane(const float* value, const int32_t* index) {
    Best best{value[0], index[0]};
    for (int j = 1; j < VW; j++)
        if (value[j] > best.value || (value[j] == best.value && index[j] < best.index)) best = {value[j], index[j]};
    return best;
}

}  // namespace
}  // namespace es

using namespace es;

extern "C" int32_t es_draw_chain(const EsLinear* w2, const void* w1, const float* base, const float* noise,
                                 const float* inverse_temperature, const int64_t* anchors, int32_t requests,
                                 int32_t gamma, int64_t* tokens) {
    const EsLinear& l = *w2;
    if (requests == 0 || gamma == 0) return 0;
    const int most = team_size();
    Carver count(nullptr);
    for (int t = 0; t < most; t++) take_seat(count, l, requests);
    char* memory = scratch(count.used());
    if (!memory) return fail("no memory to draw %d blocks", requests);
    Carver carver(memory);
    std::vector<Seat> seats;
    for (int t = 0; t < most; t++) seats.push_back(take_seat(carver, l, requests));
    parallel([&](const Member& m) {
        const Seat& seat = seats[m.tid];
        const Range mine = m.share(num_blocks(l));
        std::copy(anchors, anchors + requests, seat.previous);
        for (int k = 0; k < gamma; k++) {
            for (int r = 0; r < requests; r++) put_latent(l, w1, seat.previous[r], seat.latent, r);
            std::fill(seat.value, seat.value + (size_t)requests * VW, -INFINITY);
            std::fill(seat.index, seat.index + (size_t)requests * VW, mine.begin * BLOCK);
            product(l, seat.latent, requests, mine, {}, [&](int b, int row0, int rows, const float* acc) {
                for (int v = 0; v < 2; v++) {
                    const int column = b * BLOCK + v * VW, left = l.out - column;
                    if (left <= 0) break;
                    for (int r = 0; r < rows; r++) {
                        const int row = row0 + r;
                        const size_t at = ((size_t)row * gamma + k) * l.out + column;
                        vf score = load_upto(base + at, left) + loadf(acc + r * BLOCK + v * VW);
                        if (inverse_temperature) score = score * splat(inverse_temperature[row]);
                        if (noise) score = score + load_upto(noise + at, left);
                        if (left < VW) score = lanes() < splati(left) ? score : splat(-INFINITY);
                        const vf top = loadf(seat.value + (size_t)row * VW);
                        const vi where = load<vi>(seat.index + (size_t)row * VW);
                        store(seat.value + (size_t)row * VW, score > top ? score : top);
                        store(seat.index + (size_t)row * VW, score > top ? lanes() + splati(column) : where);
                    }
                }
            });
            for (int r = 0; r < requests; r++)
                seat.best[k % 2][r] = best_lane(seat.value + (size_t)r * VW, seat.index + (size_t)r * VW);
            m.barrier(ahead_of(l, m));
            for (int r = 0; r < requests; r++) {  // members hold rising shares of the ids: the first of equals is lowest
                Best best = seats[0].best[k % 2][r];
                for (int t = 1; t < m.size; t++)
                    if (seats[t].best[k % 2][r].value > best.value) best = seats[t].best[k % 2][r];
                seat.previous[r] = best.index;
                if (m.tid == 0) tokens[(size_t)r * gamma + k] = best.index;
            }
        }
    });
    return 0;
}
