// Products of codes by the tile instructions for bytes (AMX-INT8), over the same panels as codes.hpp. The codes of up to
// 256 inputs of a panel become bytes once for a block of rows; 16 steps of four inputs by 16 outputs are a tile of weights.
// The sums of a chunk are whole numbers, so that rows computed without tiles get the very same bits, and zero points may
// be subtracted from the bytes, once for all rows.
//
// Where groups have 32 inputs, a product takes as long as over 64, and what is done with its sums takes longer still: one
// row tile and one tile of outputs keep their 16 sums in registers over all groups of a piece.
#pragma once
#include "code_products.hpp"
#include "tiles.hpp"

#if defined(TERCET_TILES)
constexpr long BYTE_TILE_ROWS = 128;  // of a block: their sums stay in the first-level cache beside the bytes of a chunk
constexpr long WHOLE_TILE = 64;  // inputs that one product goes over

// Whether every chunk is made of tiles of so many inputs.
inline bool is_of_tiles(const CodeShape& m, long inputs) {
    return m.columns % inputs == 0 && (m.group >= m.columns || m.group % inputs == 0);
}
inline bool uses_whole_tiles(const CodeShape& m, long rows) {
    return !m.has_offsets && m.numbers != STEPS && m.bits % 4 == 0 && is_of_tiles(m, WHOLE_TILE) && rows >= fewest_tile_rows;
}
// Products over 32 inputs take as long as those over 64: more rows must share what their tiles cost. Of groups of 16 the
// vector instructions are as fast.
inline bool uses_half_tiles(const CodeShape& m, long rows) {
    return m.group <= CHUNK && is_of_tiles(m, WHOLE_TILE / 2) && rows >= 2 * fewest_tile_rows;
}

// What is subtracted from a group's products: nothing, since the bytes are signed numbers (code - zero), one zero point's of
// all of a matrix, each group's zero point's, or an offset's.
enum class Subtracted { NOTHING, ONE_ZERO, ZEROS, OFFSETS };

// Whether the differences of all codes and zero points are bytes.
inline bool has_byte_differences(const CodeShape& m) {
    if (m.has_offsets) return false;
    if (m.zero < 0) return m.bits == 4 && !m.levels;
    const auto bounds = std::minmax_element(m.levels, m.levels + (m.levels ? 16 : 0));
    const long least = m.levels ? *bounds.first : 0, most = m.levels ? *bounds.second : (1 << m.bits) - 1;
    return least - m.zero >= -128 && most - m.zero <= 127;
}
inline Subtracted subtracted_of(const CodeShape& m) {
    if (m.has_offsets) return Subtracted::OFFSETS;
    if (has_byte_differences(m)) return Subtracted::NOTHING;
    return m.zero < 0 ? Subtracted::ZEROS : Subtracted::ONE_ZERO;
}

// The zero points of a group, four bytes for each output of the v-th vector.
INLINE vi zero_bytes(const CodeShape& m, const uint8_t* head, int v) {
    const vi zeros = m.zero < 0 ? load_zeros(m.zeros_of(head) + v * LANES) : vi{} + int(m.zero);
    return (vi)((vu)zeros * 0x01010101);  // without a sign, of which 128 would take the place
}

// A byte for each code of `inputs` inputs of a panel: tiles do not read parts of bytes. DIFFERENCES: with `zeros` subtracted.
// The lines `ahead` bytes behind the codes are asked for, if that is not 0. Returns the end of the codes.
template <int BITS, bool LEVELS, bool DIFFERENCES>
const uint8_t* bytes_of_codes(const uint8_t* codes, vi levels, const vi (&zeros)[2], long inputs, uint8_t* bytes, long ahead) {
    constexpr int VECTOR = 4 * LANES, TOGETHER = BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    for (long step = 0; step < inputs; step += TOGETHER * (BITS == 8 ? 4 : 8)) {
        const uint8_t* upper = codes;
        if constexpr (TOGETHER > 1) codes += 2 * VECTOR;
        for (int i = 0; i < TOGETHER; i++, codes += 2 * VECTOR) {
            if (ahead)
                for (int v = 0; v < 2; v++) __builtin_prefetch(codes + ahead + v * VECTOR, 0, 2);
            for (int half = 0; half < (BITS == 8 ? 1 : 2); half++, bytes += 2 * VECTOR)
                for (int v = 0; v < 2; v++) {
                    vi four = CodeProducts::operand<BITS, LEVELS>(codes + v * VECTOR, half, 0, levels, upper + v * VECTOR,
                                                                  2 * i + half);
                    if constexpr (DIFFERENCES) four = (vi)_mm512_sub_epi8((__m512i)four, (__m512i)zeros[v]);
                    std::memcpy(bytes + v * VECTOR, &four, VECTOR);
                }
        }
    }
    return codes;
}

// Tile SUM += tile ROWS * tile WEIGHTS, of signed or unsigned bytes. The number of a tile is part of an instruction.
#define TERCET_ADD_BYTES(SIGNED, SUM, ROWS, WEIGHTS) \
    if constexpr (SIGNED) _tile_dpbssd(SUM, ROWS, WEIGHTS); \
    else _tile_dpbsud(SUM, ROWS, WEIGHTS)

// sums[plane][row][output] of one row tile, whose planes lie `plane` bytes and whose rows `stride` bytes apart.
template <bool SIGNED>
__attribute__((noinline)) void multiply_whole_tiles(const char* rows, long stride, long plane, const uint8_t* codes,
                                                    long inputs, int32_t (*sums)[TILE_HEIGHT][TILE_PANEL]) {
    constexpr long STEP_BYTES = TILE_PANEL * 4;
    asm volatile("" ::: "memory");  // loads of tiles do not say that they read
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += WHOLE_TILE, codes += WHOLE_TILE / 4 * STEP_BYTES) {
        _tile_loadd(6, codes, STEP_BYTES);
        _tile_loadd(4, rows + k, stride);
        TERCET_ADD_BYTES(SIGNED, 0, 4, 6);
        _tile_loadd(7, codes + 64, STEP_BYTES);
        TERCET_ADD_BYTES(SIGNED, 1, 4, 7);
        _tile_loadd(5, rows + plane + k, stride);
        TERCET_ADD_BYTES(SIGNED, 2, 5, 6);
        TERCET_ADD_BYTES(SIGNED, 3, 5, 7);
    }
    _tile_stored(0, sums[0][0], TILE_PANEL * 4);
    _tile_stored(1, sums[0][0] + 16, TILE_PANEL * 4);
    _tile_stored(2, sums[1][0], TILE_PANEL * 4);
    _tile_stored(3, sums[1][0] + 16, TILE_PANEL * 4);
}

// sums[r] += the products of a chunk's codes with `count` rows of x, of which `upper` and `lower` have those of the planes;
// scales: null where the group goes on behind the chunk.
template <Subtracted SUBTRACTED>
INLINE void add_chunk(const int32_t (*upper)[TILE_PANEL], const int32_t (*lower)[TILE_PANEL], const CodeRows<bf16>& x, long chunk,
                      long count, const vi (&minus)[2], const vf* scales, vf (*sums)[2]) {
    const int32_t* start = x.sums + chunk;
    const float* of_inputs = x.scales + chunk;
    for (long r = 0; r < count; r++, start += x.chunks, of_inputs += x.chunks)
        for (int v = 0; v < 2; v++) {
            vi sum = (load_lanes(upper[r] + v * LANES) << 7) + load_lanes(lower[r] + v * LANES);
            if constexpr (SUBTRACTED == Subtracted::ONE_ZERO) sum = sum + in_all_lanes(start);
            if constexpr (SUBTRACTED == Subtracted::ZEROS) sum = add_pairs(sum, minus[v], in_all_lanes(start));
            const vf value = __builtin_convertvector(sum, vf), scale = scales ? scales[v] * *of_inputs : splat(*of_inputs);
            sums[r][v] = fma(value, scale, sums[r][v]);
        }
}

// Call `sink(row, sums[2])` for at most BYTE_TILE_ROWS rows: what code_tile computes, in the same order.
template <Subtracted SUBTRACTED, class Sink>
void code_tile_products(const CodeMatrix<bf16>& m, const CodeRows<bf16>& x, long rows, const uint8_t* panel, const Sink& sink) {
    constexpr bool DIFFERENCES = SUBTRACTED == Subtracted::NOTHING;
    alignas(64) int32_t parts[2][2][TILE_HEIGHT][TILE_PANEL];
    alignas(64) uint8_t space[CHUNK * TILE_PANEL];
    vf sums[BYTE_TILE_ROWS][2], of_group[BYTE_TILE_ROWS][2];
    const RowTiles tiles(rows);
    const long stride = CodeRows<bf16>::bytes_of(x.columns);
    const bool is_chunk = m.group <= CHUNK;  // a group
    const vi levels = m.levels ? in_all_quarters(m.levels) : vi{};
    configure_tiles(int(tiles.height));
    for (long r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf{};
    long chunk = 0;
    for (long first = 0; first < m.columns; first += m.group) {
        const uint8_t* head = panel;
        panel += m.header();
        const long end = std::min(first + m.group, m.columns);
        const vf scales[2] = {numbers_of_group(m, head, 0, 0, 0), numbers_of_group(m, head, 0, 0, 1)};
        const vi zeros[2] = {zero_bytes(m, head, 0), zero_bytes(m, head, 1)};
        vi minus[2] = {};
        if constexpr (SUBTRACTED == Subtracted::ZEROS)
            for (int v = 0; v < 2; v++) minus[v] = minus_pairs(load_zeros(m.zeros_of(head) + v * LANES));
        if (!is_chunk)
            for (long r = 0; r < rows; r++) of_group[r][0] = of_group[r][1] = vf{};
        for (long begin = first; begin < end; begin += CHUNK, chunk++) {
            const long inputs = std::min(CHUNK, end - begin);
            const uint8_t* codes = m.bits == 8 ? panel : space;
            if (m.bits == 4 && m.levels) bytes_of_codes<4, true, DIFFERENCES>(panel, levels, zeros, inputs, space, 0);
            else if (m.bits == 4) bytes_of_codes<4, false, DIFFERENCES>(panel, levels, zeros, inputs, space, 0);
            panel += inputs * PANEL * m.bits / 8;
            // The sums of a row tile are added up while the next one is multiplied: a store waits for its products.
            for (long t = 0; t <= tiles.count; t++) {
                if (t < tiles.count) {
                    const char* from = x.row(tiles.begin(t)) + begin;
                    multiply_whole_tiles<DIFFERENCES>(from, stride, x.columns, codes, inputs, parts[t % 2]);
                }
                if (t == 0) continue;
                const long done = (t - 1) * TILE_HEIGHT, again = tiles.again(t - 1);
                const auto& own = parts[(t - 1) % 2];
                add_chunk<SUBTRACTED>(own[0] + again, own[1] + again, x.from(done), chunk, tiles.height - again, minus,
                                      is_chunk ? scales : nullptr, (is_chunk ? sums : of_group) + done);
            }
        }
        if (is_chunk) continue;
        for (long r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sums[r][v] = fma(of_group[r][v], scales[v], sums[r][v]);
    }
    for (long r = 0; r < rows; r++) sink(r, sums[r]);
}

// Neighbouring groups of a panel.
struct TileGroups {
    static constexpr long MOST = 2 * CHUNK / WHOLE_TILE;
    long count, inputs;  // inputs: of a group
    const uint8_t* bytes;
    vf scales[MOST][2], offsets[MOST][2];
    vi minus[MOST][2];
};

// Tiles FIRST and FIRST + 1 become the sums of both planes of the row tile at `rows`, whose planes lie `plane` bytes and
// whose rows `stride` bytes apart.
template <bool SIGNED, int FIRST>
INLINE void multiply_half_tiles(const char* rows, long stride, long plane, const uint8_t* codes, long inputs) {
    constexpr long STEP = WHOLE_TILE / 2, STEP_BYTES = TILE_PANEL * 4;
    if constexpr (FIRST == 0) {
        _tile_zero(0);
        _tile_zero(1);
    } else {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < inputs; k += STEP) {
        _tile_loadd(6, codes + k / 4 * STEP_BYTES, STEP_BYTES);
        _tile_loadd(4, rows + k, stride);
        if constexpr (FIRST == 0) { TERCET_ADD_BYTES(SIGNED, 0, 4, 6); }
        else { TERCET_ADD_BYTES(SIGNED, 2, 4, 6); }
        _tile_loadd(5, rows + plane + k, stride);
        if constexpr (FIRST == 0) { TERCET_ADD_BYTES(SIGNED, 1, 5, 6); }
        else { TERCET_ADD_BYTES(SIGNED, 3, 5, 6); }
    }
}
template <int FIRST> INLINE void store_sums(int32_t (*sums)[TILE_HEIGHT][LANES]) {
    if constexpr (FIRST == 0) {
        _tile_stored(0, sums[0][0], LANES * 4);
        _tile_stored(1, sums[1][0], LANES * 4);
    } else {
        _tile_stored(2, sums[0][0], LANES * 4);
        _tile_stored(3, sums[1][0], LANES * 4);
    }
}

// sums[2 * row] += the products of all groups with the v-th vector of outputs, in the order of code_tile. HEIGHT: 16 rows,
// or 0: fewer. `begin`, `chunk`: the first input and chunk.
template <int HEIGHT, Subtracted SUBTRACTED>
__attribute__((noinline)) void add_groups(const TileGroups& groups, const CodeRows<bf16>& x, long begin, long chunk, int v,
                                          long height, vf* sums) {
    alignas(64) int32_t parts[2][2][TILE_HEIGHT][LANES];
    vf own[TILE_HEIGHT];
    const long rows = HEIGHT ? HEIGHT : height, stride = CodeRows<bf16>::bytes_of(x.columns);
    const char* from = x.row(0) + begin;
    const uint8_t* bytes = groups.bytes + v * 4 * LANES;
#pragma GCC unroll 16
    for (long r = 0; r < rows; r++) own[r] = sums[2 * r];
    asm volatile("" ::: "memory");  // loads of tiles do not say that they read
    // A store waits for the products, and what comes after it waits for the store: so the next group is multiplied before
    // the sums of one are stored (measured: a third of the time), and the one before that is added up.
    for (long next = 0; next < groups.count + 2; next++) {
        if (next < groups.count) {
            constexpr bool SIGNED = SUBTRACTED == Subtracted::NOTHING;
            if (next % 2) multiply_half_tiles<SIGNED, 2>(from, stride, x.columns, bytes, groups.inputs);
            else multiply_half_tiles<SIGNED, 0>(from, stride, x.columns, bytes, groups.inputs);
            from += groups.inputs;
            bytes += groups.inputs * TILE_PANEL;
        }
        if (next > 0 && next <= groups.count) {
            if (next % 2) store_sums<0>(parts[0]);
            else store_sums<2>(parts[1]);
        }
        const long g = next - 2;
        if (g < 0) continue;
        const auto& whole = parts[g % 2];
        const vf scale = groups.scales[g][v], offset = groups.offsets[g][v];
        const vi minus = groups.minus[g][v];
        const int32_t* start = x.sums + chunk + g;
        const float* of_inputs = x.scales + chunk + g;
#pragma GCC unroll 16
        for (long r = 0; r < rows; r++, start += x.chunks, of_inputs += x.chunks) {
            vi sum = (load_lanes(whole[0][r]) << 7) + load_lanes(whole[1][r]);
            if constexpr (SUBTRACTED == Subtracted::ONE_ZERO) sum = sum + in_all_lanes(start);
            if constexpr (SUBTRACTED == Subtracted::ZEROS) sum = add_pairs(sum, minus, in_all_lanes(start));
            own[r] = fma(__builtin_convertvector(sum, vf), scale * *of_inputs, own[r]);
            if constexpr (SUBTRACTED == Subtracted::OFFSETS) {
                float total;
                std::memcpy(&total, start, sizeof(total));
                own[r] = own[r] - offset * total;  // contracted
            }
        }
    }
#pragma GCC unroll 16
    for (long r = 0; r < rows; r++) sums[2 * r] = own[r];
}

// The groups of `inputs` inputs from `first` on, which `panel` is at; returns what it is at behind them. `head`: of the span
// that they are in, `within`: the place of the first in it.
template <int BITS, bool LEVELS, bool DIFFERENCES>
const uint8_t* read_groups(const CodeShape& m, const uint8_t*& head, long& within, const uint8_t* panel, long first,
                           long inputs, uint8_t* space, long ahead, TileGroups& groups) {
    const vi levels = LEVELS ? in_all_quarters(m.levels) : vi{};
    groups.inputs = std::min(inputs, m.group);
    groups.count = inputs / groups.inputs;
    groups.bytes = space;
    for (long g = 0; g < groups.count; g++, within++) {
        if ((first + g * groups.inputs) % m.span() == 0) {
            within = 0;
            head = panel;
            panel += m.header();
        }
        for (int v = 0; v < 2; v++) {
            groups.scales[g][v] = numbers_of_group(m, head, within, 0, v);
            if (m.has_offsets) groups.offsets[g][v] = numbers_of_group(m, head, within, 1, v);
            if (m.zero < 0) groups.minus[g][v] = minus_pairs(load_zeros(m.zeros_of(head) + v * LANES));
        }
        const vi zeros[2] = {zero_bytes(m, head, 0), zero_bytes(m, head, 1)};
        uint8_t* to = space + g * groups.inputs * TILE_PANEL;
        panel = bytes_of_codes<BITS, LEVELS, DIFFERENCES>(panel, levels, zeros, groups.inputs, to, ahead);
    }
    return panel;
}

// The same for groups of 32 inputs (`uses_half_tiles`). `ahead`: as in code_tiles.
template <Subtracted SUBTRACTED, class Sink>
void half_tile_products(const CodeMatrix<bf16>& m, const CodeRows<bf16>& x, long rows, const uint8_t* panel, const Sink& sink,
                        long ahead) {
    alignas(64) uint8_t space[CHUNK * TILE_PANEL];
    TileGroups groups;
    vf sums[BYTE_TILE_ROWS][2];
    const long height = std::min<long>(rows, TILE_HEIGHT);
    configure_tiles(int(height), WHOLE_TILE / 2);
    for (long r = 0; r < rows; r++) sums[r][0] = sums[r][1] = vf{};
    const uint8_t* head = panel;
    long within = 0, chunk = 0;
    for (long first = 0, inputs; first < m.columns; first += inputs, chunk += groups.count) {
        inputs = std::min(CHUNK / m.group * m.group, m.columns - first);
        if (inputs > m.group) inputs = inputs / m.group * m.group;  // the last group may be shorter
        with_codes_of(m, [&](auto bits, auto levels) {
            panel = read_groups<decltype(bits)::value, decltype(levels)::value, SUBTRACTED == Subtracted::NOTHING>(
                m, head, within, panel, first, inputs, space, ahead, groups);
        });
        for (long done = 0; done < rows; done += TILE_HEIGHT)
            for (int v = 0; v < 2; v++) {
                // The last tile computes some rows again, into space of its own.
                vf again[TILE_HEIGHT * 2];
                const long from = std::min(done, rows - height), kept = done - from;
                vf* own = kept ? again : sums[from];
                if (kept)
                    for (long r = 0; r < TILE_HEIGHT; r++) again[2 * r + v] = sums[from + r][v];
                const auto rows_of_tile = x.from(from);
                if (height == TILE_HEIGHT) add_groups<TILE_HEIGHT, SUBTRACTED>(groups, rows_of_tile, first, chunk, v, height, own + v);
                else add_groups<0, SUBTRACTED>(groups, rows_of_tile, first, chunk, v, height, own + v);
                if (kept)
                    for (long r = kept; r < TILE_HEIGHT; r++) sums[from + r][v] = again[2 * r + v];
            }
    }
    for (long r = 0; r < rows; r++) sink(r, sums[r]);
}

#undef TERCET_ADD_BYTES

// Call `sink(row, sums[2])` for at most BYTE_TILE_ROWS rows of a matrix that uses whole or half tiles.
template <class Sink>
void byte_tile_products(const CodeMatrix<bf16>& m, const CodeRows<bf16>& x, long rows, const uint8_t* panel, bool are_whole,
                        const Sink& sink, long ahead) {
    auto multiply = [&](auto subtracted) {
        constexpr Subtracted S = decltype(subtracted)::value;
        if constexpr (S != Subtracted::OFFSETS)
            if (are_whole) return code_tile_products<S>(m, x, rows, panel, sink);
        half_tile_products<S>(m, x, rows, panel, sink, ahead);
    };
    Subtracted subtracted = subtracted_of(m);
    // Whole tiles read codes of 8 bits where they are: bytes of differences would be a copy.
    if (are_whole && m.bits == 8) subtracted = m.zero < 0 ? Subtracted::ZEROS : Subtracted::ONE_ZERO;
    switch (subtracted) {
        case Subtracted::NOTHING: return multiply(std::integral_constant<Subtracted, Subtracted::NOTHING>{});
        case Subtracted::ONE_ZERO: return multiply(std::integral_constant<Subtracted, Subtracted::ONE_ZERO>{});
        case Subtracted::ZEROS: return multiply(std::integral_constant<Subtracted, Subtracted::ZEROS>{});
        case Subtracted::OFFSETS: return multiply(std::integral_constant<Subtracted, Subtracted::OFFSETS>{});
    }
}
#endif
