// Products with matrices of codes: whole numbers of 4, 5, 6 or 8 bits, with a scale and a zero point for each group of
// inputs of each output.
//
//   out = sum over groups of scale * sum over inputs of (code - zero) * x
//
// or, of a matrix with offsets and without zero points, sum over inputs of (scale * code - offset) * x.
//
// code_panels.hpp says how a matrix is kept.
//
// Activations are whole numbers too (code_rows.hpp), so that the sum over a chunk is exact, whatever computes it. Chunks
// are added in order: a row's result does not depend on its neighbours, on threads, or on the instruction set.
#pragma once
#include "code_panels.hpp"
#include "code_products.hpp"
#include "code_rows.hpp"
#include "code_tiles.hpp"
#include "product.hpp"

// How many sums a tile keeps in registers, and how many rows it has at most.
constexpr int CODE_SUMS = LANES < 16 ? 8 : 24;
template <class T> constexpr int CODE_TILE_ROWS = CODE_SUMS / 2 / (CodeRow<T>::PLANES - CodeRow<T>::SUMS + 1);

// A single row asks for what it will read so many bytes later: the processor's own foresight ends with each page of 4 KiB
// (measured from memory on Zen 5: 5 to 11 % faster than with half of it). Into the second-level cache: into the first, Zen 4
// took 1.4 times as long as without.
constexpr long SOON = 2048;
constexpr long LINE = 64;  // bytes that memory is read by

// parts[plane][r][v] += the products of `steps` steps of codes, at which `b` are then behind, with PLANES planes of R rows
// at a.
template <class T, int BITS, bool LEVELS, int P, int R, int PLANES>
INLINE void add_steps(vi (&parts)[PLANES][R][2 * P], const char* a, long stride, long plane, const uint8_t* (&b)[P],
                      long steps, const uint8_t* const* panels, vi levels, Fetch& fetch) {
    constexpr int VECTOR = 4 * LANES;
    constexpr int TOGETHER = BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // steps whose upper bits lie side by side
    for (long k = 0; k < steps; k += TOGETHER) {
        const uint8_t* upper[P];
        for (int p = 0; p < P; p++) {
            upper[p] = b[p];
            if constexpr (TOGETHER > 1) b[p] += 2 * VECTOR;
        }
#pragma GCC unroll 4
        for (int step = 0; step < TOGETHER; step++) {
            // All lines, those of the upper bits too: with some left out 8 rows of 6 bits took 1.7 times as long from memory.
            if constexpr (R > 1) {
                constexpr int LINES = (2 * VECTOR + (TOGETHER > 1 ? 2 * VECTOR / TOGETHER : 0) + LINE - 1) / LINE;
                for (int p = 0; p < P; p++)
                    for (int i = 0; i < LINES; i++) __builtin_prefetch(panels[p] + fetch.offset + i * fetch.pace / LINES, 0, 2);
                fetch.offset += fetch.pace;
            } else {
                for (int p = 0; p < P; p++) {
                    const bool begins = TOGETHER > 1 && !step;  // a loop of unknown length cost AVX2 a tenth
                    const uint8_t* first = begins ? upper[p] : b[p];
                    for (int v = 0; v < (begins ? 4 : 2); v++) __builtin_prefetch(first + SOON + v * VECTOR, 0, 2);
                }
            }
            for (int half = 0; half < (BITS == 8 ? 1 : 2); half++)
                for (int part = 0; part < CodeProducts::OPERANDS; part++, a += 4) {
                    vi w[2 * P];
                    for (int v = 0; v < 2 * P; v++)
                        w[v] = CodeProducts::operand<BITS, LEVELS>(b[v / 2] + v % 2 * VECTOR, half, part, levels,
                                                                   upper[v / 2] + v % 2 * VECTOR, 2 * step + half);
                    for (int t = 0; t < PLANES; t++)
                        for (int r = 0; r < R; r++) {
                            const vi x = in_all_lanes(a + r * stride + t * plane);
                            for (int v = 0; v < 2 * P; v++) parts[t][r][v] = CodeProducts::add(parts[t][r][v], w[v], x);
                        }
                }
            for (int p = 0; p < P; p++) b[p] += 2 * VECTOR;
        }
    }
}

// out[r * 2 * P + 2 * p + v] = rows[r] . columns of panel p, for R rows and P panels.
template <class T, int BITS, bool LEVELS, int P, int R>
__attribute__((noinline)) void code_tile(const CodeRows<T>& rows, const uint8_t* const* panels, const CodeShape& m, vf* out,
                                         Fetch fetch) {
    constexpr int PLANES = CodeRow<T>::PLANES, SUMS = CodeRow<T>::SUMS, VECTOR = 4 * LANES;
    constexpr int UPPER = PLANES - (SUMS - 1);  // planes whose sums are added up as whole numbers
    constexpr long STEP = BITS == 8 ? 4 : 8;
    const long header = m.header(), plane = rows.columns * CodeRow<T>::INPUT_BYTES, stride = CodeRows<T>::bytes_of(rows.columns);
    vf sums[R][2 * P] = {};
    const uint8_t *b[P], *heads[P];
    for (int p = 0; p < P; p++) b[p] = panels[p];
    const char* a = rows.planes;
    const bool is_chunk = m.group <= CHUNK;  // a group
    const vi levels = LEVELS ? in_all_quarters(m.levels) : vi{};
    long chunk = 0, within = 0;  // of the groups behind a header
    const long span = m.span();
    for (long first = 0; first < m.columns; first += m.group, within++) {
        if (first % span == 0) {
            within = 0;
            for (int p = 0; p < P; p++) {
                heads[p] = b[p];
                b[p] += header;
            }
        }
        auto scale = [&](int v) __attribute__((always_inline)) { return numbers_of_group(m, heads[v / 2], within, 0, v % 2); };
        vf of_group[R][2 * P] = {};
        const long end = std::min(first + m.group, m.columns);
        for (long begin = first; begin < end; begin += CHUNK, chunk++) {
            const long inputs = (std::min(CHUNK, end - begin) + CODE_STEP - 1) / CODE_STEP * CODE_STEP, steps = inputs / STEP;
            // Products begin with those of the zero points.
            auto begin_parts = [&](vi (&parts)[R][2 * P], int which) __attribute__((always_inline)) {
                const int32_t* from = rows.sums + chunk * SUMS + which;
                for (int v = 0; v < 2 * P; v++) {
                    if (m.has_offsets) {
                        for (int r = 0; r < R; r++) parts[r][v] = vi{};
                    } else if (m.zero >= 0) {
                        for (int r = 0; r < R; r++) parts[r][v] = in_all_lanes(from + r * rows.chunks * SUMS);
                    } else {
                        const vi zero = load_zeros(m.zeros_of(heads[v / 2]) + v % 2 * LANES);
                        const vi minus = minus_pairs(zero);
                        for (int r = 0; r < R; r++) parts[r][v] = add_pairs(vi{}, minus, in_all_lanes(from + r * rows.chunks * SUMS));
                    }
                }
            };
            vf values[R][2 * P];
            vi parts[UPPER][R][2 * P] = {};
            const uint8_t* again[P];
            for (int p = 0; p < P; p++) again[p] = b[p];
            begin_parts(parts[UPPER - 1], 0);
            add_steps<T, BITS, LEVELS>(parts, a, stride, plane, b, steps, panels, levels, fetch);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2 * P; v++)
                    values[r][v] = __builtin_convertvector(UPPER == 2 ? (parts[0][r][v] << 7) + parts[UPPER - 1][r][v] : parts[0][r][v], vf);
            if constexpr (SUMS == 2) {
                vi lowest[1][R][2 * P];
                begin_parts(lowest[0], 1);
                add_steps<T, BITS, LEVELS>(lowest, a + UPPER * plane, stride, plane, again, steps, panels, levels, fetch);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < 2 * P; v++)
                        values[r][v] = values[r][v] * 128.0f + __builtin_convertvector(lowest[0][r][v], vf);
            }
            for (int v = 0; v < 2 * P; v++) {
                const vf of_codes = is_chunk ? scale(v) : vf{};
                for (int r = 0; r < R; r++) {
                    const float of_inputs = rows.scales[r * rows.chunks + chunk];
                    if (is_chunk) sums[r][v] = fma(values[r][v], of_codes * of_inputs, sums[r][v]);
                    else of_group[r][v] = fma(values[r][v], splat(of_inputs), of_group[r][v]);
                }
            }
            if (m.has_offsets) {
                vf totals[R];
                for (int r = 0; r < R; r++) totals[r] = splat(-rows.total(r, chunk));
                for (int v = 0; v < 2 * P; v++) {
                    const vf offset = numbers_of_group(m, heads[v / 2], within, 1, v % 2);
                    for (int r = 0; r < R; r++) sums[r][v] = fma(offset, totals[r], sums[r][v]);
                }
            }
            a += inputs * CodeRow<T>::INPUT_BYTES;
        }
        if (is_chunk) continue;
        for (int v = 0; v < 2 * P; v++) {
            const vf of_codes = scale(v);
            for (int r = 0; r < R; r++) sums[r][v] = fma(of_group[r][v], of_codes, sums[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * P; v++) out[r * 2 * P + v] = sums[r][v];
}

// Whether groups are so small that what is done for each of them counts (small_groups_tile).
inline bool has_small_groups(const CodeShape& m) {
    return (m.group == 16 || m.group == 32) && m.columns % m.group == 0 && m.zero >= 0;
}

// The scales (which: 0) or offsets of the groups behind the heads of P panels, as floats: out[group * 2 * P + 2 * p + v].
template <int P>
INLINE void read_numbers(const CodeShape& m, const uint8_t* const (&heads)[P], int which, long groups, vf* out) {
    const long kinds = m.has_offsets ? 2 : 1;
    for (int v = 0; v < 2 * P; v++) {
        const long place = which * PANEL + v % 2 * LANES;
        const uint8_t* head = heads[v / 2];
        if (m.numbers != STEPS) {
            out[v] = m.numbers == HALVES ? load_halves(head + 2 * place) : load(reinterpret_cast<const float*>(head) + place);
            continue;
        }
        const vf units = load(reinterpret_cast<const float*>(head) + place);
        const uint8_t* steps = head + kinds * PANEL * sizeof(float) + place;
        for (long g = 0; g < groups; g++) out[g * 2 * P + v] = load_steps(steps + g * kinds * PANEL) * units;
    }
}

// What code_tile computes, in the same order, for small groups (`has_small_groups`): their numbers are read for all
// behind a header at once.
template <class T, int BITS, bool LEVELS, int P, int R>
__attribute__((noinline)) void small_groups_tile(const CodeRows<T>& rows, const uint8_t* const* panels, const CodeShape& m,
                                                 vf* out, Fetch fetch) {
    constexpr int PLANES = CodeRow<T>::PLANES, SUMS = CodeRow<T>::SUMS;
    constexpr int UPPER = PLANES - (SUMS - 1);
    constexpr long MOST_GROUPS = UNIT_INPUTS / 16;
    const long plane = rows.columns * CodeRow<T>::INPUT_BYTES, stride = CodeRows<T>::bytes_of(rows.columns);
    const long span = m.span(), chunks = rows.chunks, steps = m.group / (BITS == 8 ? 4 : 8);
    const vi levels = LEVELS ? in_all_quarters(m.levels) : vi{};
    const vi begins = vi{} - int(!m.has_offsets);  // a mask
    vf sums[R][2 * P] = {}, scales[MOST_GROUPS][2 * P], offsets[MOST_GROUPS][2 * P];
    const uint8_t *b[P], *heads[P];
    for (int p = 0; p < P; p++) b[p] = panels[p];
    const char* a = rows.planes;
    const float* of_inputs = rows.scales;
    const int32_t* starts = rows.sums;
    for (long first = 0; first < m.columns; first += span) {
        const long groups = std::min(span, m.columns - first) / m.group;
        for (int p = 0; p < P; p++) {
            heads[p] = b[p];
            b[p] += m.header();
        }
        read_numbers<P>(m, heads, 0, groups, scales[0]);
        if (m.has_offsets) read_numbers<P>(m, heads, 1, groups, offsets[0]);
        for (long g = 0; g < groups; g++, of_inputs++, starts += SUMS) {
            vi parts[UPPER][R][2 * P] = {};
            vf values[R][2 * P];
            const uint8_t* again[P];
            for (int p = 0; p < P; p++) again[p] = b[p];
            auto begin = [&](vi (&to)[R][2 * P], int which) __attribute__((always_inline)) {
                for (int r = 0; r < R; r++) {
                    const vi start = in_all_lanes(starts + r * chunks * SUMS + which) & begins;
                    for (int v = 0; v < 2 * P; v++) to[r][v] = start;
                }
            };
            begin(parts[UPPER - 1], 0);
            add_steps<T, BITS, LEVELS>(parts, a, stride, plane, b, steps, panels, levels, fetch);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2 * P; v++)
                    values[r][v] = __builtin_convertvector(UPPER == 2 ? (parts[0][r][v] << 7) + parts[UPPER - 1][r][v] : parts[0][r][v], vf);
            if constexpr (SUMS == 2) {
                vi lowest[1][R][2 * P];
                begin(lowest[0], 1);
                add_steps<T, BITS, LEVELS>(lowest, a + UPPER * plane, stride, plane, again, steps, panels, levels, fetch);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < 2 * P; v++)
                        values[r][v] = values[r][v] * 128.0f + __builtin_convertvector(lowest[0][r][v], vf);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2 * P; v++)
                    sums[r][v] = fma(values[r][v], scales[g][v] * of_inputs[r * chunks], sums[r][v]);
            if (m.has_offsets)
                for (int r = 0; r < R; r++) {
                    float total;
                    std::memcpy(&total, starts + r * chunks * SUMS, sizeof(total));
                    for (int v = 0; v < 2 * P; v++) sums[r][v] = sums[r][v] - offsets[g][v] * total;  // contracted
                }
            a += m.group * CodeRow<T>::INPUT_BYTES;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * P; v++) out[r * 2 * P + v] = sums[r][v];
}

template <class T, int BITS, bool LEVELS, int P, int R>
void code_tile_of(long height, const CodeRows<T>& rows, const uint8_t* const* panels, const CodeShape& m, vf* out, Fetch fetch) {
    if (height == R) {
        if (has_small_groups(m)) return small_groups_tile<T, BITS, LEVELS, P, R>(rows, panels, m, out, fetch);
        return code_tile<T, BITS, LEVELS, P, R>(rows, panels, m, out, fetch);
    }
    if constexpr (R > 1) code_tile_of<T, BITS, LEVELS, P, R - 1>(height, rows, panels, m, out, fetch);
}

// Call `sink(row, sums[2 * P])` for all rows, in tiles of nearly equal height; see `tiles` in matrix.hpp. Several panels at
// a time are for a single row. `ahead`: how many bytes behind these panels those lie that come next, or 0.
template <class T, int P, class Sink>
INLINE void code_tiles(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, const uint8_t* const (&panels)[P],
                       const Sink& sink, long ahead = 0) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16> && P == 1)
        if (uses_whole_tiles(m, rows) || uses_half_tiles(m, rows)) {
            for (long begin = 0; begin < rows; begin += BYTE_TILE_ROWS) {
                auto take = [&](long r, vf(&s)[2]) { sink(begin + r, s); };
                byte_tile_products(m, x.from(begin), std::min(BYTE_TILE_ROWS, rows - begin), panels[0],
                                   uses_whole_tiles(m, rows), take, begin ? 0 : ahead);
            }
            return;
        }
#endif
    constexpr int MOST = P > 1 ? 1 : CODE_TILE_ROWS<T>;
    const long count = (rows + MOST - 1) / MOST;
    const long step = m.bits == 8 ? 4 : 8, steps = m.padded() / step, pace = ahead ? PANEL * step * m.bits / 8 / count : 0;
    vf sums[MOST][2 * P];
    for (long t = 0; t < count; t++) {
        const long row = rows * t / count, height = rows * (t + 1) / count - row;
        const Fetch fetch = {ahead + steps * pace * t, pace};
        with_codes_of(m, [&](auto bits, auto levels) {
            code_tile_of<T, decltype(bits)::value, decltype(levels)::value, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        });
        for (long r = 0; r < height; r++) sink(row + r, sums[r]);
    }
}

constexpr int CODE_PANELS = 4;  // of a single row

// Panels [first, last) of out = x @ matrix.T + bias (+ onto, which may be `out` itself).
template <class T, class Out>
void multiply_codes(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, Out* out, const Out* onto, long first, long last,
                    long distance) {
    const long width = m.outputs, ahead = rows > TILE_ROWS ? distance * m.panel_bytes() : 0;
    long p = first;
    auto next = [&](auto number) {
        constexpr int P = number;
        const uint8_t* panels[P];
        for (int i = 0; i < P; i++) panels[i] = m.panel(p + i);
        code_tiles<T, P>(m, x, rows, panels, [&](long r, vf(&s)[2 * P]) {
            put(out + r * m.pitch, s, 2 * P, p * PANEL, width, m.added(), onto ? onto + r * m.pitch : nullptr);
        }, ahead);
        p += P;
    };
    while (rows == 1 && p + CODE_PANELS <= last) next(std::integral_constant<int, CODE_PANELS>{});
    while (p < last) next(std::integral_constant<int, 1>{});
}

// Panels [first, last) of out = silu(x @ gate.T) * (x @ up.T); `m` holds the gate's panels, then those of up.
template <class T, class Out>
void multiply_codes_gated(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, Out* out, long first, long last,
                          long distance) {
    const long width = m.outputs / 2, half = width / PANEL, ahead = rows > TILE_ROWS ? distance * m.panel_bytes() : 0;
    auto finish = [&](long p, long r, const vf* gates, const vf* ups) {
        put_gated(out + r * width + p * PANEL, gates, ups, m.bias ? m.added() + p * PANEL : nullptr, width);
    };
    long p = first;
    for (; rows == 1 && p + 2 <= last; p += 2) {
        const uint8_t* const panels[4] = {m.panel(p), m.panel(p + 1), m.panel(half + p), m.panel(half + p + 1)};
        code_tiles<T, 4>(m, x, rows, panels, [&](long r, vf(&s)[8]) {
            finish(p, r, s, s + 4);
            finish(p + 1, r, s + 2, s + 6);
        });
    }
#if defined(TERCET_TILES)
    constexpr long BLOCK = BYTE_TILE_ROWS;
#else
    constexpr long BLOCK = 48;
#endif
    vf gates[BLOCK][2];
    for (; p < last; p++) {
        const uint8_t *const gate[1] = {m.panel(p)}, *const up[1] = {m.panel(half + p)};
        for (long begin = 0; begin < rows; begin += BLOCK) {
            const long count = std::min(BLOCK, rows - begin);
            code_tiles<T, 1>(m, x.from(begin), count, gate, [&](long r, vf(&s)[2]) {
                gates[r][0] = s[0];
                gates[r][1] = s[1];
            }, ahead);
            code_tiles<T, 1>(m, x.from(begin), count, up, [&](long r, vf(&s)[2]) { finish(p, begin + r, gates[r], s); }, ahead);
        }
    }
}

// Space for the rows of a team's products, of whichever matrix needs the most.
template <class T> CodeRows<T> code_rows_in(char* space, long rows, const CodeShape& m) {
    CodeRows<T> out = {nullptr, nullptr, nullptr, m.padded(), m.chunks()};
    out.planes = Scratch::take<char>(space, rows * CodeRows<T>::bytes_of(out.columns));
    out.scales = Scratch::take<float>(space, rows * out.chunks);
    out.sums = Scratch::take<int32_t>(space, rows * out.chunks * CodeRow<T>::SUMS);
    return out;
}
template <class T> size_t code_rows_size(long rows, const CodeShape& m) {
    return CodeRows<T>::size(rows, m.padded(), m.chunks());
}

// All threads quantize their share of the rows of x, and meet. Each reads no other rows than `Team::share` gives it.
template <class T, class X>
CodeRows<T> shared_code_rows(const CodeShape& m, const X* x, long stride, long rows, char* space, Team team) {
    CodeRows<T> out = code_rows_in<T>(space, rows, m);
    long first, last;
    team.share(rows, first, last);
    for (long r = first; r < last; r++) quantize_row<T>(x + r * stride, m.order, m.columns, m.group, m.has_offsets ? SUMS_ALONE : m.zero, out, r);
    team.barrier();
    return out;
}

// Rows that stay in the second-level cache while all panels are multiplied: they are read again for each.
template <class T> long cached_rows(const CodeRows<T>& x) {
#if defined(TERCET_TILES)
    const long bytes = tile_cache_bytes;
#else
    constexpr long bytes = 384 << 10;
#endif
    return std::max(bytes / CodeRows<T>::bytes_of(x.columns), 4L * CODE_TILE_ROWS<T>);
}

template <class T, class Out>
void code_product(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, Out* out, const Out* onto, Team team,
                  std::atomic<long>& next) {
    auto work = [&](long row, long count, long first, long last, long distance) {
        multiply_codes<T, Out>(m, x.from(row), count, out + row * m.pitch, onto ? onto + row * m.pitch : nullptr, first,
                               last, distance);
    };
    Pieces(rows, m.panel_count(), team.size, cached_rows(x)).take(next, team.size, rows == 1 ? 4 : 2, work);
}

template <class T, class Out>
void gated_code_product(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, Out* out, Team team, std::atomic<long>& next) {
    const long width = m.outputs / 2;
    auto work = [&](long row, long count, long first, long last, long distance) {
        multiply_codes_gated<T>(m, x.from(row), count, out + row * width, first, last, distance);
    };
    Pieces(rows, width / PANEL, team.size, cached_rows(x)).take(next, team.size, rows == 1 ? 2 : 1, work);
}
