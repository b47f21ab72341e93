// Numbers of a KV cache in 8 bits. bfloat16 holds all of them, so that reading is a look-up by 7 bits, and a sign.
#pragma once
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

template <class C, class T> void decode(const C* from, T* to, long n) {
    long i = 0;
#if defined(__AVX512BW__)
    typedef uint8_t bytes_type __attribute__((vector_size(32)));
    typedef uint16_t halves_type __attribute__((vector_size(64)));
    halves_type table[4];
    std::memcpy(table, C::TABLE.halves, sizeof(table));
    for (; i + 32 <= n; i += 32) {
        bytes_type bytes;
        std::memcpy(&bytes, from + i, sizeof(bytes));
        __m512i at = (__m512i)__builtin_convertvector(bytes, halves_type);
        __m512i low = _mm512_permutex2var_epi16((__m512i)table[0], at, (__m512i)table[1]);
        __m512i high = _mm512_permutex2var_epi16((__m512i)table[2], at, (__m512i)table[3]);
        __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(at, _mm512_set1_epi16(0x40)), low, high);
        halves_type halves = (halves_type)size | (((halves_type)at & 0x80) << 8);
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
    for (; i < n; i++) to[i] = narrow<T>(widen(as_bf16(from[i])));
}
