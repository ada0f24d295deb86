#include "threads.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace es {
namespace {

constexpr int MAX_TEAM = 256;

struct Team {
    alignas(64) std::atomic<uint32_t> job_number{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> pending{0};
    alignas(64) Job job = nullptr;
    void* arg = nullptr;
    int active = 1;  // members of the present job
    int size = 1;    // members that exist (threads started + the caller)
    bool stop = false;
    pid_t owner = 0;
    pthread_t threads[MAX_TEAM];
};

// Both live for the whole process: threads may still wait on them while static objects are destroyed.
Team* team = new Team;
std::mutex* turn = new std::mutex;
int wanted_size = 1;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// How long a thread spins before it sleeps. Spinning is right while every member has a core to itself; when another
// process takes one, a spinning member may hold the very core that the late member needs. So each wait in vain halves
// the patience and each success raises it.
struct Patience {
    int ns, least, most, gain_percent;

    void learn(bool success) {
        ns = success ? ns + ns * gain_percent / 100 : ns / 2;
        ns = ns < least ? least : ns > most ? most : ns;
    }
};

thread_local Patience at_barrier{200000, 4000, 200000, 25};   // members of one job arrive close together
thread_local Patience for_job{300000, 40000, 300000, 100};    // a step's next call usually comes within this time

// Waits until word != old: spins for a while (fetching `next` meanwhile), then sleeps in the kernel.
// Returns whether spinning was enough.
bool spin_then_sleep(std::atomic<uint32_t>& word, uint32_t old, std::chrono::nanoseconds spin, Ahead next) {
    const char* p = next.begin;
    const char* end = p + next.bytes;
    for (; p < end; p += 64) {
        if (word.load(std::memory_order_acquire) != old) return true;
        __builtin_prefetch(p, 0, 2);
    }
    auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 16; i++) {
            if (word.load(std::memory_order_acquire) != old) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() - start < spin);
    while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
    return false;
}

void wait_change(std::atomic<uint32_t>& word, uint32_t old, Patience& patience, Ahead next = {}) {
    patience.learn(spin_then_sleep(word, old, std::chrono::nanoseconds(patience.ns), next));
}

// The floating-point control word is per thread and others may have changed it (torch.set_flush_denormal): a row's
// bits must not depend on the thread that computes it, so every member uses the same: nearest even, denormals are 0.
struct FloatMode {
#if defined(__x86_64__)
    unsigned saved = _mm_getcsr();
    FloatMode() { _mm_setcsr(0x9fc0); }
    ~FloatMode() { _mm_setcsr(saved); }
#endif
};

void run_member(int tid) {
    Member member{tid, team->active};
    FloatMode mode;
    team->job(team->arg, member);
}

void* worker(void* p) {
    int tid = (int)(intptr_t)p;
    uint32_t seen = 0;  // a new team starts at job 0
    for (;;) {
        wait_change(team->job_number, seen, for_job);
        seen = team->job_number.load(std::memory_order_acquire);
        if (team->stop) return nullptr;
        if (tid < team->active) run_member(tid);
        if (team->pending.fetch_sub(1, std::memory_order_acq_rel) == 1) team->pending.notify_all();
    }
}

void stop_team() {
    team->stop = true;
    team->job_number.fetch_add(1, std::memory_order_acq_rel);
    team->job_number.notify_all();
    for (int i = 1; i < team->size; i++) pthread_join(team->threads[i], nullptr);
}

// A forked child has this memory but not the threads: it starts a team of its own.
void ensure_team() {
    if (team->owner == getpid() && team->size == wanted_size) return;
    if (team->owner == getpid()) {
        stop_team();
        delete team;
    }
    team = new Team;
    team->owner = getpid();
    for (int i = 1; i < wanted_size; i++) {
        if (pthread_create(&team->threads[i], nullptr, worker, (void*)(intptr_t)i) != 0) break;
        team->size = i + 1;
    }
    wanted_size = team->size;
}

}  // namespace

void Member::barrier(Ahead next) const {
    if (size == 1) return;
    uint32_t old = team->generation.load(std::memory_order_acquire);
    if (team->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
        team->arrived.store(0, std::memory_order_relaxed);
        team->generation.store(old + 1, std::memory_order_release);
        team->generation.notify_all();
    } else {
        wait_change(team->generation, old, at_barrier, next);
    }
}

void run_job(Job job, void* arg, int max_threads) {
    std::lock_guard<std::mutex> lock(*turn);
    ensure_team();
    team->job = job;
    team->arg = arg;
    team->active = max_threads < team->size ? max_threads : team->size;
    if (team->active <= 1) {
        team->active = 1;
        run_member(0);
        return;
    }
    team->pending.store((uint32_t)(team->size - 1), std::memory_order_relaxed);
    team->job_number.fetch_add(1, std::memory_order_acq_rel);
    team->job_number.notify_all();
    run_member(0);
    for (uint32_t left; (left = team->pending.load(std::memory_order_acquire)) != 0;)
        wait_change(team->pending, left, at_barrier);
}

void set_team_size(int size) {
    std::lock_guard<std::mutex> lock(*turn);
    wanted_size = size < 1 ? 1 : size > MAX_TEAM ? MAX_TEAM : size;
}

int team_size() { return wanted_size; }

}  // namespace es
