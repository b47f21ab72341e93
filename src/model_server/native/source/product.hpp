// A product shared among threads: whoever is free takes the next panels, so that a thread whose core is busy with other
// work does not keep the others waiting. Who computes what does not change a result.
#pragma once
#include "matrix.hpp"
#include "team.hpp"

// Pieces of `rows` x `panels`; `take` gives runs of panels of one block of rows, and how many panels further the same
// thread's next run will be if all threads are equally fast; 0: there is none.
struct Pieces {
    long rows, panels, blocks;

    Pieces(long rows, long panels, int threads) : rows(rows), panels(panels), blocks(1) {
        // More threads than a matrix has panels for: rows are divided as well, if there are many.
        while (panels * blocks < 8 * threads && rows / (blocks + 1) >= 8 * TILE_ROWS) blocks++;
    }
    template <class F> void take(std::atomic<long>& next, int threads, bool pairs, const F& work) const {
        long total = panels * blocks;
        for (;;) {
            long seen = next.load(std::memory_order_relaxed);
            long step = pairs && total - seen > 4 * threads ? 2 : 1;
            long first = next.fetch_add(step, std::memory_order_relaxed);
            if (first >= total) return;
            long last = first + step < total ? first + step : total;
            while (first < last) {
                long block = first / panels, end = (block + 1) * panels < last ? (block + 1) * panels : last;
                long row = rows * block / blocks, row_end = rows * (block + 1) / blocks;
                long distance = step * threads;
                work(row, row_end - row, first - block * panels, end - block * panels,
                     end + distance <= (block + 1) * panels ? distance : 0);
                first = end;
            }
        }
    }
};

template <class T, class Out>
void product(const Matrix<T>& m, const T* x, long stride, long rows, Out* out, const Out* onto, Team team,
             std::atomic<long>& next) {
    Pieces(rows, m.panel_count(), team.size).take(next, team.size, true, [&](long row, long count, long first, long last, long distance) {
        multiply<T, Out>(m, x + row * stride, stride, count, out + row * m.outputs,
                         onto ? onto + row * m.outputs : nullptr, first, last, distance);
    });
}

template <class T>
void gated_product(const Matrix<T>& m, const T* x, long stride, long rows, T* out, Team team, std::atomic<long>& next) {
    long width = m.outputs / 2;
    Pieces(rows, width / PANEL, team.size).take(next, team.size, false, [&](long row, long count, long first, long last, long distance) {
        multiply_gated<T>(m, x + row * stride, stride, count, out + row * width, first, last, distance);
    });
}
