// The greedy choice of one row.
#pragma once
#include "vectors.hpp"

// peak: NaN if any logit is NaN. total: sum of e^(logit - peak), in float.
inline void greedy(const float* logits, long width, int64_t& id, float& peak, float& total) {
    // Pieces that stay in the first-level cache are searched and summed at once.
    constexpr long PIECE = 4096;
    peak = -INFINITY;
    double sums = 0;
    long place = 0;
    bool nan = false;
    for (long first = 0; first < width; first += PIECE) {
        long end = first + PIECE < width ? first + PIECE : width, i = first;
        vf tops = splat(-INFINITY);
        vi odd = {};
        for (; i + LANES <= end; i += LANES) {
            vf x = load(logits + i);
            odd |= (vi)(x != x);
            tops = larger(x, tops);
        }
        float top = largest(tops);
        for (int j = 0; j < LANES; j++) nan |= odd[j] != 0;
        for (; i < end; i++) {
            nan |= logits[i] != logits[i];
            top = logits[i] > top ? logits[i] : top;
        }
        if (top > peak) {
            sums *= std::exp(double(peak) - double(top));
            peak = top;
            place = first;
            while (logits[place] != top) place++;
        }
        if (peak == -INFINITY) continue;  // nothing but hidden logits so far
        vf totals = {};
        for (i = first; i + LANES <= end; i += LANES) totals = totals + exp(load(logits + i) - peak);
        float piece = sum(totals);
        for (; i < end; i++) piece += std::exp(logits[i] - peak);
        sums += piece;
    }
    id = place;
    total = float(sums);
    if (nan) peak = NAN;
}
