// What layers with a recurrence do alike: convolutions whose newest inputs are kept with each sequence's state, and tiles of
// states. Every sum is taken in one order for each token, so that no bit depends on how prompts are cut, on the company, or
// on the number of threads.
#pragma once
#include <atomic>

#include "convolution.hpp"

// Columns of a state that stay in the first cache while a segment runs: 128 keys take 16 KiB.
constexpr long COLUMNS = 2 * LANES;
// Tokens whose inputs are in the scratch at once; with a longer step parts follow each other.
constexpr long MOST_RECURRENT_TOKENS = 64;
// Rows of a state.
constexpr long MOST_KEY_DIM = 512;

// A product that is rounded before it is added to: of x * y + z * w the compiler could fuse either.
INLINE vf rounded(vf x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#else
    asm("" : "+x"(x));
#endif
    return x;
}

// The COLUMNS numbers of a row.
struct Pair {
    vf low = {}, high = {};
};
INLINE Pair load_pair(const float* p) { return {load(p), load(p + LANES)}; }
// The first `columns` of them: what follows is another thread's.
INLINE Pair load_pair(const float* p, long columns) {
    if (columns == COLUMNS) return load_pair(p);
    float part[COLUMNS] = {};
    std::memcpy(part, p, columns * sizeof(float));
    return load_pair(part);
}
INLINE void store(float* p, const Pair& x) {
    store(p, x.low);
    store(p + LANES, x.high);
}
INLINE Pair fma(const Pair& a, vf b, const Pair& c) { return {fma(a.low, b, c.low), fma(a.high, b, c.high)}; }
INLINE Pair times(const Pair& a, vf b) { return {rounded(a.low * b), rounded(a.high * b)}; }
INLINE Pair operator+(const Pair& a, const Pair& b) { return {a.low + b.low, a.high + b.high}; }
INLINE Pair operator-(const Pair& a, const Pair& b) { return {a.low - b.low, a.high - b.high}; }

inline float dot(const float* a, const float* b, long n) {
    vf total = {};
    float rest = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) total = fma(load(a + i), load(b + i), total);
    for (; i < n; i++) rest += a[i] * b[i];
    return sum(total) + rest;
}

// Some tokens of a step, [first, last), of projected rows that hold what the convolution reads at an offset.
template <class T> struct RecurrentPart {
    const Segments& segments;
    const long first, last;
    const T* projected;  // of all tokens
    const long row_width, offset, channels, width;
    T* inputs;       // [slots, width - 1, channels], the nearest first
    const T* zeros;  // [channels]
    const long first_segment, last_segment;

    // The segment's tokens in this part.
    long begin(long segment) const { return std::max(segments.first(segment), first); }
    long end(long segment) const { return std::min<long>(segments.bounds[segment + 1], last); }
    // Something of the sequence was computed before this part.
    bool continues(long segment) const { return segments.start(segment) + begin(segment) - segments.first(segment) > 0; }

    const T* row(long token) const { return projected + token * row_width; }
    T* kept(long segment) const { return inputs + segments.slots[segment] * (width - 1) * channels; }

    // The input of `lag` tokens before a token that has `before` tokens of the part before it.
    const T* input(long segment, long token, long before, long lag) const {
        if (lag <= before) return row(token - lag) + offset;
        return continues(segment) ? kept(segment) + (lag - before - 1) * channels : zeros;
    }

    struct Activated {
        float* to;
        INLINE void operator()(long c, vf total) const { store(to + c, silu(total)); }
        INLINE void operator()(long c, float total) const { to[c] = total / (1.0f + std::exp(-total)); }
    };

    void convolve_into(float* to, long segment, long token, const T** rows, const float* weight, const float* bias) const {
        for (long lag = 0; lag < width; lag++) rows[lag] = input(segment, token, token - begin(segment), lag);
        convolve(rows, width, weight, bias, channels, Activated{to});
    }

    // The newest inputs, behind the last token of the part.
    void keep_inputs(long segment) const {
        const long count = end(segment) - begin(segment);
        // From the oldest on: what is moved is read before it is overwritten.
        for (long lag = width - 2; lag >= 0; lag--) {
            const T* from = input(segment, end(segment) - 1, count - 1, lag);
            T* to = kept(segment) + lag * channels;
            if (from != to) std::memcpy(to, from, channels * sizeof(T));
        }
    }

    // Each of `units` of every segment, and its newest inputs, by whichever thread comes first.
    template <class F> void share(long units, std::atomic<long>& next, const F& recur) const {
        const long count = last_segment - first_segment + 1, all = count * units;
        for (long unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < all + count;) {
            if (unit < all) recur(first_segment + unit / units, unit % units);
            else keep_inputs(first_segment + unit - all);
        }
    }
};
