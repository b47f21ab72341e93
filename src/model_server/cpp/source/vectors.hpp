// Vectors of floats as wide as the target's registers, and the two number types: float and bfloat16 (a uint16_t with the
// upper half of a float). Everything is the compiler's own vector extension, which needs AVX2; AVX-512 instructions are
// named only where the compiler does not find them by itself.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// To the nearest, ties to even, as torch; NaN stays NaN.
INLINE bf16 narrow_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <class T> INLINE T narrow(float x);
template <> INLINE float narrow<float>(float x) { return x; }
template <> INLINE bf16 narrow<bf16>(float x) { return narrow_bf16(x); }

// x - 0 is x, which the compiler knows; of 0 + x it does not, for the sake of -0.
INLINE vf splat(float x) { return x - vf{}; }

INLINE vf load(const float* p) {
    vf out;
    std::memcpy(&out, p, sizeof(out));
    return out;
}
INLINE vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof(half));
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
INLINE void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }
INLINE void store(bf16* p, vf x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &half, sizeof(half));
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    vu nan = (vu)(x != x);
    vh half = __builtin_convertvector((nan & quiet) | (~nan & rounded), vh);
    std::memcpy(p, &half, sizeof(half));
#endif
}

INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // contracted: -ffp-contract=fast

// Pairs of neighbours, the first in the lower half of a lane.
INLINE vu load_pairs(const bf16* p) {
    vu out;
    std::memcpy(&out, p, sizeof(out));
    return out;
}
INLINE vf dot_pairs(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fma((vf)(a << 16), (vf)(b << 16), sum);
    return fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

template <int N, class T, class Out> INLINE void convert(const T* x, Out* out) {
    if constexpr (std::is_same_v<T, Out>) std::memcpy(out, x, N * sizeof(T));
    else
        for (int i = 0; i < N; i++) out[i] = narrow<Out>(widen(x[i]));
}
template <class T, class Out> void convert(const T* x, Out* out, long n) {
    if constexpr (std::is_same_v<T, Out>) {
        std::memcpy(out, x, n * sizeof(T));
    } else {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(out + i, load(x + i));
        for (; i < n; i++) out[i] = narrow<Out>(widen(x[i]));
    }
}

// Sums and maxima over the lanes, by halves: one order on every target of the same width.
INLINE float sum(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}
INLINE float largest(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

// e^x for x <= 88: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], relative error below 3e-7. Below -87 it gives 0, so
// that -inf does; NaN gives NaN.
INLINE vf exp(vf x) {
    vf n = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the fraction is rounded away
    vu whole = (vu)n - 0x4b400000;  // unsigned: for other x it wraps around, and is not used
    n = n - 12582912.0f;
    vf r = n * -0.693359375f + x;
    r = n * 2.12194440e-4f + r;
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    vf y = (vf)((vu)p + (whole << 23));
    y = choose(x < -87.0f, vf{}, y);
    return choose(x == x, y, x);
}
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(smaller(-x, splat(88.0f)))); }
INLINE vf silu(vf x) { return x / (1.0f + exp(smaller(-x, splat(88.0f)))); }
// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|; with t = y / (2 + y) <= 1/3 the logarithm is
// 2 (t + t^3 / 3 + t^5 / 5 + ...), of which eight terms are exact in float.
INLINE vf softplus(vf x) {
    const vf y = exp(smaller(x, -x)), t = y / (y + 2.0f), u = t * t;
    vf p = splat(1.0f / 15);
    p = fma(p, u, splat(1.0f / 13));
    p = fma(p, u, splat(1.0f / 11));
    p = fma(p, u, splat(1.0f / 9));
    p = fma(p, u, splat(1.0f / 7));
    p = fma(p, u, splat(1.0f / 5));
    p = fma(p, u, splat(1.0f / 3));
    p = fma(p, u, splat(1.0f));
    return fma(t + t, p, larger(x, vf{}));
}
// x * (1 + erf(x / sqrt(2))) / 2. The error function as z * P(z^2) / Q(z^2), fitted to a relative error of 2e-8 below the
// bound, beyond which it is 1 in float; in float arithmetic the result is off by at most 2e-7 of |x|.
INLINE vf gelu(vf x) {
    constexpr float BOUND = 3.925f, HALF_ROOT = 0.70710678118654752f;
    const vf z = smaller(splat(BOUND), larger(splat(-BOUND), x * HALF_ROOT)), u = z * z;
    vf p = splat(2.0460256e-6f), q = splat(3.8047780e-5f);
    p = fma(p, u, splat(2.8484402e-4f));
    q = fma(q, u, splat(1.1638622e-3f));
    p = fma(p, u, splat(3.7725680e-3f));
    q = fma(q, u, splat(1.4983235e-2f));
    p = fma(p, u, splat(5.2769355e-2f));
    q = fma(q, u, splat(1.1418289e-1f));
    p = fma(p, u, splat(1.9059417e-1f));
    q = fma(q, u, splat(5.0224239e-1f));
    p = fma(p, u, splat(1.1283791f));
    q = fma(q, u, splat(1.0f));
    return 0.5f * x * (1.0f + z * p / q);
}
// tanh by e^x: absolute error below 1e-6, which is what a bent score needs.
INLINE vf tanh(vf x) {
    // NaN as the second argument stays what it is.
    vf e = exp(smaller(splat(80.0f), larger(splat(-80.0f), 2.0f * x)));
    return 1.0f - 2.0f / (e + 1.0f);
}
INLINE vf gelu_tanh(vf x) { return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x))); }
INLINE vf relu(vf x) { return larger(vf{}, x); }  // in this order NaN stays NaN

// Orders of lanes, as constants: the compiler makes instructions of these alone.
#if defined(__AVX512F__)
constexpr vi EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
constexpr vi FIRST = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
constexpr vi COUNTING = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr vi EVEN = {0, 2, 4, 6, 8, 10, 12, 14};
constexpr vi FIRST = {0, 0, 2, 2, 4, 4, 6, 6};
constexpr vi COUNTING = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
// The lower lanes of two vectors in turns, and the upper ones.
constexpr vi LOWER_LANES = (COUNTING & 1) * LANES + (COUNTING >> 1), UPPER_LANES = LOWER_LANES + LANES / 2;
constexpr vi ODD = EVEN + 1, SECOND = FIRST + 1, SWAPPED = COUNTING ^ 1;

// Sums of neighbours: the lanes of a, then those of b. After log2(LANES) rounds LANES vectors are one vector of sums.
INLINE vf add_neighbours(vf a, vf b) { return __builtin_shuffle(a, b, EVEN) + __builtin_shuffle(a, b, ODD); }
template <int COUNT> INLINE vf sums_of(const vf* s) {
    if constexpr (COUNT == 1) return s[0];
    else {
        vf halves[COUNT / 2];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; i++) halves[i] = add_neighbours(s[2 * i], s[2 * i + 1]);
        return sums_of<COUNT / 2>(halves);
    }
}

// Rows become columns: each round moves one bit of a lane's number to its row's, and one back.
INLINE void transpose(vu (&x)[LANES]) {
#pragma GCC unroll 4
    for (int n = 1; n < LANES; n *= 2) {
        vu y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = __builtin_shuffle(x[i], x[i + LANES / 2], LOWER_LANES);
            y[2 * i + 1] = __builtin_shuffle(x[i], x[i + LANES / 2], UPPER_LANES);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}
