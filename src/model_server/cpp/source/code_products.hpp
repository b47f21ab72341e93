// How codes are taken out of their panels and multiplied by activations, a vector of outputs at a time.
#pragma once
#include "code_panels.hpp"

INLINE vi load_lanes(const void* p) {
    vi out;
    std::memcpy(&out, p, sizeof(out));
    return out;
}
INLINE vi in_all_lanes(const void* p) {
    int32_t one;
    std::memcpy(&one, p, sizeof(one));
    return vi{} + one;
}
// Bytes as numbers, a lane each; the compiler's own conversion goes through single numbers.
INLINE vi load_zeros(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#endif
}
// sum += the products of 16-bit numbers, two in a lane.
INLINE vi add_pairs(vi sum, vi a, vi b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// What a chunk's products with zero points are the products of, beside `beginning`.
INLINE vi minus_pairs(vi zero) { return (-zero << 16) | (-128 * zero & 0xffff); }

INLINE vi in_all_quarters(const uint8_t* sixteen) {
    const __m128i one = _mm_loadu_si128((const __m128i*)sixteen);
#if defined(__AVX512F__)
    return (vi)_mm512_broadcast_i32x4(one);
#else
    return (vi)_mm256_broadcastsi128_si256(one);
#endif
}
// Codes of 4 bits, each in a byte, as the numbers that they stand for.
INLINE vi look_up(vi levels, vi codes) {
#if defined(__AVX512F__)
    return (vi)_mm512_shuffle_epi8((__m512i)levels, (__m512i)codes);
#else
    return (vi)_mm256_shuffle_epi8((__m256i)levels, (__m256i)codes);
#endif
}

// The upper bits of the codes of the `quarter`-th four inputs of those that `p` has upper bits of, where codes have them.
template <int BITS> INLINE vi upper_bits(const uint8_t* p, int quarter) {
    constexpr int WIDTH = BITS - 4;
    const vu all = (vu)load_lanes(p);
    const int shift = quarter * WIDTH - 4;
    return (vi)(shift < 0 ? all << -shift : all >> shift) & (BITS == 5 ? 0x10101010 : 0x30303030);
}

// Call `use` with a number of bits and whether codes stand for levels, both as types.
template <class Use> INLINE void with_codes_of(const CodeShape& m, const Use& use) {
    constexpr std::false_type themselves{};
    if (m.bits == 8) use(std::integral_constant<int, 8>{}, themselves);
    else if (m.bits == 6) use(std::integral_constant<int, 6>{}, themselves);
    else if (m.bits == 5) use(std::integral_constant<int, 5>{}, themselves);
    else if (m.levels) use(std::integral_constant<int, 4>{}, std::true_type{});
    else use(std::integral_constant<int, 4>{}, themselves);
}

// How codes are multiplied: the codes of four inputs as one operand (bytes) or as two (of 16 bits, the even inputs first).
// b: the codes, of the lower four bits those of eight inputs, and `half` which of these. upper: see upper_bits.
struct CodeProducts {
#if defined(__AVX512VNNI__)
    static constexpr int OPERANDS = 1;
    template <int BITS, bool LEVELS>
    static INLINE vi operand(const uint8_t* b, int half, int, vi levels, const uint8_t* upper, int quarter) {
        vi four = load_lanes(b);
        if constexpr (BITS == 8) return four;
        const vi codes = (vi)((vu)four >> (4 * half)) & 0x0f0f0f0f;
        if constexpr (BITS % 4) return codes | upper_bits<BITS>(upper, quarter);
        return LEVELS ? look_up(levels, codes) : codes;
    }
    static INLINE vi add(vi sum, vi codes, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
#else
    static constexpr int OPERANDS = 2;
    template <int BITS, bool LEVELS>
    static INLINE vi operand(const uint8_t* b, int half, int odd, vi levels, const uint8_t* upper, int quarter) {
        if constexpr (LEVELS || BITS % 4) {
            const vi codes = (vi)((vu)load_lanes(b) >> (4 * half)) & 0x0f0f0f0f;
            const vi whole = BITS % 4 ? codes | upper_bits<BITS>(upper, quarter) : look_up(levels, codes);
            return (vi)((vu)whole >> (8 * odd)) & 0x00ff00ff;
        }
        return (vi)((vu)load_lanes(b) >> (4 * half + 8 * odd)) & (BITS == 4 ? 0x000f000f : 0x00ff00ff);
    }
    static INLINE vi add(vi sum, vi codes, vi x) { return add_pairs(sum, codes, x); }
#endif
};
