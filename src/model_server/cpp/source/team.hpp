// Threads of the OpenMP runtime that torch already uses: its entry points are handed in (`cpp_init`), so that no
// second runtime, with a second set of threads, is ever loaded.
#pragma once
#include <sched.h>

#include <atomic>
#include <new>

#include "tiles.hpp"

typedef void (*ParallelFunction)(void (*)(void*), void*, unsigned, unsigned);
extern ParallelFunction parallel_function;  // GOMP_parallel
extern int (*thread_number_function)();     // omp_get_thread_num
extern int (*team_size_function)();         // omp_get_num_threads
extern int (*most_threads_function)();      // omp_get_max_threads: what torch.set_num_threads has set for this thread

// Where threads meet without going to sleep. The runtime's own barrier sleeps after a hundred looks (libgomp's manual,
// GOMP_SPINCOUNT) as soon as it has more threads than the machine has cores, which it has once two threads of a process
// have worked in parallel: then a wait costs a wake-up (measured: fifty a token of 30 blocks, 30 ms instead of 23).
class Meeting {
    static constexpr int PATIENCE = 1000;  // looks, before others may have this core
    // Apart, so that who looks at one is not disturbed by changes of the other.
    alignas(64) std::atomic<int> here{0};
    alignas(64) std::atomic<int> round{0};

  public:
    // Called by each of `size` threads; returns when all have called.
    void wait(int size) {
        int seen = round.load(std::memory_order_relaxed);
        if (here.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            here.store(0, std::memory_order_relaxed);
            round.store(seen + 1, std::memory_order_release);
            return;
        }
        for (int looks = 0; round.load(std::memory_order_acquire) == seen; looks++) {
            if (looks < PATIENCE) __builtin_ia32_pause();
            else sched_yield();
        }
    }
};

struct Team {
    int index, size;
    Meeting* meeting;
    std::atomic<bool>* is_short_of_memory;
    // For what takes memory: a thread that has none must still come to every barrier, or the others wait for ever.
    template <class F> void attempt(const F& work) const {
        try {
            work();
        } catch (const std::bad_alloc&) {
            is_short_of_memory->store(true, std::memory_order_relaxed);
        }
    }
    // All threads of the team have come here.
    void barrier() const {
        if (size > 1) meeting->wait(size);
    }
    // This thread's share of `count` items: a run of neighbours.
    void share(long count, long& first, long& last) const {
        first = count * index / size;
        last = count * (index + 1) / size;
    }
};

// Run `body(Team)` on every thread of a team. Throws std::bad_alloc afterwards where an attempt of one had no memory;
// what the body has written is then worth nothing. No exception may leave the body: the runtime would end the process.
template <class F> void parallel(const F& body, int limit = 1 << 30) {
    int threads = parallel_function ? most_threads_function() : 1;
    if (threads > limit) threads = limit;
    std::atomic<bool> is_short_of_memory{false};
    struct Work {
        const F& body;
        std::atomic<bool>& is_short_of_memory;
        Meeting meeting;
    } work{body, is_short_of_memory, {}};
    if (threads <= 1) {
        TileScope scope;
        body(Team{0, 1, nullptr, &is_short_of_memory});
    } else {
        parallel_function(
            [](void* data) {
                auto& work = *static_cast<Work*>(data);
                TileScope scope;
                work.body(Team{thread_number_function(), team_size_function(), &work.meeting, &work.is_short_of_memory});
            },
            &work, unsigned(threads), 0);
    }
    if (is_short_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}
