// A product shared among threads: whoever is free takes the next panels, so that a thread whose core is busy with other
// work does not keep the others waiting. Who computes what does not change a result.
#pragma once
#include <algorithm>
#include <memory>

#include "matrix.hpp"
#include "team.hpp"

// A thread's own memory, kept from call to call; what was in it is lost when it grows.
struct Scratch {
    std::unique_ptr<char[]> bytes;
    size_t capacity = 0;
    template <class T> static T* take(char*& at, long count) {
        T* out = reinterpret_cast<T*>(at);
        at += (count * sizeof(T) + 63) / 64 * 64;
        return out;
    }
    char* of(size_t size) {
        if (capacity < size + 64) {
            bytes.reset();
            capacity = 0;  // should there be no memory
            bytes.reset(new char[size + 64]);
            capacity = size + 64;
        }
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.get()) + 63) / 64 * 64);
    }
};

// As many rows are given to a product at once where each thread needs a copy of its own.
constexpr long MOST_CONVERTED = 256;

// Rows as a product takes them: as they are, or as this thread's own copy in another type.
template <class T, class X> const Input<T>* rows_as_input(const X* x, long& stride, long rows, long inputs) {
    if constexpr (std::is_same_v<X, Input<T>>) {
        return x;
    } else {
        static thread_local Scratch scratch;
        auto* out = reinterpret_cast<Input<T>*>(scratch.of(rows * inputs * sizeof(Input<T>)));
        for (long r = 0; r < rows; r++) convert(x + r * stride, out + r * inputs, inputs);
        stride = inputs;
        return out;
    }
}

// Pieces of `rows` x `panels`; `take` gives runs of panels of one block of rows, and how many panels further the same
// thread's next run will be if all threads are equally fast; 0: there is none.
struct Pieces {
    long rows, panels, blocks;

    // most_rows: of a block.
    Pieces(long rows, long panels, int threads, long most_rows)
        : rows(rows), panels(panels), blocks(std::max(1L, (rows + most_rows - 1) / most_rows)) {
        // More threads than a matrix has panels for: rows are divided as well, if there are many.
        while (panels * blocks < 8 * threads && rows / (blocks + 1) >= 8 * TILE_ROWS) blocks++;
    }
    // `most`: how many panels a run has; fewer towards the end, but not below `fewest`, so that all threads end together.
    template <class F>
    void take(std::atomic<long>& next, int threads, long most, const F& work, long fewest = 1) const {
        long total = panels * blocks;
        for (;;) {
            long seen = next.load(std::memory_order_relaxed);
            long step = most;
            while (step > fewest && total - seen <= 2 * step * threads) step /= 2;
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

#if defined(TERCET_TILES)
// One for all products of a thread.
inline Scratch& wide_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

// Runs of panels of rows that are wide, each of which has `of_each` panels of weights beside each other:
// `finish(row, first, last, sums, pitch)` for each row and run, `panel(first, last, i)` is the run's panel of weights i.
template <class Panel, class Finish>
void wide_product(const bf16* x, long stride, long rows, long inputs, long panels, long of_each, Team team,
                  std::atomic<long>& next, const Panel& panel, const Finish& finish) {
    constexpr long MOST_ROWS = MOST_ROW_TILES * TILE_HEIGHT, MOST = WIDE_PANELS;
    float* sums = nullptr;
    team.attempt([&] { sums = reinterpret_cast<float*>(wide_scratch().of(MOST * MOST_ROWS * TILE_PANEL * sizeof(float))); });
    if (!sums) return;
    auto work = [&](long row, long count, long first, long last, long) {
        wide_products(x + row * stride, stride, count, of_each * (last - first), inputs, sums,
                      [&](long i) { return panel(first, last, i); },
                      [&](long r, const float* of_row, long pitch) { finish(row + r, first, last, of_row, pitch); });
    };
    const Pieces pieces(rows, panels, team.size, MOST_ROWS);
    // Each run goes through all rows: long ones, as long as every thread has two.
    const long fewest = std::clamp(pieces.panels * pieces.blocks / (2 * team.size), 1L, MOST / of_each / 2);
    pieces.take(next, team.size, MOST / of_each, work, fewest);
}
#endif

template <class T, class Out, class X>
void product(const Matrix<T>& m, const X* rows_in, long stride, long rows, Out* out, const Out* onto, Team team,
             std::atomic<long>& next) {
    const Input<T>* x = nullptr;
    team.attempt([&] { x = rows_as_input<T>(rows_in, stride, rows, m.inputs); });
    if (!x) return;
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (are_wide(rows, m.inputs)) {
            auto panel = [&](long first, long, long i) { return m.panel(first + i); };
            return wide_product(x, stride, rows, m.inputs, m.panel_count(), 1, team, next, panel,
                                [&](long row, long first, long last, const float* sums, long pitch) {
                for (long p = first; p < last; p++, sums += pitch) {
                    const vf values[2] = {load(sums), load(sums + LANES)};
                    put(out + row * m.pitch, values, 2, p * PANEL, m.outputs, m.bias, onto ? onto + row * m.pitch : nullptr);
                }
            });
        }
#endif
    auto work = [&](long row, long count, long first, long last, long distance) {
        multiply<T, Out>(m, x + row * stride, stride, count, out + row * m.pitch,
                         onto ? onto + row * m.pitch : nullptr, first, last, distance);
    };
    Pieces(rows, m.panel_count(), team.size, block_of_rows<T>(rows, m.inputs)).take(next, team.size, rows == 1 ? 4 : 2, work);
}

template <class T, class F = Silu, class Out>
void gated_product(const Matrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, long pitch, Team team,
                   std::atomic<long>& next) {
    const long width = m.outputs / 2;
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (are_wide(rows, m.inputs)) {
            auto panel = [&](long first, long last, long i) {
                return m.panel(i < last - first ? first + i : width / PANEL + first + i - (last - first));
            };
            return wide_product(x, stride, rows, m.inputs, width / PANEL, 2, team, next, panel,
                                [&](long row, long first, long last, const float* sums, long of_panel) {
                for (long p = first; p < last; p++, sums += of_panel) {
                    const float* above = sums + (last - first) * of_panel;
                    const vf gates[2] = {load(sums), load(sums + LANES)}, ups[2] = {load(above), load(above + LANES)};
                    put_gated<F>(out + row * pitch + p * PANEL, gates, ups, m.bias ? m.bias + p * PANEL : nullptr, width);
                }
            });
        }
#endif
    auto work = [&](long row, long count, long first, long last, long distance) {
        multiply_gated<T, F>(m, x + row * stride, stride, count, out + row * pitch, pitch, first, last, distance);
    };
    Pieces(rows, width / PANEL, team.size, block_of_rows<T>(rows, m.inputs)).take(next, team.size, rows == 1 ? 2 : 1, work);
}
