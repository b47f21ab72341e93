// Causal convolutions of each channel by itself: a token's sum of its own input and of a few inputs before it.
#pragma once
#include <algorithm>

#include "rows.hpp"
#include "team.hpp"

// The consecutive tokens of each sequence in one step.
struct Segments {
    long count;
    const int32_t* bounds;   // [count + 1]: the first token of each, and the number of all
    const int32_t* lengths;  // [count]: tokens of the sequence, with those of the step
    const int64_t* slots;    // [count]: where the layers keep what they know of the sequence

    long first(long segment) const { return bounds[segment]; }
    long tokens(long segment) const { return bounds[segment + 1] - bounds[segment]; }
    // Position in the sequence of the segment's first token.
    long start(long segment) const { return lengths[segment] - tokens(segment); }
    // The segment of a token.
    long of(long token) const { return std::upper_bound(bounds, bounds + count + 1, int32_t(token)) - bounds - 1; }
};

// out[c] = sum over lags of inputs[lag][c] * weight[width - 1 - lag][c] (+ bias[c]), then `finish`, in one order for every
// token. inputs: [width], of the token itself first.
template <class T, class Finish>
INLINE void convolve(const T* const* inputs, long width, const float* weight, const float* bias, long channels,
                     const Finish& finish) {
    const float* own = weight + (width - 1) * channels;
    long c = 0;
    for (; c + LANES <= channels; c += LANES) {
        vf total = load(inputs[0] + c) * load(own + c);
        for (long lag = 1; lag < width; lag++) total = fma(load(inputs[lag] + c), load(own - lag * channels + c), total);
        finish(c, bias ? total + load(bias + c) : total);
    }
    for (; c < channels; c++) {
        float total = widen(inputs[0][c]) * own[c];
        for (long lag = 1; lag < width; lag++) total += widen(inputs[lag][c]) * own[c - lag * channels];
        finish(c, bias ? total + bias[c] : total);
    }
}

// The rows of a layer's cache that a step reads and writes (`ConvolutionPlan` in Python).
struct CachedInputs {
    const int64_t* previous;  // [segments, width - 1], the nearest first
    const uint8_t* missing;   // the same shape: before the sequence's first token
    const int64_t* written;   // [tokens]
    long reserved;            // rows below are of the reserved block: what goes there is lost
    long writes_first;        // segments of one token may read what the step writes
};

struct ShortConvolution {
    const float* weight;  // [width, channels]
    const float* bias;    // [channels], or null
    long width, channels;
};

// out = second * convolution(first * third) of projected rows [first, second, third] of `channels` each; the products
// overwrite the third.
template <class T, class Out = T> class ShortConvolutionStep {
    const ShortConvolution& shape;
    const Segments& segments;
    const CachedInputs& plan;
    T* projected;
    T* cache;
    const T* zeros;
    Out* out;

    T* product(long token) const { return projected + (token * 3 + 2) * shape.channels; }

    void keep(long token) const {
        if (plan.written[token] >= plan.reserved)
            std::memcpy(cache + plan.written[token] * shape.channels, product(token), shape.channels * sizeof(T));
    }

    void one(long segment, long token, const T** inputs) const {
        const long offset = token - segments.first(segment), n = shape.channels, before = shape.width - 1;
        for (long lag = 0; lag <= before; lag++) {
            const long kept = segment * before + lag - offset - 1;
            inputs[lag] = lag <= offset ? product(token - lag) : plan.missing[kept] ? zeros : cache + plan.previous[kept] * n;
        }
        const T* gate = projected + (token * 3 + 1) * n;
        Out* to = out + token * n;
        convolve(inputs, shape.width, shape.weight, shape.bias, n, Gated{gate, to});
    }

    struct Gated {
        const T* gate;
        Out* to;
        INLINE void operator()(long c, vf total) const { store(to + c, total * load(gate + c)); }
        INLINE void operator()(long c, float total) const { to[c] = narrow<Out>(total * widen(gate[c])); }
    };

  public:
    ShortConvolutionStep(const ShortConvolution& shape, const Segments& segments, const CachedInputs& plan, T* projected,
                         T* cache, const T* zeros, Out* out)
        : shape(shape), segments(segments), plan(plan), projected(projected), cache(cache), zeros(zeros), out(out) {}

    // inputs: [threads, width].
    void run(Team team, const T** inputs) const {
        long first, last;
        team.share(segments.bounds[segments.count], first, last);
        for (long token = first; token < last; token++) {
            multiply(product(token), projected + token * 3 * shape.channels, shape.channels);
            if (plan.writes_first) keep(token);
        }
        team.barrier();
        if (first < last) {
            long segment = segments.of(first);
            for (long token = first; token < last; token++) {
                while (token >= segments.bounds[segment + 1]) segment++;
                one(segment, token, inputs + team.index * shape.width);
            }
        }
        if (plan.writes_first) return;
        team.barrier();
        for (long token = first; token < last; token++) keep(token);
    }

  private:
    static void multiply(T* x, const T* factor, long n) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, load(x + i) * load(factor + i));
        for (; i < n; i++) x[i] = narrow<T>(widen(x[i]) * widen(factor[i]));
    }
};
