// A small team of threads that runs one job at a time. OpenMP is not used: its runtime is shared with torch, whose
// threads spin after every region, and two spinning teams on the same cores slow each other 10 to 50 times.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace es {

// Memory that a thread will read next; it is fetched into the caches while the thread waits.
struct Ahead {
    const char* begin = nullptr;
    size_t bytes = 0;
};

struct Range {
    int begin, end;
};

// The part of `count` items that thread `tid` of `size` does: contiguous, sizes differ by at most one.
inline Range share(int count, int tid, int size) {
    return {(int)((int64_t)count * tid / size), (int)((int64_t)count * (tid + 1) / size)};
}

// What a job sees: its number, the team's size and the barrier.
struct Member {
    int tid;
    int size;
    void barrier(Ahead next = {}) const;
    Range share(int count) const { return es::share(count, tid, size); }
};

using Job = void (*)(void* arg, const Member& member);

// Runs job(arg, member) on up to max_threads threads of the team (the caller is member 0) and returns when all are
// done. Callers from several threads take turns. Denormals are flushed in every member alike while a job runs.
void run_job(Job job, void* arg, int max_threads);

// Number of threads of the team; set before the first job or between jobs.
void set_team_size(int size);
int team_size();

template <class F>
void parallel(F&& body, int max_threads = 1 << 20) {
    using Body = std::remove_reference_t<F>;
    run_job([](void* arg, const Member& m) { (*static_cast<Body*>(arg))(m); }, (void*)&body, max_threads);
}

}  // namespace es
