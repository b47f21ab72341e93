// Intel's tile instructions (AMX-TILE, AMX-BF16, AMX-INT8) in plain C++, under the names of the compiler's intrinsics: with
// -DTERCET_TILE_MODEL the operators for AMX run on any x86-64. Written after the Intel 64 and IA-32 Architectures
// Software Developer's Manual (LDTILECFG, TILELOADD, TDPBF16PS,
// TDPBSUD). What the processor answers with a fault ends the process
// with a line on stderr. As in the compiler's own header, tiles are named by literal digits.
//
// What the model cannot show: the intrinsics of g++ 12 do not tell the compiler that they read memory. A store that only
// a tile load or a load of the configuration reads needs `asm volatile("" ::: "memory")` between the two.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace tile_model {
constexpr int TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[TILES], reserved_row_bytes[TILES];
    uint8_t rows[TILES], reserved_rows[TILES];
};
static_assert(sizeof(Configuration) == 64, "what LDTILECFG reads");

struct Tile {
    uint8_t bytes[MOST_ROWS][MOST_BYTES];
};

// Of this thread. Palette 0: the initial state, in which no tile can be used.
inline thread_local Configuration configuration;
inline thread_local Tile tiles[TILES];
// Of the process.
inline std::atomic<long> products{0}, configured_threads{0};

[[noreturn, gnu::format(printf, 1, 2)]] inline void fault(const char* text, ...) {
    va_list values;
    va_start(values, text);
    std::fputs("tile model: ", stderr);
    std::vfprintf(stderr, text, values);
    std::fputc('\n', stderr);
    std::abort();
}

inline int rows_of(int tile) { return configuration.rows[tile]; }
inline int row_bytes_of(int tile) { return configuration.row_bytes[tile]; }

inline void release() {
    if (configuration.palette) configured_threads--;
    configuration = {};
    std::memset(tiles, 0, sizeof(tiles));
}

inline void load_configuration(const void* from) {
    Configuration next;
    std::memcpy(&next, from, sizeof(next));
    if (next.palette == 0) return release();
    if (next.palette != 1) fault("LDTILECFG: palette %d", next.palette);
    if (next.start_row != 0) fault("LDTILECFG: it would begin at row %d", next.start_row);
    for (int byte : next.reserved)
        if (byte) fault("LDTILECFG: reserved bytes are not 0");
    for (int i = 0; i < TILES; i++) {
        if (next.reserved_row_bytes[i] || next.reserved_rows[i]) fault("LDTILECFG: reserved bytes are not 0");
        int rows = next.rows[i], row_bytes = next.row_bytes[i];
        if (rows > MOST_ROWS || row_bytes > MOST_BYTES || !rows != !row_bytes)
            fault("LDTILECFG: tile %d has %d rows of %d bytes", i, rows, row_bytes);
    }
    release();
    configuration = next;
    configured_threads++;
}

inline void store_configuration(void* to) { std::memcpy(to, &configuration, sizeof(configuration)); }

inline void check(const char* instruction, int tile) {
    if (!configuration.palette) fault("%s without a configuration", instruction);
    if (!rows_of(tile)) fault("%s of tile %d, which the configuration leaves out", instruction, tile);
}

inline void zero(int tile) {
    check("TILEZERO", tile);
    tiles[tile] = {};
}

inline void load(int tile, const void* base, long stride) {
    check("TILELOADD", tile);
    tiles[tile] = {};
    for (int r = 0; r < rows_of(tile); r++)
        std::memcpy(tiles[tile].bytes[r], static_cast<const char*>(base) + r * stride, row_bytes_of(tile));
}

inline void store(int tile, void* base, long stride) {
    check("TILESTORED", tile);
    for (int r = 0; r < rows_of(tile); r++)
        std::memcpy(static_cast<char*>(base) + r * stride, tiles[tile].bytes[r], row_bytes_of(tile));
}

// Number `half` (0 or 1) of a pair of bfloat16, as a float.
inline float widened(const uint8_t* pair, int half) {
    uint32_t bits;
    std::memcpy(&bits, pair, sizeof(bits));
    bits = half ? bits & 0xffff0000u : bits << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}

// Out of sight of its caller, so that no arithmetic leaves the caller's rounding mode.
__attribute__((noipa)) inline void multiply(Tile& c, const Tile& a, const Tile& b, int rows, int pairs, int columns) {
    for (int m = 0; m < rows; m++) {
        float sums[2][MOST_BYTES / 4] = {};
        for (int k = 0; k < pairs; k++)
            for (int half = 0; half < 2; half++) {
                float x = widened(a.bytes[m] + 4 * k, half);
                for (int n = 0; n < columns; n++)
                    sums[half][n] = __builtin_fmaf(x, widened(b.bytes[k] + 4 * n, half), sums[half][n]);
            }
        for (int n = 0; n < columns; n++) {
            float sum;
            std::memcpy(&sum, c.bytes[m] + 4 * n, sizeof(sum));
            sum = sum + (sums[0][n] + sums[1][n]);
            std::memcpy(c.bytes[m] + 4 * n, &sum, sizeof(sum));
        }
    }
}

// Whether tile c [rows, columns] can be the sum of products of a [rows, 4-byte groups] and b [groups, columns].
inline void check_product(const char* instruction, int c, int a, int b) {
    for (int tile : {c, a, b}) check(instruction, tile);
    int rows = rows_of(a), groups = row_bytes_of(a) / 4;
    bool are_apart = c != a && c != b && a != b;
    bool are_whole = row_bytes_of(c) % 4 == 0 && row_bytes_of(a) % 4 == 0 && row_bytes_of(b) % 4 == 0;
    if (!are_apart || !are_whole || rows_of(c) != rows || rows_of(b) != groups || row_bytes_of(c) != row_bytes_of(b))
        fault("%s: tile %d (%d rows of %d bytes) += tile %d (%d rows of %d bytes) * tile %d (%d rows of %d bytes)", instruction,
              c, rows_of(c), row_bytes_of(c), a, rows, row_bytes_of(a), b, rows_of(b), row_bytes_of(b));
}

inline void multiply_bf16(int c, int a, int b) {
    check_product("TDPBF16PS", c, a, b);
    // Nearest even, denormals are zero on both sides, no traps: whatever the thread has set.
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    multiply(tiles[c], tiles[a], tiles[b], rows_of(a), row_bytes_of(a) / 4, row_bytes_of(b) / 4);
    _mm_setcsr(before);
    products++;
}

// Signed bytes of a, bytes of b of the type B; sums wrap around.
template <class B> void multiply_bytes(const char* instruction, int c, int a, int b) {
    check_product(instruction, c, a, b);
    for (int m = 0; m < rows_of(a); m++)
        for (int n = 0; n < row_bytes_of(b) / 4; n++) {
            uint32_t sum;
            std::memcpy(&sum, tiles[c].bytes[m] + 4 * n, sizeof(sum));
            for (int k = 0; k < row_bytes_of(a); k++)
                sum += uint32_t(int8_t(tiles[a].bytes[m][k]) * int(B(tiles[b].bytes[k / 4][4 * n + k % 4])));
            std::memcpy(tiles[c].bytes[m] + 4 * n, &sum, sizeof(sum));
        }
    products++;
}
}  // namespace tile_model

// For tests, through ctypes.
extern "C" {
// Whether the calling thread's tiles are in their initial state.
__attribute__((used)) inline long tile_model_is_released() { return !tile_model::configuration.palette; }
// How many threads have left a configuration behind, or are at work with one.
__attribute__((used)) inline long tile_model_configured_threads() { return tile_model::configured_threads; }
// How many tile products the process has computed.
__attribute__((used)) inline long tile_model_products() { return tile_model::products; }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
// The digit of a tile, whether it is written or the value of a macro. 0##digit refuses what is no literal.
#define TILE_MODEL_DIGIT(digit) 0##digit
#define TILE_MODEL_TILE(tile) TILE_MODEL_DIGIT(tile)
#define _tile_loadconfig(from) tile_model::load_configuration(from)
#define _tile_storeconfig(to) tile_model::store_configuration(to)
#define _tile_release() tile_model::release()
#define _tile_zero(tile) tile_model::zero(TILE_MODEL_TILE(tile))
#define _tile_loadd(tile, base, stride) tile_model::load(TILE_MODEL_TILE(tile), base, stride)
#define _tile_stream_loadd(tile, base, stride) tile_model::load(TILE_MODEL_TILE(tile), base, stride)
#define _tile_stored(tile, base, stride) tile_model::store(TILE_MODEL_TILE(tile), base, stride)
#define _tile_dpbf16ps(c, a, b) tile_model::multiply_bf16(TILE_MODEL_TILE(c), TILE_MODEL_TILE(a), TILE_MODEL_TILE(b))
#define _tile_dpbsud(c, a, b) \
    tile_model::multiply_bytes<uint8_t>("TDPBSUD", TILE_MODEL_TILE(c), TILE_MODEL_TILE(a), TILE_MODEL_TILE(b))
#define _tile_dpbssd(c, a, b) \
    tile_model::multiply_bytes<int8_t>("TDPBSSD", TILE_MODEL_TILE(c), TILE_MODEL_TILE(a), TILE_MODEL_TILE(b))
