// Rows of activations as whole numbers, for products with matrices of codes (codes.hpp). For each chunk of at most 256
// inputs one scale:
//
//   x ~ scale * q,  |q| <= 127 * 128 for bfloat16, |q| <= 127 * 128 * 128 for float
//
// which is 14 or 21 bits: more than bfloat16 has, and within a hundred-thousandth of the chunk's largest for float. The
// numbers are cut into terms of 7 bits and a sign, q = 128 * high + low, where there are instructions for products of
// bytes (VNNI), and kept in 16 bits elsewhere: sums of products are exact in both ways, so that results are the same.
#pragma once
#include <immintrin.h>

#include "vectors.hpp"

constexpr long CHUNK = 256;  // whose sums of products with codes of 8 bits have 31 bits at most
constexpr long CODE_STEP = 8;  // inputs of a matrix of codes are filled up to a multiple of these

#if defined(__AVX512VNNI__)
constexpr bool HAS_BYTE_PRODUCTS = true;
#else
constexpr bool HAS_BYTE_PRODUCTS = false;
#endif

// T: of the activations. PLANES: parts that a product is computed with, one after another, of INPUT_BYTES per input.
// SUMS: whole numbers that are summed up for a chunk: q, or its upper terms and the lowest one.
template <class T> struct CodeRow {
    static constexpr int TERMS = std::is_same_v<T, float> ? 3 : 2;
    static constexpr int PLANES = HAS_BYTE_PRODUCTS ? TERMS : TERMS - 1;
    static constexpr int INPUT_BYTES = HAS_BYTE_PRODUCTS ? 1 : 2;
    static constexpr int SUMS = TERMS - 1;
    static constexpr float LARGEST = TERMS == 3 ? 127.0f * 128 * 128 : 127.0f * 128;
};

// A team's rows; each has PLANES planes of `columns` inputs, and for each chunk a scale and SUMS sums (`beginning`).
template <class T> struct CodeRows {
    char* planes;
    float* scales;
    int32_t* sums;
    long columns, chunks;

    // A line more than the numbers take: the rows of a tile would lie a power of two apart, and so share few sets of the
    // first-level cache.
    static constexpr long bytes_of(long columns) { return columns * CodeRow<T>::PLANES * CodeRow<T>::INPUT_BYTES + 64; }
    const char* row(long r) const { return planes + r * bytes_of(columns); }
    // The sum of a chunk's inputs, a float, where that is wanted in place of the sums.
    float total(long r, long chunk) const {
        float out;
        std::memcpy(&out, sums + (r * chunks + chunk) * CodeRow<T>::SUMS, sizeof(out));
        return out;
    }
    CodeRows from(long r) const {
        return {planes + r * bytes_of(columns), scales + r * chunks, sums + r * chunks * CodeRow<T>::SUMS, columns, chunks};
    }
    // What `count` rows take, with what alignment may cost.
    static size_t size(long count, long columns, long chunks) {
        return count * (bytes_of(columns) + chunks * (sizeof(float) + CodeRow<T>::SUMS * sizeof(int32_t))) + 4 * 64;
    }
};

INLINE vu larger_bits(vu a, vu b) {
#if defined(__AVX512F__)
    return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
    return (vu)_mm256_max_epu32((__m256i)a, (__m256i)b);
#endif
}

INLINE int32_t total_of(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}
// Whether a float of these bits, without their signs, is an infinity or NaN.
INLINE bool has_infinite(vu sizes) {
    const vi infinite = sizes >= 0x7f800000;
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)infinite, (__m512i)infinite);
#else
    return _mm256_movemask_ps((__m256)infinite);
#endif
}

// In place of a zero point: the sum of a chunk's inputs is wanted itself, as a float.
constexpr long SUMS_ALONE = -2;

// What products of a chunk begin with: -zero * the sum of its inputs if one zero point is that of all codes. Otherwise
// (zero < 0) the sum, of less than 23 bits, as two numbers of 16 bits, 128 * the upper one + the lower one: its products
// with zero points, which are given as (-128 * zero, -zero), are then those of pairs.
INLINE int32_t beginning(vi x, long zero) {
    const int32_t total = total_of(x);
    return zero < 0 ? (total & 127) << 16 | (total >> 7 & 0xffff) : -int32_t(zero) * total;
}

// One plane's share of a vector of numbers; n of them exist.
INLINE void store_terms(char* plane, long at, vi terms, long n) {
#if defined(__AVX512VNNI__)
    const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)terms);
    if (n == LANES) std::memcpy(plane + at, &bytes, LANES);
    else std::memcpy(plane + at, &bytes, n);
#else
    // Of four inputs first the even ones, then the odd ones: as codes are parted (codes.hpp).
    constexpr vi PARTED = (COUNTING & ~3) | (COUNTING & 1) << 1 | (COUNTING >> 1 & 1);
    terms = __builtin_shuffle(terms, PARTED);
#if defined(__AVX512F__)
    const __m256i words = _mm512_cvtepi32_epi16((__m512i)terms);
#else
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)terms, (__m256i)terms), 0x08);
    const __m128i words = _mm256_castsi256_si128(both);
#endif
    if (n == LANES) std::memcpy(plane + 2 * at, &words, 2 * LANES);
    else std::memcpy(plane + 2 * at, &words, 2 * n);
#endif
}

// T: what decides how many bits a number keeps; X: what x is given as.
// The chunk of `count` inputs of x, or of those that `order` names; `at`: its first place in the row.
template <class T, class X>
void quantize_chunk(const X* x, const int32_t* order, long at, long count, long zero, char* planes, long columns,
                    float& scale, int32_t* sums) {
    constexpr int TERMS = CodeRow<T>::TERMS;
    alignas(64) float values[CHUNK];
    const long filled = (count + LANES - 1) / LANES * LANES;
    const long kept = (count + CODE_STEP - 1) / CODE_STEP * CODE_STEP;
    if (order) for (long i = 0; i < count; i++) values[i] = widen(x[order[at + i]]);
    else convert(x + at, values, count);
    for (long i = count; i < filled; i++) values[i] = 0;
    vu sizes = {};  // floats without their sign have the order of their bits; infinities and NaN are the last
    for (long i = 0; i < filled; i += LANES) sizes = larger_bits((vu)load(values + i) & 0x7fffffff, sizes);
    const float peak = largest((vf)(sizes & (vu)(sizes < 0x7f800000)));
    const bool counts = peak > 1e-30f;  // below, the inverse would not be finite
    const float inverse = counts ? CodeRow<T>::LARGEST / peak : 0.0f;
    scale = counts ? peak / CodeRow<T>::LARGEST : 0.0f;
    if (has_infinite(sizes)) scale = NAN;
    vi upper_sum = {}, lowest_sum = {};
    for (long i = 0; i < filled; i += LANES) {
        vf rounded = load(values + i) * inverse + 12582912.0f;  // 1.5 * 2^23: to the nearest whole number
        vi q = (vi)rounded - 0x4b400000;
        vi upper = q, lowest = {};
        if constexpr (TERMS == 3) {
            upper = (q + 64) >> 7;
            lowest = q - (upper << 7);
            lowest_sum = lowest_sum + lowest;
        }
        upper_sum = upper_sum + upper;
        const long n = std::min<long>(LANES, kept - i), bytes = columns * CodeRow<T>::INPUT_BYTES;
        char* to = planes;
        if constexpr (HAS_BYTE_PRODUCTS) {
            vi high = (upper + 64) >> 7;
            store_terms(to, at + i, high, n);
            store_terms(to += bytes, at + i, upper - (high << 7), n);
        } else {
            store_terms(to, at + i, upper, n);
        }
        if constexpr (TERMS == 3) store_terms(to + bytes, at + i, lowest, n);
    }
    if (zero == SUMS_ALONE) {
        // Of less than 24 bits: exact as floats.
        const float upper = total_of(upper_sum), lower = TERMS == 3 ? total_of(lowest_sum) : 0;
        const float total = (TERMS == 3 ? upper * 128.0f + lower : upper) * scale;
        std::memcpy(sums, &total, sizeof(total));
        return;
    }
    sums[0] = beginning(upper_sum, zero);
    if constexpr (TERMS == 3) sums[1] = beginning(lowest_sum, zero);
}

// A whole row for a matrix whose codes have `group` inputs with one scale.
template <class T, class X>
void quantize_row(const X* x, const int32_t* order, long num_columns, long group, long zero,
                  const CodeRows<T>& out, long r) {
    long chunk = 0;
    for (long first = 0; first < num_columns; first += group)
        for (long at = first, end = std::min(first + group, num_columns); at < end; at += CHUNK, chunk++)
            quantize_chunk<T>(x, order, at, std::min(CHUNK, end - at), zero, const_cast<char*>(out.row(r)), out.columns,
                           out.scales[r * out.chunks + chunk], out.sums + (r * out.chunks + chunk) * CodeRow<T>::SUMS);
}
