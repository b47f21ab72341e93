// How matrices of codes are kept: in panels of PANEL outputs, of which one stream of memory serves a single row, and which
// many rows read from the cache. A panel has for each group of inputs the scales and offsets, the zero points (bytes,
// unless all of the matrix are the same), and the codes, as the instructions for products of bytes read them: for each 4
// inputs (8 bits) or 8 inputs (4 bits, the first four in the lower halves) four bytes of each output. Codes of 5 and 6 bits
// are those of 4 bits, and before each 32 or 16 inputs four bytes of each output with the upper bits: byte k has those of
// the inputs k, 4 + k, 8 + k and so on, the first in its lowest bits.
//
// Scales and offsets take as few bytes as all of a matrix allow without being rounded (`NumberKind`).
#pragma once
#include <algorithm>
#include <atomic>
#include <immintrin.h>

#include "code_rows.hpp"
#include "matrix.hpp"

// How scales and offsets are kept. STEPS: a byte each, multiplied by a unit, a float, that the groups of UNIT_INPUTS inputs
// share; for each so many inputs a panel has the units of its scales, then of its offsets, then for each group the steps of
// both.
enum NumberKind { FLOATS = 0, HALVES = 1, STEPS = 2 };
constexpr long UNIT_INPUTS = 256, MOST_STEPS_GROUP = 32;

struct CodeShape {
    const uint8_t* panels;
    const void* bias;      // [outputs] of the activations' type, or null
    const int32_t* order;  // [columns]: the input that each is multiplied by, or null: the same
    long outputs, inputs, columns, bits, group;
    long zero;             // of all groups, or -1: each has its own
    long is_float8;        // not whole numbers, but floats, e4m3 or of a table: zero 0, no order (float8_product.hpp)
    const uint8_t* levels;  // [16]: the numbers that codes of 4 bits stand for, or null: codes are these themselves
    const float* table;    // [16]: the floats that codes of 4 bits stand for, or null: floats are e4m3
    long has_offsets;      // then zero is 0
    long numbers;          // NumberKind

    long padded() const { return (columns + CODE_STEP - 1) / CODE_STEP * CODE_STEP; }
    long panel_count() const { return (outputs + PANEL - 1) / PANEL; }
    long group_count() const { return (columns + group - 1) / group; }
    long chunks() const {
        const long whole = (std::min(group, columns) + CHUNK - 1) / CHUNK, last = columns - (group_count() - 1) * group;
        return (group_count() - 1) * whole + (last + CHUNK - 1) / CHUNK;
    }
    // The inputs behind one header, and its size.
    long span() const { return numbers == STEPS ? UNIT_INPUTS : group; }
    long header() const {
        const long kinds = has_offsets ? 2 : 1;
        if (numbers == STEPS) return kinds * PANEL * (sizeof(float) + UNIT_INPUTS / group);
        const long rounded = (PANEL + 4 * LANES - 1) / (4 * LANES) * 4 * LANES;
        return kinds * PANEL * (numbers == HALVES ? 2 : sizeof(float)) + (zero < 0 ? rounded : 0);
    }
    const uint8_t* zeros_of(const uint8_t* head) const { return head + PANEL * (numbers == HALVES ? 2 : sizeof(float)); }
    long panel_bytes() const { return (columns + span() - 1) / span() * header() + padded() * PANEL * bits / 8; }
    // Inputs whose upper bits lie side by side.
    long upper_inputs() const { return bits == 5 ? 32 : 16; }
};

template <class T> struct CodeMatrix : CodeShape {
    long pitch;  // from a row of what it is multiplied to, to the next
    explicit CodeMatrix(const CodeShape& shape) : CodeMatrix(shape, shape.outputs) {}
    CodeMatrix(const CodeShape& shape, long pitch) : CodeShape(shape), pitch(pitch) {}
    const uint8_t* panel(long index) const { return panels + index * panel_bytes(); }
    const T* added() const { return static_cast<const T*>(bias); }
};

// n numbers as whole ones of 8 bits times a float, exactly: their greatest common divisor. False: they have none such.
inline bool as_steps(const float* numbers, long n, float& unit, int8_t* steps) {
    int64_t parts[UNIT_INPUTS];
    int exponents[UNIT_INPUTS], least = 1 << 20;
    for (long i = 0; i < n; i++) {
        parts[i] = exponents[i] = 0;
        if (!std::isfinite(numbers[i])) return false;
        if (numbers[i] == 0.0f) continue;
        parts[i] = int64_t(std::ldexp(std::frexp(numbers[i], &exponents[i]), 24));
        const int even = __builtin_ctzll(parts[i]);
        parts[i] /= int64_t(1) << even;
        exponents[i] += even - 24;
        least = std::min(least, exponents[i]);
    }
    int64_t divisor = 0;
    for (long i = 0; i < n; i++) {
        if (!parts[i]) continue;
        if (exponents[i] - least > 7) return false;
        parts[i] *= int64_t(1) << (exponents[i] - least);
        for (int64_t rest = std::abs(parts[i]); rest;) {
            const int64_t next = divisor % rest;
            divisor = rest;
            rest = next;
        }
    }
    // Signed so that 128 is in reach: files of llama.cpp have it as -128 times a factor below zero.
    if (divisor && std::any_of(parts, parts + n, [&](int64_t part) { return part / divisor == 128; })) divisor = -divisor;
    unit = divisor ? std::ldexp(float(divisor), least) : 0.0f;
    for (long i = 0; i < n; i++) {
        const int64_t step = divisor ? parts[i] / divisor : 0;
        if (step < -128 || step > 127) return false;
        steps[i] = int8_t(step);
    }
    return true;
}

inline bool is_half(float x) { return _cvtsh_ss(_cvtss_sh(x, 0)) == x; }

// Whether a kind keeps all numbers [outputs, groups] of the rows [first, last) as they are.
inline bool can_keep(const CodeShape& m, NumberKind kind, const float* numbers, long first, long last) {
    const long groups = m.group_count();
    if (kind == HALVES) return std::all_of(numbers + first * groups, numbers + last * groups, is_half);
    if (m.group > MOST_STEPS_GROUP || UNIT_INPUTS % m.group || m.zero < 0) return kind == FLOATS;
    const long per = UNIT_INPUTS / m.group;
    float unit;
    int8_t steps[UNIT_INPUTS];
    for (long r = first; r < last; r++)
        for (long g = 0; g < groups; g += per)
            if (!as_steps(numbers + r * groups + g, std::min(per, groups - g), unit, steps)) return false;
    return true;
}

// The scales (which: 0) or offsets (1) [outputs, groups] of one output in the header of a span that begins with the group g.
inline void pack_numbers(const CodeShape& m, const float* numbers, int which, long row, long g, uint8_t* header) {
    const long groups = m.group_count(), c = row % PANEL, kinds = m.has_offsets ? 2 : 1, place = which * PANEL + c;
    const float* from = row < m.outputs ? numbers + row * groups + g : nullptr;
    const float first = from ? *from : 0.0f;
    if (m.numbers == FLOATS) {
        std::memcpy(header + place * sizeof(float), &first, sizeof(first));
    } else if (m.numbers == HALVES) {
        const uint16_t half = _cvtss_sh(first, 0);
        std::memcpy(header + place * sizeof(half), &half, sizeof(half));
    } else if (from) {
        float unit;
        int8_t steps[UNIT_INPUTS];
        const long per = UNIT_INPUTS / m.group, count = std::min(per, groups - g);
        as_steps(from, count, unit, steps);
        std::memcpy(header + place * sizeof(float), &unit, sizeof(unit));
        for (long i = 0; i < count; i++)
            header[kinds * PANEL * sizeof(float) + i * kinds * PANEL + place] = uint8_t(steps[i]);
    }
}

// codes [outputs, columns] of a byte each, or of 4 bits [outputs, columns / 2]; scales, zeros [outputs, groups]; offsets
// [outputs, groups] or null. out: zeros.
inline void pack_codes(const CodeShape& m, const uint8_t* codes, const float* scales, const uint8_t* zeros,
                       const float* offsets, uint8_t* out, long first, long last) {
    const long groups = m.group_count(), width = m.bits == 4 ? m.columns / 2 : m.columns, upper = m.upper_inputs();
    for (long p = first; p < last; p++) {
        uint8_t* to = out + p * m.panel_bytes();
        for (long g = 0; g < groups; g++) {
            const long begin = g * m.group, end = std::min(begin + m.group, m.columns);
            const long filled = (end - begin + CODE_STEP - 1) / CODE_STEP * CODE_STEP;
            const bool begins = begin % m.span() == 0;
            for (long c = 0; c < PANEL; c++) {
                const long row = p * PANEL + c;
                const bool exists = row < m.outputs;
                if (begins) {
                    pack_numbers(m, scales, 0, row, g, to);
                    if (m.has_offsets) pack_numbers(m, offsets, 1, row, g, to);
                }
                if (m.zero < 0) const_cast<uint8_t*>(m.zeros_of(to))[c] = exists ? zeros[row * groups + g] : 0;
                uint8_t* at = to + (begins ? m.header() : 0) + c * 4;
                const uint8_t* from = codes + row * width;
                auto code = [&](long i) -> uint8_t {
                    if (!exists || i >= end) return 0;
                    return m.bits == 4 ? from[i / 2] >> (i % 2 * 4) & 15 : from[i];
                };
                const long step = m.bits == 8 ? 4 : 8;
                for (long i = begin; i < begin + filled; i += step, at += PANEL * 4) {
                    if (m.bits % 4 && (i - begin) % upper == 0) {
                        for (long j = 0; j < upper; j++) at[j % 4] |= code(i + j) >> 4 << (m.bits - 4) * (j / 4);
                        at += PANEL * 4;
                    }
                    for (long k = 0; k < 4; k++)
                        at[k] = m.bits == 8 ? code(i + k) : (code(i + k) & 15) | code(i + 4 + k) << 4;
                }
            }
            to += (begins ? m.header() : 0) + filled * PANEL * m.bits / 8;
        }
    }
}

INLINE vf load_halves(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
}
INLINE vf load_steps(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
}
// The v-th vector of the scales (which: 0) or offsets (1) of a group, the `within`-th of those behind a header.
INLINE vf numbers_of_group(const CodeShape& m, const uint8_t* header, long within, int which, int v) {
    const long place = which * PANEL + v * LANES, kinds = m.has_offsets ? 2 : 1;
    if (m.numbers == FLOATS) return load(reinterpret_cast<const float*>(header) + place);
    if (m.numbers == HALVES) return load_halves(header + 2 * place);
    const vf units = load(reinterpret_cast<const float*>(header) + place);
    return load_steps(header + kinds * PANEL * (sizeof(float) + within) + place) * units;
}
