// Products of codes by the tile instructions for bytes (AMX-INT8), over the same panels as codes.hpp: 16 steps of four
// inputs by 16 outputs are a tile of weights. Both planes of the activations are multiplied by each tile of weights that
// is loaded; the sums of a chunk are whole numbers, so that rows computed without tiles get the very same bits.
#pragma once
#include "code_rows.hpp"
#include "tiles.hpp"

#if defined(TERCET_TILES)
constexpr long BYTE_TILE_INPUTS = 64;  // that one product goes over
constexpr long BYTE_TILE_ROWS = 64;    // of a block: their sums stay in the first-level cache

// The codes of a chunk of one panel, a byte each: tiles do not read halves of bytes.
inline const uint8_t* bytes_of_codes(const uint8_t* codes, long bits, const uint8_t* levels, long inputs, uint8_t* space) {
    constexpr long STEP_BYTES = TILE_PANEL * 4;
    static constexpr uint8_t THEMSELVES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (bits == 8) return codes;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(levels ? levels : THEMSELVES)));
    for (long step = 0; step < inputs / 8; step++)
        for (long i = 0; i < STEP_BYTES; i += 64) {
            const __m512i both = _mm512_loadu_si512(codes + step * STEP_BYTES + i), mask = _mm512_set1_epi8(15);
            const __m512i first = _mm512_and_si512(both, mask), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            _mm512_storeu_si512(space + 2 * step * STEP_BYTES + i, _mm512_shuffle_epi8(table, first));
            _mm512_storeu_si512(space + (2 * step + 1) * STEP_BYTES + i, _mm512_shuffle_epi8(table, second));
        }
    return space;
}

// sums[plane][row][output] of one row tile, whose planes lie `plane` bytes and whose rows `stride` bytes apart.
__attribute__((noinline)) inline void multiply_bytes(const char* rows, long stride, long plane, const uint8_t* codes,
                                                     long inputs, int32_t (*sums)[TILE_HEIGHT][TILE_PANEL]) {
    constexpr long STEP_BYTES = TILE_PANEL * 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += BYTE_TILE_INPUTS, codes += BYTE_TILE_INPUTS / 4 * STEP_BYTES) {
        _tile_loadd(6, codes, STEP_BYTES);
        _tile_loadd(4, rows + k, stride);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, codes + 64, STEP_BYTES);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, rows + plane + k, stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums[0][0], TILE_PANEL * 4);
    _tile_stored(1, sums[0][0] + 16, TILE_PANEL * 4);
    _tile_stored(2, sums[1][0], TILE_PANEL * 4);
    _tile_stored(3, sums[1][0] + 16, TILE_PANEL * 4);
}
#endif
