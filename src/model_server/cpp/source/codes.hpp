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
#include "code_rows.hpp"
#include "code_tiles.hpp"
#include "product.hpp"

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

// How many sums a tile keeps in registers, and how many rows it has at most.
constexpr int CODE_SUMS = LANES < 16 ? 8 : 24;
template <class T> constexpr int CODE_TILE_ROWS = CODE_SUMS / 2 / (CodeRow<T>::PLANES - CodeRow<T>::SUMS + 1);

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
            if constexpr (R > 1) {
                for (int p = 0; p < P; p++) __builtin_prefetch(panels[p] + fetch.offset, 0, 2);
                fetch.offset += fetch.pace;
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
    const long header = m.header(), plane = rows.columns * CodeRow<T>::INPUT_BYTES, stride = PLANES * plane;
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

template <class T, int BITS, bool LEVELS, int P, int R>
void code_tile_of(long height, const CodeRows<T>& rows, const uint8_t* const* panels, const CodeShape& m, vf* out, Fetch fetch) {
    if (height == R) return code_tile<T, BITS, LEVELS, P, R>(rows, panels, m, out, fetch);
    if constexpr (R > 1) code_tile_of<T, BITS, LEVELS, P, R - 1>(height, rows, panels, m, out, fetch);
}

#if defined(TERCET_TILES)
// Whether every chunk is made of whole tiles.
inline bool is_of_byte_tiles(const CodeShape& m) {
    return !m.has_offsets && m.numbers != STEPS && m.bits % 4 == 0 && m.columns % BYTE_TILE_INPUTS == 0 && (m.group >= m.columns || m.group % BYTE_TILE_INPUTS == 0);
}

// Call `sink(row, sums[2])` for at most BYTE_TILE_ROWS rows: what code_tile computes, in the same order.
template <class Sink>
void code_tile_products(const CodeMatrix<bf16>& m, const CodeRows<bf16>& x, long rows, const uint8_t* panel, const Sink& sink) {
    alignas(64) int32_t parts[2][TILE_HEIGHT][TILE_PANEL];
    alignas(64) uint8_t space[CHUNK * TILE_PANEL];
    vf sums[BYTE_TILE_ROWS][2], of_group[BYTE_TILE_ROWS][2];
    const long height = std::min<long>(rows, TILE_HEIGHT), stride = CodeRows<bf16>::bytes_of(x.columns);
    const bool is_chunk = m.group <= CHUNK;  // a group
    configure_tiles(int(height));
    for (long r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf{};
    long chunk = 0;
    for (long first = 0; first < m.columns; first += m.group) {
        const uint8_t* head = panel;
        panel += m.header();
        const long end = std::min(first + m.group, m.columns);
        const vf scales[2] = {numbers_of_group(m, head, 0, 0, 0), numbers_of_group(m, head, 0, 0, 1)};
        vi minus[2] = {};
        if (m.zero < 0)
            for (int v = 0; v < 2; v++) minus[v] = minus_pairs(load_zeros(m.zeros_of(head) + v * LANES));
        if (!is_chunk)
            for (long r = 0; r < rows; r++) of_group[r][0] = of_group[r][1] = vf{};
        for (long begin = first; begin < end; begin += CHUNK, chunk++) {
            const long inputs = std::min(CHUNK, end - begin);
            const uint8_t* codes = bytes_of_codes(panel, m.bits, m.levels, inputs, space);
            panel += inputs * PANEL * m.bits / 8;
            for (long done = 0; done < rows; done += TILE_HEIGHT) {
                const long from = std::min(done, rows - height);  // the last tile computes some rows again
                asm volatile("" ::: "memory");  // loads of tiles do not say that they read
                multiply_bytes(x.row(from) + begin, stride, x.columns, codes, inputs, parts);
                for (long r = done; r < from + height; r++) {
                    const int32_t* start = x.sums + r * x.chunks + chunk;
                    const float of_inputs = x.scales[r * x.chunks + chunk];
                    for (int v = 0; v < 2; v++) {
                        const vi zero = m.zero < 0 ? add_pairs(vi{}, minus[v], in_all_lanes(start)) : in_all_lanes(start);
                        const vi upper = load_lanes(parts[0][r - from] + v * LANES), lower = load_lanes(parts[1][r - from] + v * LANES);
                        const vf value = __builtin_convertvector((upper << 7) + (lower + zero), vf);
                        if (is_chunk) sums[r][v] = fma(value, scales[v] * of_inputs, sums[r][v]);
                        else of_group[r][v] = fma(value, splat(of_inputs), of_group[r][v]);
                    }
                }
            }
        }
        if (is_chunk) continue;
        for (long r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sums[r][v] = fma(of_group[r][v], scales[v], sums[r][v]);
    }
    for (long r = 0; r < rows; r++) sink(r, sums[r]);
}
#endif

// Call `sink(row, sums[2 * P])` for all rows, in tiles of nearly equal height; see `tiles` in matrix.hpp. Several panels at
// a time are for a single row. `ahead`: how many bytes behind these panels those lie that come next, or 0.
template <class T, int P, class Sink>
INLINE void code_tiles(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, const uint8_t* const (&panels)[P],
                       const Sink& sink, long ahead = 0) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16> && P == 1)
        if (rows >= fewest_tile_rows && is_of_byte_tiles(m)) {
            for (long begin = 0; begin < rows; begin += BYTE_TILE_ROWS)
                code_tile_products(m, x.from(begin), std::min(BYTE_TILE_ROWS, rows - begin), panels[0],
                                   [&](long r, vf(&s)[2]) { sink(begin + r, s); });
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
        if (m.bits == 8) code_tile_of<T, 8, false, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        else if (m.bits == 6) code_tile_of<T, 6, false, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        else if (m.bits == 5) code_tile_of<T, 5, false, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        else if (m.levels) code_tile_of<T, 4, true, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        else code_tile_of<T, 4, false, P, MOST>(height, x.from(row), panels, m, sums[0], fetch);
        for (long r = 0; r < height; r++) sink(row + r, sums[r]);
    }
}

constexpr int CODE_PANELS = 4;  // of a single row

// Panels [first, last) of out = x @ matrix.T + bias (+ onto, which may be `out` itself).
template <class T, class Out>
void multiply_codes(const CodeMatrix<T>& m, const CodeRows<T>& x, long rows, Out* out, const Out* onto, long first, long last,
                    long distance) {
    const long width = m.outputs, ahead = fetches(rows) ? distance * m.panel_bytes() : 0;
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
    const long width = m.outputs / 2, half = width / PANEL, ahead = fetches(rows) ? distance * m.panel_bytes() : 0;
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
    constexpr long BLOCK = 48;
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
    constexpr long BYTES = 384 << 10;
    return std::max(BYTES / CodeRows<T>::bytes_of(x.columns), 4L * CODE_TILE_ROWS<T>);
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
