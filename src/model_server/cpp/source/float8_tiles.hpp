// Products with matrices of 8-bit floats, or of codes of a table, by the tile instructions: what `float8_tiles` computes, in
// the same order, for many rows. A part of a panel, of at most 128 inputs, is decoded once for a block of rows. While its
// row tiles are multiplied, the next part is decoded and the sums of the tiles before are scaled: tiles leave the vector
// instructions idle, and a store waits for its products.
#pragma once
#include "code_panels.hpp"
#include "float8.hpp"
#include "tiles.hpp"

constexpr long FLOAT8_CHUNK = 128;  // inputs of a group, at most, that are decoded at once

#if defined(TERCET_TILES)
constexpr long FLOAT8_TILE_ROWS = 256;  // whose sums are kept while all parts go by

// Whether every chunk is made of whole tiles. Few rows of codes of a table are quicker two panels at a time.
inline bool uses_float8_tiles(const CodeShape& m, long rows) {
    const bool are_whole = m.columns % TILE_INPUTS == 0 && (m.group >= m.columns || m.group % TILE_INPUTS == 0);
    return are_whole && rows >= (m.table ? 8 : 1) * fewest_tile_rows;
}

// Neighbouring chunks of a panel, of as many inputs each.
struct Float8Part {
    static constexpr long MOST = FLOAT8_CHUNK / TILE_INPUTS;
    long count = 0, inputs = 0;
    const uint8_t* codes[MOST];
    const float* scales[MOST];
    alignas(64) bf16 decoded[FLOAT8_CHUNK * TILE_PANEL];

    long pieces() const { return count * inputs / TILE_INPUTS; }
    // The pieces [first, last), of 32 inputs.
    void decode(const CodeShape& m, long first, long last) {
        for (long i = first; i < last; i++) {
            const long of_chunk = inputs / TILE_INPUTS, numbers = TILE_INPUTS * PANEL;
            const uint8_t* from = codes[i / of_chunk] + i % of_chunk * numbers * m.bits / 8;
            if (m.table) decode_table<bf16>(from, m.table, decoded + i * numbers, numbers);
            else ::decode(reinterpret_cast<const e4m3*>(from), decoded + i * numbers, numbers);
        }
    }
};

// Goes through the chunks of a panel.
class Float8Chunks {
   public:
    Float8Chunks(const CodeShape& m, const uint8_t* panel) : m(m), at(panel) {}

    // The next ones; behind the last the part has none.
    void read(Float8Part& part) {
        part.count = part.inputs = 0;
        while (first < m.columns && part.count < Float8Part::MOST) {
            const long inputs = std::min({FLOAT8_CHUNK, m.group - first % m.group, m.columns - first});
            if (part.count && (inputs != part.inputs || (part.count + 1) * inputs > FLOAT8_CHUNK)) return;
            if (first % m.group == 0) {
                scales = reinterpret_cast<const float*>(at);
                at += m.header();
            }
            part.inputs = inputs;
            part.codes[part.count] = at;
            part.scales[part.count++] = scales;
            at += inputs * PANEL * m.bits / 8;
            first += inputs;
        }
    }

   private:
    const CodeShape& m;
    const uint8_t* at;
    const float* scales = nullptr;
    long first = 0;
};

// sums [count][2] of a row tile += those of all chunks of a part, scaled. HEIGHT: 16 rows, or 0: `count`.
template <int HEIGHT>
INLINE void add_scaled(const Float8Part& part, const float (*of_part)[2 * TILE_HEIGHT][TILE_PANEL], long begin, long count,
                       vf (*sums)[2]) {
    const long rows = HEIGHT ? HEIGHT : count;
    for (int v = 0; v < 2; v++) {
        vf own[TILE_HEIGHT];
#pragma GCC unroll 16
        for (long r = 0; r < rows; r++) own[r] = sums[r][v];
        for (long c = 0; c < part.count; c++) {
            const vf scale = load(part.scales[c] + v * LANES);
#pragma GCC unroll 16
            for (long r = 0; r < rows; r++) own[r] = fma(load(&of_part[c][begin + r][v * LANES]), scale, own[r]);
        }
#pragma GCC unroll 16
        for (long r = 0; r < rows; r++) sums[r][v] = own[r];
    }
}

// sums[row] [2] of one panel and at most FLOAT8_TILE_ROWS rows of x.
__attribute__((noinline)) inline void float8_tile_sums(const CodeShape& m, const bf16* x, long stride, long rows,
                                                       const uint8_t* panel, vf (*sums)[2]) {
    alignas(64) float of_pair[2][Float8Part::MOST][2 * TILE_HEIGHT][TILE_PANEL];
    Float8Part both[2];
    Float8Chunks chunks(m, panel);
    const RowTiles tiles(rows);
    const long row_bytes = stride * sizeof(bf16), pairs = (tiles.count + 1) / 2;
    configure_tiles(int(tiles.height));
    for (long r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf{};
    chunks.read(both[0]);
    both[0].decode(m, 0, both[0].pieces());
    for (long i = 0; both[i % 2].count; i++) {
        const Float8Part& part = both[i % 2];
        Float8Part& next = both[(i + 1) % 2];
        chunks.read(next);
        for (long p = 0; p <= pairs; p++) {
            if (p < pairs) {
                const bool are_two = 2 * p + 1 < tiles.count;
                const bf16* from[2] = {x + tiles.begin(2 * p) * stride, x + tiles.begin(2 * p + are_two) * stride};
                asm volatile("" ::: "memory");  // loads of tiles do not say that they read
                for (long c = 0; c < part.count; c++) {
                    float* out = of_pair[p % 2][c][0];
                    const bf16* weights = part.decoded + c * part.inputs * TILE_PANEL;
                    if (are_two) multiply_panel<2>(from, row_bytes, weights, part.inputs, out, TILE_PANEL, {}, false);
                    else multiply_panel<1>(from, row_bytes, weights, part.inputs, out, TILE_PANEL, {}, false);
                    for (auto& row : from) row += part.inputs;
                }
                next.decode(m, next.pieces() * p / pairs, next.pieces() * (p + 1) / pairs);
            }
            if (p == 0) continue;
            const auto& own = of_pair[(p - 1) % 2];
            for (long t = 2 * (p - 1); t < std::min(2 * p, tiles.count); t++) {
                const long first = t * TILE_HEIGHT, again = tiles.again(t), place = t % 2 * TILE_HEIGHT, kept = tiles.height - again;
                if (kept == TILE_HEIGHT) add_scaled<TILE_HEIGHT>(part, own, place, kept, sums + first);
                else add_scaled<0>(part, own, place + again, kept, sums + first);
            }
        }
        x += part.count * part.inputs;
    }
}

// Call `sink(row, sums[2])` for all rows of x.
template <class Sink>
void float8_tile_products(const CodeShape& m, const bf16* x, long stride, long rows, const uint8_t* panel, const Sink& sink) {
    vf sums[FLOAT8_TILE_ROWS][2];
    for (long begin = 0; begin < rows; begin += FLOAT8_TILE_ROWS) {
        const long count = std::min(FLOAT8_TILE_ROWS, rows - begin);
        float8_tile_sums(m, x + begin * stride, stride, count, panel, sums);
        for (long r = 0; r < count; r++) sink(begin + r, sums[r]);
    }
}
#endif
