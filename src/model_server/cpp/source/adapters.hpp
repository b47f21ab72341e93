// What LoRA adapters add to a product: y += B (A x) for the rows that have one, each its own. Rows are grouped by adapter,
// so that its matrices are read once for all of them. Everything is summed in floats, in an order that depends neither on
// the other rows nor on the number of threads.
#pragma once
#include <algorithm>
#include <vector>

#include "matrix.hpp"
#include "team.hpp"

// B of one module, for the outputs in `panels` panels from `panel` on: [panels, rank, PANEL], 0 where an output is not the
// module's. It multiplies the inner values from `first` on.
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

  public:
    // Of row r the number is numbers[kept[r]], or numbers[r].
    AdapterGroups(const int64_t* numbers, const int64_t* kept, long first, long last) {
        auto number = [&](long r) { return numbers[kept ? kept[first + r] : first + r]; };
        for (long r = 0; r < last - first; r++)
            if (number(r) >= 0) rows.push_back(r);
        std::stable_sort(rows.begin(), rows.end(), [&](long a, long b) { return number(a) < number(b); });
        for (long i = 0; i < long(rows.size()); i++) {
            if (groups.empty() || groups.back().number != number(rows[i])) groups.push_back({long(number(rows[i])), i, 0});
            groups.back().count++;
        }
    }
    // work(factors, rows, count) for each group of an adapter that adds something.
    template <class F> void each(const AdapterFactors* of_number, const F& work) const {
        for (const Group& g : groups)
            if (of_number[g.number].a) work(of_number[g.number], rows.data() + g.first, g.count);
    }
    // work(factors, rows, count) as `each`, of the rows [begin, end) alone.
    template <class F> void each(const AdapterFactors* of_number, long begin, long end, const F& work) const {
        each(of_number, [&](const AdapterFactors& f, const long* of_group, long count) {
            const long* first = std::lower_bound(of_group, of_group + count, begin);
            const long* last = std::lower_bound(first, of_group + count, end);
            if (first < last) work(f, first, last - first);
        });
    }
    long most_inner(const AdapterFactors* of_number) const {
        long most = 0;
        each(of_number, [&](const AdapterFactors& f, const long*, long) { most = std::max(most, f.inner); });
        return most;
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

// Inner values [first, first + LANES / R) below `limit` of R rows. What is beyond is computed of the last one, and dropped.
template <class T, class X, int R>
INLINE void shrink_tile(const T* a, long inputs, long first, long limit, const X* const* x, float* const* out) {
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
            out[r][first + k] = total[k * R + r] + rest;
        }
}

// inner [rows, width] = A x, of this thread's share of each group's inner values.
template <class T, class X>
void shrink(const AdapterFactors* of_number, const AdapterGroups& groups, const X* x, long stride, long inputs, float* inner,
            long width, Team team) {
    long unit = 0;  // of all groups: whose turn it is
    groups.each(of_number, [&](const AdapterFactors& f, const long* rows, long count) {
        const T* a = static_cast<const T*>(f.a);
        for (long first = 0; first < f.inner; first += LANES) {
            if (unit++ % team.size != team.index) continue;
            const long limit = std::min(first + LANES, f.inner);
            for (long at = 0; at < count;) {
                const X* from[4];
                float* out[4];
                const long left = count - at, height = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                for (long r = 0; r < height; r++) {
                    from[r] = x + rows[at + r] * stride;
                    out[r] = inner + rows[at + r] * width;
                }
                for (long k = first; k < limit; k += LANES / height) {
                    if (height == 4) shrink_tile<T, X, 4>(a, inputs, k, limit, from, out);
                    else if (height == 2) shrink_tile<T, X, 2>(a, inputs, k, limit, from, out);
                    else shrink_tile<T, X, 1>(a, inputs, k, limit, from, out);
                }
                at += height;
            }
        }
    });
}

// out[r] += B inner, of one panel; `limit`: how many of its outputs there are.
template <class T, class Out, int R>
INLINE void expand_tile(const T* b, long rank, const float* const* inner, Out* const* out, long limit) {
    vf sums[R][2] = {};
    for (long k = 0; k < rank; k++) {
        // Two panels further: between them come those of the other adapters.
        const char* next = reinterpret_cast<const char*>(b + (2 * rank + k) * PANEL);
        __builtin_prefetch(next);
        if constexpr (sizeof(T) * PANEL > 64) __builtin_prefetch(next + 64);
        const vf low = load(b + k * PANEL), high = load(b + k * PANEL + LANES);
        for (int r = 0; r < R; r++) {
            const vf value = splat(inner[r][k]);
            sums[r][0] = fma(value, low, sums[r][0]);
            sums[r][1] = fma(value, high, sums[r][1]);
        }
    }
    for (int r = 0; r < R; r++) put(out[r], sums[r], 2, 0, limit, static_cast<const T*>(nullptr), out[r]);
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
INLINE void expand(const AdapterFactors* of_number, const AdapterGroups& groups, long begin, long end, const float* inner,
                   long width, long panel, Out* out, long outputs, long pitch) {
    const long limit = std::min(long(PANEL), outputs - panel * PANEL);
    groups.each(of_number, begin, end, [&](const AdapterFactors& f, const long* rows, long count) {
        for (long i = 0; i < f.num_expansions; i++) {
            const AdapterExpansion& e = f.expansions[i];
            if (panel < e.panel || panel >= e.panel + e.panels) continue;
            const T* b = static_cast<const T*>(e.b) + (panel - e.panel) * e.rank * PANEL;
            for (long at = 0; at < count;) {
                const float* from[4];
                Out* to[4];
                const long height = count - at >= 4 ? 4 : 1;
                for (long r = 0; r < height; r++) {
                    from[r] = inner + rows[at + r] * width + e.first;
                    to[r] = out + (rows[at + r] - begin) * pitch;
                }
                if (height == 4) expand_tile<T, Out, 4>(b, e.rank, from, to, limit);
                else expand_tile<T, Out, 1>(b, e.rank, from, to, limit);
                at += height;
            }
        }
        if (!f.gain && !f.shift) return;
        const float* gain = f.gain ? f.gain + panel * PANEL : nullptr;
        const float* shift = f.shift ? f.shift + panel * PANEL : nullptr;
        for (long at = 0; at < count; at++) rescale(gain, shift, out + (rows[at] - begin) * pitch, limit);
    });
}
