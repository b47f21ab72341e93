// Threads of the OpenMP runtime that torch already uses: its entry points are handed in (`native_init`), so that no
// second runtime, with a second set of threads, is ever loaded.
#pragma once
#include <atomic>

typedef void (*ParallelFunction)(void (*)(void*), void*, unsigned, unsigned);
extern ParallelFunction parallel_function;  // GOMP_parallel
extern int (*thread_number_function)();     // omp_get_thread_num
extern int (*team_size_function)();         // omp_get_num_threads
extern void (*barrier_function)();          // GOMP_barrier
extern int (*most_threads_function)();     // omp_get_max_threads: what torch.set_num_threads has set for this thread

struct Team {
    int index, size;
    // All threads of the team have come here.
    void barrier() const {
        if (size > 1) barrier_function();
    }
    // This thread's share of `count` items: a run of neighbours.
    void share(long count, long& first, long& last) const {
        first = count * index / size;
        last = count * (index + 1) / size;
    }
};

// Run `body(Team)` on every thread of a team.
template <class F> void parallel(const F& body, int limit = 1 << 30) {
    int threads = parallel_function ? most_threads_function() : 1;
    if (threads > limit) threads = limit;
    if (threads <= 1) return body(Team{0, 1});
    parallel_function(
        [](void* data) {
            (*static_cast<const F*>(data))(Team{thread_number_function(), team_size_function()});
        },
        const_cast<void*>(static_cast<const void*>(&body)), unsigned(threads), 0);
}
