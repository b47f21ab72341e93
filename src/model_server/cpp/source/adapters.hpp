// What LoRA adapters add to a product: y += B (A x) for the rows that have one, each its own. Rows are grouped by adapter,
// so that its matrices are read once for all of them. Everything is summed in floats, in an order that depends neither on
// the other rows nor on the number of threads.
#pragma once
#include <algorithm>
#include <vector>

#include "matrix.hpp"
#include "team.hpp"

// B of one module, for the outputs in `panels` panels from `panel` on, packed as a matrix of `rank` inputs, which are filled up
// to pairs with zeros; 0 where an output is not the module's. It multiplies the inner values from `first` on.
struct AdapterExpansion {
    long panel, panels, first, rank;
    const void* b;
};

// One adapter's matrices for one product. a [inner, inputs]: of all modules that read these inputs; null: it adds nothing.
struct AdapterFactors {
    const void* a;
    long inner, num_expansions;
    const AdapterExpansion* expansions;
    const float *gain, *shift;  // [outputs]: what multiplies the sum, then what is added to it, or null
};

// The rows of a block by their adapters' numbers; those of the base model (below 0) are in no group.
class AdapterGroups {
    struct Group {
        long number, first, count;
    };
    std::vector<long> rows;
    std::vector<Group> groups;
    long num_rows;  // also those without an adapter

  public:
    // Of row r the number is numbers[kept[r]], or numbers[r].
    AdapterGroups(const int64_t* numbers, const int64_t* kept, long first, long last) : num_rows(last - first) {
        auto number = [&](long r) { return numbers[kept ? kept[first + r] : first + r]; };
        for (long r = 0; r < last - first; r++)
            if (number(r) >= 0) rows.push_back(r);
        std::stable_sort(rows.begin(), rows.end(), [&](long a, long b) { return number(a) < number(b); });
        for (long i = 0; i < long(rows.size()); i++) {
            if (groups.empty() || groups.back().number != number(rows[i])) groups.push_back({long(number(rows[i])), i, 0});
            groups.back().count++;
        }
    }
    // work(factors, rows, place, count) for each group of an adapter that adds something; place: of its first row among all.
    template <class F> void each(const AdapterFactors* of_number, const F& work) const {
        for (const Group& g : groups)
            if (of_number[g.number].a) work(of_number[g.number], rows.data() + g.first, g.first, g.count);
    }
    // The same, of the rows [begin, end) alone.
    template <class F> void each(const AdapterFactors* of_number, long begin, long end, const F& work) const {
        if (begin == 0 && end == num_rows) return each(of_number, work);
        each(of_number, [&](const AdapterFactors& f, const long* of_group, long place, long count) {
            const long* first = std::lower_bound(of_group, of_group + count, begin);
            const long* last = std::lower_bound(first, of_group + count, end);
            if (first < last) work(f, first, place + (first - of_group), last - first);
        });
    }
    // Inner values of a row: as many as any of these adapters has, and one that is zero, which the last module reads if its
    // rank is odd; filled up to pairs.
    long width(const AdapterFactors* of_number) const {
        long most = 0;
        each(of_number, [&](const AdapterFactors& f, const long*, long, long) { most = std::max(most, f.inner); });
        return most ? (most + 2) / 2 * 2 : 0;
    }
};

// Neighbouring inputs at once: pairs where both sides are bfloat16.
template <class T, class X> struct Dot {
    static constexpr bool PAIRS = std::is_same_v<T, bf16> && std::is_same_v<X, bf16>;
    static constexpr long WIDTH = PAIRS ? 2 * LANES : LANES;
    static INLINE vf step(vf sum, const T* a, const X* x) {
        if constexpr (PAIRS) return dot_pairs(sum, load_pairs(a), load_pairs(x));
        else return fma(load(a), load(x), sum);
    }
};

// Inner values [first, first + LANES / R) below `limit` of R rows, whose own are `width` apart. What is beyond is computed of
// the last one, and dropped.
template <class T, class X, int R>
INLINE void shrink_tile(const T* a, long inputs, long first, long limit, const X* const* x, Input<T>* out, long width) {
    using D = Dot<T, X>;
    constexpr int K = LANES / R;
    const T* from[K];
    for (int k = 0; k < K; k++) from[k] = a + std::min(first + k, limit - 1) * inputs;
    vf sums[LANES] = {};
    long i = 0;
    for (; i + D::WIDTH <= inputs; i += D::WIDTH)
        for (int k = 0; k < K; k++) {
            // The rows behind these: too short to be foreseen by the processor.
            if constexpr (R > 1) __builtin_prefetch(from[k] + K * inputs + i);
            for (int r = 0; r < R; r++) sums[k * R + r] = D::step(sums[k * R + r], from[k] + i, x[r] + i);
        }
    const vf total = sums_of<LANES>(sums);
    for (int k = 0; k < K && first + k < limit; k++)
        for (int r = 0; r < R; r++) {
            float rest = 0;
            for (long j = i; j < inputs; j++) rest += widen(from[k][j]) * widen(x[r][j]);
            out[r * width + first + k] = narrow<Input<T>>(total[k * R + r] + rest);
        }
}

// work(factors, first, limit, rows, place, count) for this thread's share of each group's inner values [first, limit).
template <class F>
void each_unit(const AdapterFactors* of_number, const AdapterGroups& groups, Team team, const F& work) {
    long unit = 0;  // of all groups: whose turn it is
    groups.each(of_number, [&](const AdapterFactors& f, const long* rows, long place, long count) {
        for (long first = 0; first < f.inner; first += LANES)
            if (unit++ % team.size == team.index) work(f, first, std::min(first + LANES, f.inner), rows, place, count);
    });
}

// inner [rows with an adapter, width] = A x, in the order of the groups: this thread's share.
template <class T, class X>
void shrink(const AdapterFactors* of_number, const AdapterGroups& groups, const X* x, long stride, long inputs, Input<T>* inner,
            long width, Team team) {
    each_unit(of_number, groups, team, [&](const AdapterFactors& f, long first, long limit, const long* rows, long place, long count) {
        const T* a = static_cast<const T*>(f.a);
        for (long at = 0; at < count;) {
            const X* from[4];
            const long left = count - at, height = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            Input<T>* out = inner + (place + at) * width;
            for (long r = 0; r < height; r++) {
                from[r] = x + rows[at + r] * stride;
                // What pairs read beside the last one.
                if (limit == f.inner && limit < width) out[r * width + limit] = Input<T>{};
            }
            for (long k = first; k < limit; k += LANES / height) {
                if (height == 4) shrink_tile<T, X, 4>(a, inputs, k, limit, from, out, width);
                else if (height == 2) shrink_tile<T, X, 2>(a, inputs, k, limit, from, out, width);
                else shrink_tile<T, X, 1>(a, inputs, k, limit, from, out, width);
            }
            at += height;
        }
    });
}

// Lines of adapters' matrices that a thread asks for while it computes a product of the base model: the matrices are small
// and many, so that the processor does not foresee them (measured with eight adapters, 135M, 32 rows: 8 % of a step).
class AdapterLines {
    struct Run {
        const char* at;
        long lines;
    };
    static constexpr long MOST = 1024, MOST_RUNS = 128;
    const char* lines[MOST + 7];
    Run runs[MOST_RUNS];
    long count = 0, num_runs = 0, run = 0, later = 0;

    void add(const char* at, long number) {
        typedef long Eight __attribute__((vector_size(64)));
        Eight eight = reinterpret_cast<long>(at) + Eight{0, 64, 128, 192, 256, 320, 384, 448};
        number = std::min(number, MOST - count);
        for (long i = 0; i < number; i += 8, eight += 512) std::memcpy(lines + count + i, &eight, sizeof(eight));
        count += number;
    }

  public:
    // This thread's share of the As of a product that comes later, for rows of `inputs` numbers.
    template <class T> void expect(const AdapterFactors* of_number, const AdapterGroups& groups, long inputs, Team team) {
        each_unit(of_number, groups, team, [&](const AdapterFactors& f, long first, long limit, const long*, long, long) {
            if (num_runs == MOST_RUNS) return;
            const long number = ((limit - first) * inputs * sizeof(T) + 63) / 64;
            runs[num_runs++] = {reinterpret_cast<const char*>(static_cast<const T*>(f.a) + first * inputs), number};
            later += number;
        });
    }
    long expected() const { return later; }
    void clear() { count = 0; }
    // The Bs of one panel.
    template <class T>
    void add_panel(const AdapterFactors* of_number, const AdapterGroups& groups, long begin, long end, long panel) {
        groups.each(of_number, begin, end, [&](const AdapterFactors& f, const long*, long, long) {
            for (long i = 0; i < f.num_expansions; i++) {
                const AdapterExpansion& e = f.expansions[i];
                if (panel < e.panel || panel >= e.panel + e.panels) continue;
                const T* b = static_cast<const T*>(e.b) + (panel - e.panel) * e.rank * PANEL;
                add(reinterpret_cast<const char*>(b), e.rank * PANEL * sizeof(T) / 64);
            }
        });
    }
    // At most so many of the lines that are expected.
    void add_expected(long most) {
        while (most > 0 && run < num_runs && count < MOST) {
            Run& r = runs[run];
            const long number = std::min({most, r.lines, MOST - count});
            add(r.at, number);
            r.at += number * 64;
            r.lines -= number;
            most -= number;
            if (!r.lines) run++;
        }
    }
    Lines get() const { return count ? Lines{lines, lines + count - 1} : Lines{NO_LINES, NO_LINES}; }
};

// out[r] += B inner, of one panel and R rows, whose inner values are `width` apart; `limit`: how many of its outputs there are.
template <class T, class Out, int R>
INLINE void expand_tile(const T* b, long rank, const Input<T>* inner, long width, Out* const* out, long limit) {
    using K = Packing<T>;
    vf sums[2][R][2] = {};  // two chains, as a sum would wait for the one before
    auto step = [&](long k, int chain) __attribute__((always_inline)) {
        for (int part = 0; part < K::PARTS; part++) {
            decltype(K::input(inner)) w[2];
            for (int v = 0; v < 2; v++) w[v] = K::template weights<4 * R>(b + k * PANEL + v * K::STEP * LANES, part);
            for (int r = 0; r < R; r++) {
                const auto x = K::input(inner + r * width + k + part);
                for (int v = 0; v < 2; v++) sums[chain][r][v] = K::multiply(sums[chain][r][v], x, w[v]);
            }
        }
    };
    long k = 0;
    for (; k + 2 * K::STEP <= rank; k += 2 * K::STEP) {
        step(k, 0);
        step(k + K::STEP, 1);
    }
    if (k < rank) step(k, 0);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) sums[0][r][v] = sums[0][r][v] + sums[1][r][v];
    for (int r = 0; r < R; r++) put(out[r], sums[0][r], 2, 0, limit, static_cast<const T*>(nullptr), out[r]);
}

// out = out * gain + shift, of one panel.
template <class Out> INLINE void rescale(const float* gain, const float* shift, Out* out, long limit) {
    for (long i = 0; i < limit; i++) {
        float value = widen(out[i]);
        if (gain) value *= gain[i];
        if (shift) value += shift[i];
        out[i] = narrow<Out>(value);
    }
}

// out += B inner of panel `panel`, for rows [begin, end). out: the panel of row `begin`; `pitch`: from row to row.
template <class T, class Out>
INLINE void expand(const AdapterFactors* of_number, const AdapterGroups& groups, long begin, long end, const Input<T>* inner,
                   long width, long panel, Out* out, long outputs, long pitch) {
    const long limit = std::min(long(PANEL), outputs - panel * PANEL);
    groups.each(of_number, begin, end, [&](const AdapterFactors& f, const long* rows, long place, long count) {
        for (long i = 0; i < f.num_expansions; i++) {
            const AdapterExpansion& e = f.expansions[i];
            if (panel < e.panel || panel >= e.panel + e.panels) continue;
            const T* b = static_cast<const T*>(e.b) + (panel - e.panel) * e.rank * PANEL;
            for (long at = 0; at < count;) {
                const Input<T>* from = inner + (place + at) * width + e.first;
                const long height = count - at >= 4 ? 4 : 1;
                Out* to[4];
                for (long r = 0; r < height; r++) to[r] = out + (rows[at + r] - begin) * pitch;
                if (height == 4) expand_tile<T, Out, 4>(b, e.rank, from, width, to, limit);
                else expand_tile<T, Out, 1>(b, e.rank, from, width, to, limit);
                at += height;
            }
        }
        if (!f.gain && !f.shift) return;
        const float* gain = f.gain ? f.gain + panel * PANEL : nullptr;
        const float* shift = f.shift ? f.shift + panel * PANEL : nullptr;
        for (long at = 0; at < count; at++) rescale(gain, shift, out + (rows[at] - begin) * pitch, limit);
    });
}
