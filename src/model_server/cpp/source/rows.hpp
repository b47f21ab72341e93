// What is done to rows between the products: norms, rotation and the write to the cache, gated activations.
#pragma once
#include "vectors.hpp"

// out = x / sqrt(mean(x^2) + eps) * weight, in float inside; n need not be a multiple of anything.
template <class T, class Out> void rms_norm(const T* x, const float* weight, float eps, Out* out, long n) {
    vf squares = {};
    float rest = 0;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf v = load(x + i);
        squares = fma(v, v, squares);
    }
    for (long j = i; j < n; j++) rest += widen(x[j]) * widen(x[j]);
    float factor = 1.0f / std::sqrt((sum(squares) + rest) / n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; i++) out[i] = narrow<Out>(widen(x[i]) * factor * weight[i]);
}

// out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight (+ bias); out may be x itself.
template <class T, class Out>
void layer_norm(const T* x, const float* weight, const float* bias, float eps, Out* out, long n) {
    vf totals = {}, squares = {};
    float rest = 0;
    const long whole = n / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) totals = totals + load(x + i);
    for (long i = whole; i < n; i++) rest += widen(x[i]);
    const float mean = (sum(totals) + rest) / n;
    rest = 0;
    for (long i = 0; i < whole; i += LANES) {
        const vf v = load(x + i) - mean;
        squares = fma(v, v, squares);
    }
    for (long i = whole; i < n; i++) rest += (widen(x[i]) - mean) * (widen(x[i]) - mean);
    const float factor = 1.0f / std::sqrt((sum(squares) + rest) / n + eps);
    for (long i = 0; i < whole; i += LANES) {
        const vf v = (load(x + i) - mean) * factor * load(weight + i);
        store(out + i, bias ? v + load(bias + i) : v);
    }
    for (long i = whole; i < n; i++) out[i] = narrow<Out>((widen(x[i]) - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f));
}

template <class T> void add(T* x, const T* added, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, load(x + i) + load(added + i));
    for (; i < n; i++) x[i] = narrow<T>(widen(x[i]) + widen(added[i]));
}

// out = silu(gate) * up
template <class T> void silu_gated(const T* gate, const T* up, T* out, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
    for (; i < n; i++) {
        float g = widen(gate[i]);
        out[i] = narrow<T>(g / (1.0f + std::exp(-g)) * widen(up[i]));
    }
}

// Rotate the first `rotary` numbers of a head, pairs side by side, by `turns` (cos, sin for each pair).
template <class T> INLINE void rotate(T* head, const float* turns, long rotary) {
    const vf sign = __builtin_convertvector((COUNTING & 1) * 2 - 1, vf);
    long i = 0;
    for (; i + LANES <= rotary; i += LANES) {
        vf x = load(head + i), t = load(turns + i);
        vf cosine = __builtin_shuffle(t, FIRST), sine = __builtin_shuffle(t, SECOND) * sign;
        store(head + i, fma(__builtin_shuffle(x, SWAPPED), sine, x * cosine));
    }
    for (; i < rotary; i += 2) {
        float a = widen(head[i]), b = widen(head[i + 1]);
        head[i] = narrow<T>(a * turns[i] - b * turns[i + 1]);
        head[i + 1] = narrow<T>(b * turns[i] + a * turns[i + 1]);
    }
}

// What happens to a token's queries, keys and values after the product that makes them.
struct HeadLayout {
    long num_rotated;  // query and key heads
    long head_dim, rotary, query_width, qkv_width;
    const float* norm;  // [num_rotated, head_dim], or null
    float eps;
};

template <class T>
INLINE void rotate_and_write(const HeadLayout& layout, T* qkv, const float* turns, T* cache, long row_width, long slot) {
    for (long h = 0; h < layout.num_rotated; h++) {
        T* head = qkv + h * layout.head_dim;
        if (layout.norm) rms_norm(head, layout.norm + h * layout.head_dim, layout.eps, head, layout.head_dim);
        if (turns) rotate(head, turns, layout.rotary);
    }
    std::memcpy(cache + slot * row_width, qkv + layout.query_width, row_width * sizeof(T));
}
