// Numbers of a KV cache in 8 bits. bfloat16 holds all of them, so that reading is a look-up by 7 bits, and a sign.
#pragma once
#include <immintrin.h>

#include "vectors.hpp"

// MANTISSA bits below an exponent of the given bias. NUMBERS: what is as large or larger is infinite or NaN.
template <int MANTISSA, int BIAS, int NUMBERS> struct Float8 {
    uint8_t bits;

    // The upper halves of the floats that the bytes 0 to 127 stand for.
    struct Table {
        alignas(64) uint16_t halves[128];

        constexpr Table() : halves() {
            for (int size = 1; size < 128; size++) {
                int top = 0;
                while (size >> (top + 1)) top++;
                if (size >= NUMBERS) halves[size] = size == 0x7c ? 0x7f80 : 0x7fc0;
                else if (top >= MANTISSA) halves[size] = (size << (7 - MANTISSA)) + ((127 - BIAS) << 7);
                else halves[size] = ((top + 128 - BIAS - MANTISSA) << 7) | ((size << (7 - top)) & 0x7f);
            }
        }
    };
    static constexpr Table TABLE{};
};
typedef Float8<3, 7, 0x7f> e4m3;   // float8_e4m3fn: no infinities, one NaN
typedef Float8<2, 15, 0x7c> e5m2;

template <class C> INLINE bf16 as_bf16(C x) {
    return {uint16_t(C::TABLE.halves[x.bits & 0x7f] | (x.bits & 0x80) << 8)};
}

#if defined(__AVX512BW__)
// Bits below the sign are a bfloat16's of another exponent's bias, unless they are a denormal, an infinity or NaN.
template <class C> INLINE __m512i halves_of(__m256i bytes) {
    constexpr int SHIFT = std::is_same_v<C, e4m3> ? 4 : 5, BIAS = std::is_same_v<C, e4m3> ? 120 : 112;
    constexpr int DENORMALS = 1 << (7 - SHIFT), LAST = std::is_same_v<C, e4m3> ? 0x7f : 0x7c;
    const __m512i at = _mm512_cvtepu8_epi16(bytes), size = _mm512_and_si512(at, _mm512_set1_epi16(0x7f));
    const __m512i few = _mm512_loadu_si512(C::TABLE.halves), last = _mm512_loadu_si512(C::TABLE.halves + 96);
    __m512i half = _mm512_add_epi16(_mm512_slli_epi16(size, SHIFT), _mm512_set1_epi16(BIAS << 7));
    half = _mm512_mask_permutexvar_epi16(half, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(DENORMALS)), size, few);
    half = _mm512_mask_permutexvar_epi16(half, _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(LAST)), size, last);
    return _mm512_ternarylogic_epi64(half, _mm512_slli_epi16(at, 8), _mm512_set1_epi16(-0x8000), 0xf8);  // half | (at & sign)
}
#else
// Their bits at the place of a float's are a float of another exponent's bias, which a product mends, denormals too.
INLINE vf eight_e4m3(const e4m3* from) {
    const vu bytes = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
    const vu size = bytes & 0x7f;
    const vf value = (vf)(size << 20) * 0x1p120f;
    return (vf)((vu)choose(size == 0x7f, splat(NAN), value) | (bytes & 0x80) << 24);
}
#endif

template <class C, class T> void decode(const C* from, T* to, long n) {
    long i = 0;
#if defined(__AVX512BW__)
    typedef uint16_t halves_type __attribute__((vector_size(64)));
    for (; i + 32 <= n; i += 32) {
        const halves_type halves = (halves_type)halves_of<C>(_mm256_loadu_si256((const __m256i*)(from + i)));
        if constexpr (std::is_same_v<T, bf16>) {
            std::memcpy(to + i, &halves, sizeof(halves));
        } else {
            bf16 two[32];
            std::memcpy(two, &halves, sizeof(halves));
            store(to + i, load(two));
            store(to + i + LANES, load(two + LANES));
        }
    }
#endif
#if !defined(__AVX512BW__)
    if constexpr (std::is_same_v<C, e4m3>)
        for (; i + LANES <= n; i += LANES) store(to + i, eight_e4m3(from + i));
#endif
    for (; i < n; i++) to[i] = narrow<T>(widen(as_bf16(from[i])));
}
