// The part of an OpenMP runtime that the operators use, on plain threads: a race detector understands how these begin and
// end, of libgomp's own it knows nothing.
#include <thread>
#include <vector>

namespace {
thread_local int number = 0, size = 1;
int most = 1;
}  // namespace

extern "C" {
void omp_set_num_threads(int threads) { most = threads; }
int omp_get_max_threads() { return most; }
int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return size; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    auto work = [=](int own) {
        number = own;
        size = int(threads);
        body(data);
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(work, i);
    work(0);
    for (auto& other : others) other.join();
    size = 1;
}

// For the test that races are seen at all.
int race() {
    static int touched = 0;
    auto touch = [](void*) { touched++; };
    GOMP_parallel(touch, nullptr, 2, 0);
    return touched;
}
}
