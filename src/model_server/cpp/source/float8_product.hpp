// Products with matrices of 8-bit floats (e4m3), or of 4-bit codes of a table of floats, with a scale for each group of inputs
// of each output. The layout is that of codes (codes.hpp), but with the pairs of inputs of Packing<T>, so that a chunk of a
// panel, once it is decoded into the first-level cache, is multiplied like a panel of the activations' type: by all rows of a
// block, which share the cost. Every number of 8 bits is one of bfloat16: decoding rounds nothing. Numbers of a table are
// rounded to the activations' type.
#pragma once
#include "codes.hpp"
#include "float8_tiles.hpp"

// What a chunk is decoded to: what products take without a further conversion.
template <class T> using Decoded = std::conditional_t<std::is_same_v<Input<T>, T>, T, float>;

constexpr long FLOAT8_ROWS = 64;  // of a block: their sums stay in the first-level cache beside the chunk

// weight [outputs, columns * bits / 8], scales [outputs, groups].
template <class T>
void pack_float8(const CodeShape& m, const uint8_t* weight, const float* scales, uint8_t* out, long first, long last) {
    constexpr long STEP = Packing<Decoded<T>>::STEP;
    const long groups = m.group_count();
    for (long p = first; p < last; p++) {
        uint8_t* to = out + p * m.panel_bytes();
        for (long g = 0; g < groups; g++) {
            const long begin = g * m.group, end = std::min(begin + m.group, m.columns);
            for (long c = 0; c < PANEL; c++) {
                const long row = p * PANEL + c;
                const bool exists = row < m.outputs;
                const float scale = exists ? scales[row * groups + g] : 0.0f;
                std::memcpy(to + c * sizeof(float), &scale, sizeof(scale));
                if (m.table) {
                    const uint8_t* codes = weight + row * m.columns / 2;
                    for (long i = begin; i < end && exists; i++) {
                        const long place = ((i - begin) / STEP * PANEL + c) * STEP + (i - begin) % STEP;
                        const long within = place % TABLE_BLOCK, half = TABLE_BLOCK / 2;
                        uint8_t& byte = to[m.header() + place / TABLE_BLOCK * half + within % half];
                        byte |= (codes[i / 2] >> (i % 2 * 4) & 15) << (within / half * 4);
                    }
                    continue;
                }
                uint8_t* at = to + m.header() + c * STEP;
                for (long i = begin; i < end; i += STEP, at += PANEL * STEP)
                    for (long s = 0; s < STEP; s++) at[s] = exists ? weight[row * m.columns + i + s] : 0;
            }
            to += m.header() + (end - begin) * PANEL * m.bits / 8;
        }
    }
}

// Call `sink(row, sums[2 * P])` for at most FLOAT8_ROWS rows of x, and P panels.
template <class T, int P, class Sink>
void float8_tiles(const CodeShape& m, const Input<T>* x, long stride, long rows, const uint8_t* const (&panels)[P],
                  const Sink& sink) {
    using D = Decoded<T>;
    alignas(64) D decoded[P][PANEL * FLOAT8_CHUNK];
    vf sums[FLOAT8_ROWS][2 * P];
    for (long r = 0; r < rows; r++)
        for (int v = 0; v < 2 * P; v++) sums[r][v] = vf{};
    const uint8_t* b[P];
    const D* chunk[P];
    for (int p = 0; p < P; p++) {
        b[p] = panels[p];
        chunk[p] = decoded[p];
    }
    for (long first = 0; first < m.columns; first += m.group) {
        const uint8_t* heads[P];
        for (int p = 0; p < P; p++) {
            heads[p] = b[p];
            b[p] += m.header();
        }
        const long end = std::min(first + m.group, m.columns);
        for (long begin = first; begin < end; begin += FLOAT8_CHUNK) {
            const long inputs = std::min(FLOAT8_CHUNK, end - begin);
            for (int p = 0; p < P; p++) {
                if (m.table) decode_table<T>(b[p], m.table, decoded[p], inputs * PANEL);
                else decode(reinterpret_cast<const e4m3*>(b[p]), decoded[p], inputs * PANEL);
                b[p] += inputs * PANEL * m.bits / 8;
            }
            const D* const(&given)[P] = chunk;
            tiles<D, P>(x + begin, stride, rows, given, inputs, [&](long r, vf(&s)[2 * P]) {
                for (int v = 0; v < 2 * P; v++)
                    sums[r][v] = fma(s[v], load(reinterpret_cast<const float*>(heads[v / 2]) + v % 2 * LANES), sums[r][v]);
            });
        }
    }
    for (long r = 0; r < rows; r++) sink(r, sums[r]);
}

// Panels [first, last) of out = x @ matrix.T + bias (+ onto, which may be `out` itself).
template <class T, class Out>
void multiply_float8(const CodeMatrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, const Out* onto, long first,
                     long last) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (uses_float8_tiles(m, rows)) {
            for (long p = first; p < last; p++)
                float8_tile_products(m, x, stride, rows, m.panel(p), [&](long r, vf(&s)[2]) {
                    put(out + r * m.pitch, s, 2, p * PANEL, m.outputs, m.added(), onto ? onto + r * m.pitch : nullptr);
                });
            return;
        }
#endif
    for (long p = first; p < last;) {
        auto next = [&](auto number) {
            constexpr int P = number;
            const uint8_t* panels[P];
            for (int i = 0; i < P; i++) panels[i] = m.panel(p + i);
            for (long begin = 0; begin < rows; begin += FLOAT8_ROWS)
                float8_tiles<T, P>(m, x + begin * stride, stride, std::min(FLOAT8_ROWS, rows - begin), panels,
                                   [&](long r, vf(&s)[2 * P]) {
                    const long at = (begin + r) * m.pitch;
                    put(out + at, s, 2 * P, p * PANEL, m.outputs, m.added(), onto ? onto + at : nullptr);
                });
            p += P;
        };
        if (p + 2 <= last && !narrow_tiles<Decoded<T>>(rows)) next(std::integral_constant<int, 2>{});
        else next(std::integral_constant<int, 1>{});
    }
}

// Panels [first, last) of out = silu(x @ gate.T) * (x @ up.T); `m` holds the gate's panels, then those of up.
template <class T, class Out>
void multiply_float8_gated(const CodeMatrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, long first, long last) {
    const long width = m.outputs / 2, half = width / PANEL;
    auto finish = [&](long p, long r, const vf* gates, const vf* ups) {
        put_gated(out + r * width + p * PANEL, gates, ups, m.bias ? m.added() + p * PANEL : nullptr, width);
    };
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (uses_float8_tiles(m, rows)) {
            vf gates[FLOAT8_TILE_ROWS][2], ups[FLOAT8_TILE_ROWS][2];
            for (long p = first; p < last; p++)
                for (long begin = 0; begin < rows; begin += FLOAT8_TILE_ROWS) {
                    const long count = std::min(FLOAT8_TILE_ROWS, rows - begin);
                    float8_tile_sums(m, x + begin * stride, stride, count, m.panel(p), gates);
                    float8_tile_sums(m, x + begin * stride, stride, count, m.panel(half + p), ups);
                    for (long r = 0; r < count; r++) finish(p, begin + r, gates[r], ups[r]);
                }
            return;
        }
#endif
    for (long p = first; p < last; p++) {
        const uint8_t *const both[2] = {m.panel(p), m.panel(half + p)}, *const gate[1] = {both[0]}, *const up[1] = {both[1]};
        for (long begin = 0; begin < rows; begin += FLOAT8_ROWS) {
            const long count = std::min(FLOAT8_ROWS, rows - begin);
            const Input<T>* block = x + begin * stride;
            if (!narrow_tiles<Decoded<T>>(rows)) {
                float8_tiles<T, 2>(m, block, stride, count, both, [&](long r, vf(&s)[4]) { finish(p, begin + r, s, s + 2); });
                continue;
            }
            vf gates[FLOAT8_ROWS][2];
            float8_tiles<T, 1>(m, block, stride, count, gate, [&](long r, vf(&s)[2]) {
                gates[r][0] = s[0];
                gates[r][1] = s[1];
            });
            float8_tiles<T, 1>(m, block, stride, count, up, [&](long r, vf(&s)[2]) { finish(p, begin + r, gates[r], s); });
        }
    }
}

template <class T, class Out, class X>
void float8_product(const CodeMatrix<T>& m, const X* rows_in, long stride, long rows, Out* out, const Out* onto, Team team,
                    std::atomic<long>& next) {
    const Input<T>* x = nullptr;
    team.attempt([&] { x = rows_as_input<T>(rows_in, stride, rows, m.inputs); });
    if (!x) return;
    auto work = [&](long row, long count, long first, long last, long) {
        multiply_float8<T, Out>(m, x + row * stride, stride, count, out + row * m.pitch,
                                onto ? onto + row * m.pitch : nullptr, first, last);
    };
    Pieces(rows, m.panel_count(), team.size, block_of_rows<T>(rows, m.inputs)).take(next, team.size, 2, work);
}

template <class T, class Out>
void gated_float8_product(const CodeMatrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, Team team,
                          std::atomic<long>& next) {
    const long width = m.outputs / 2;
    auto work = [&](long row, long count, long first, long last, long) {
        multiply_float8_gated<T, Out>(m, x + row * stride, stride, count, out + row * width, first, last);
    };
    Pieces(rows, width / PANEL, team.size, block_of_rows<T>(rows, m.inputs)).take(next, team.size, 1, work);
}
