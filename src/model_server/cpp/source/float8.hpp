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

// Codes of 4 bits of a table come in blocks of so many, the first half of them in the lower halves of its bytes.
constexpr long TABLE_BLOCK = 32;

// n codes, a multiple of TABLE_BLOCK, as the numbers that they stand for.
template <class T, class D> void decode_table(const uint8_t* from, const float* table, D* to, long n) {
    alignas(64) float numbers[TABLE_BLOCK / 2];
    for (int i = 0; i < TABLE_BLOCK / 2; i++) numbers[i] = widen(narrow<T>(table[i]));
    const __m128i mask = _mm_set1_epi8(15);
#if defined(__AVX512BW__)
    const __m512 all = _mm512_load_ps(numbers);
    const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(all), 16);
    const __m512i halves = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(upper));
#else
    const __m256 small = _mm256_load_ps(numbers), large = _mm256_load_ps(numbers + 8);
    auto put_eight = [&](__m128i codes, D* out) __attribute__((always_inline)) {
        const __m256i at = _mm256_cvtepu8_epi32(codes);
        const __m256 is_large = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
        const __m256 value = _mm256_blendv_ps(_mm256_permutevar8x32_ps(small, at), _mm256_permutevar8x32_ps(large, at), is_large);
        store(out, (vf)value);
    };
#endif
    for (long i = 0; i < n; i += TABLE_BLOCK, from += TABLE_BLOCK / 2) {
        const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
        const __m128i first = _mm_and_si128(bytes, mask), second = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
#if defined(__AVX512BW__)
        if constexpr (std::is_same_v<D, bf16>) {
            const __m512i at = _mm512_cvtepu8_epi16(_mm256_set_m128i(second, first));
            _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(at, halves));
        } else {
            _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(first), all));
            _mm512_storeu_ps(to + i + 16, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(second), all));
        }
#else
        put_eight(first, to + i);
        put_eight(_mm_srli_si128(first, 8), to + i + 8);
        put_eight(second, to + i + 16);
        put_eight(_mm_srli_si128(second, 8), to + i + 24);
#endif
    }
}
