// Products of bfloat16 by the tile instructions (AMX), over the same panels as matrix.hpp. A register is a tile of 16 rows
// of 64 bytes; with 16 lanes a panel is 32 outputs, and 16 pairs of its inputs are two tiles of weights side by side:
//
//   C [rows, 16 outputs] += A [rows, 32 inputs] * B [16 pairs of inputs, 16 outputs]
//
// Two row tiles and one panel (32 x 32 sums) take all eight registers: each tile that is loaded serves two products. A
// product takes 16 cycles, a load 8 from the first-level cache and about 20 from the second, so that of four loads to
// four products the two of weights may come from the second-level cache, or all four at three quarters of the peak.
//
// Order of sums (TDPBF16PS in Intel's manual): for each 32 inputs two chains in float, of the even and of the odd ones,
// from +0, denormals flushed; both are added, then added to the sum. `chains` does the same without tiles, so that few
// rows, which wait for the memory only, get the very bits that many get.
#pragma once
#include "vectors.hpp"
#if defined(TERCET_TILE_MODEL)
#include "tile_model.hpp"
#endif

#if defined(TERCET_TILE_MODEL) || defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#define TERCET_TILES 1

constexpr int TILE_HEIGHT = 16;   // rows of a tile
constexpr int TILE_INPUTS = 32;   // that one product goes over
constexpr int TILE_PANEL = 2 * LANES;  // outputs of a panel, two tiles of weights
static_assert(LANES == 16);
constexpr long PAIR_BYTES = TILE_PANEL * 2 * sizeof(bf16);  // of a panel: one pair of inputs

// From how many rows on a product uses tiles; every value gives the same bits.
inline long fewest_tile_rows = 4;

// The kernel gives tiles to a process that asks (Linux 5.16 and newer), for all of its threads.
inline bool may_use_tiles() {
#if defined(TERCET_TILE_MODEL)
    return true;
#else
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
}

// Of this thread: rows of its row tiles (0: no configuration), and the bytes of each.
inline thread_local int configured_height = 0, configured_bytes = 0;

// Tiles 0 to 3: sums; 4, 5: rows; 6, 7: weights.
inline void configure_tiles(int height, int row_bytes = 64) {
    if (configured_height == height && configured_bytes == row_bytes) return;
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } wanted;
    for (int i = 0; i < 8; i++) {
        const bool is_of_rows = i == 4 || i == 5;
        wanted.row_bytes[i] = uint16_t(is_of_rows ? row_bytes : 64);
        wanted.rows[i] = uint8_t(i < 6 ? height : row_bytes / 4);
    }
    asm volatile("" ::"r"(&wanted) : "memory");  // the intrinsic does not say that it reads all of it
    _tile_loadconfig(&wanted);
    configured_height = height;
    configured_bytes = row_bytes;
}

// Whatever a thread has done inside, its tiles are in their initial state afterwards: torch uses these threads as well,
// and tiles in use make every switch between threads dearer.
struct TileScope {
    TileScope() = default;
    TileScope(const TileScope&) = delete;
    ~TileScope() {
        if (!configured_height) return;
        _tile_release();
        configured_height = 0;
    }
};

// Lines of memory that are asked for at each step over the inputs: those from `first` to `last` of the 32 that a panel has
// for 32 inputs, `offset` bytes behind the panel that is multiplied.
struct TileFetch {
    long offset, first, last;
    INLINE void operator()(const char* panel) const {
        for (long line = first; line < last; line++) __builtin_prefetch(panel + offset + line * 64, 0, 2);
    }
};

// The sums of one panel and one or two row tiles, to `out`: rows `stride` floats apart, the second tile's after the first's.
// goes_on: onto what `out` has. Rows are loaded as what is not needed again soon, so that the first-level cache keeps the
// panel (measured: 12 to 23 % of the rate at 256 rows).
template <int ROW_TILES>
__attribute__((noinline)) void multiply_panel(const bf16* const* rows, long row_bytes, const bf16* weights, long inputs,
                                              float* out, long stride, TileFetch fetch, bool goes_on) {
    const char* panel = reinterpret_cast<const char*>(weights);
    const bf16 *upper = rows[0], *lower = rows[ROW_TILES - 1];
    const long bytes = stride * sizeof(float);
    float* below = out + TILE_HEIGHT * stride;
    if (goes_on) {
        _tile_loadd(0, out, bytes);
        _tile_loadd(1, out + 16, bytes);
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(2, below, bytes);
            _tile_loadd(3, below + 16, bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (ROW_TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (long k = 0; k < inputs; k += TILE_INPUTS, panel += TILE_INPUTS / 2 * PAIR_BYTES) {
        fetch(panel);
        _tile_loadd(6, panel, PAIR_BYTES);
        _tile_stream_loadd(4, upper + k, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 64, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (ROW_TILES == 2) {
            _tile_stream_loadd(5, lower + k, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
    if constexpr (ROW_TILES == 2) {
        _tile_stored(2, below, bytes);
        _tile_stored(3, below + 16, bytes);
    }
}

// The same of two panels and one row tile: four sums that do not wait for each other.
__attribute__((noinline)) inline void multiply_panels(const bf16* rows, long row_bytes, const bf16* const* weights,
                                                      long inputs, float* out, long stride, TileFetch fetch) {
    const char *left = reinterpret_cast<const char*>(weights[0]), *right = reinterpret_cast<const char*>(weights[1]);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < inputs; k += TILE_INPUTS) {
        fetch(left);
        fetch(right);
        _tile_loadd(4, rows + k, row_bytes);
        _tile_loadd(6, left, PAIR_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, left + 64, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, right, PAIR_BYTES);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, right + 64, PAIR_BYTES);
        _tile_dpbf16ps(3, 4, 7);
        left += TILE_INPUTS / 2 * PAIR_BYTES;
        right += TILE_INPUTS / 2 * PAIR_BYTES;
    }
    _tile_stored(0, out, stride * sizeof(float));
    _tile_stored(1, out + 16, stride * sizeof(float));
    _tile_stored(2, out + 32, stride * sizeof(float));
    _tile_stored(3, out + 48, stride * sizeof(float));
}

// Row tiles whose sums are kept while the inputs are gone through in parts, and inputs of a part at most: a part of a panel
// stays in the first-level cache (48 KiB) while all rows go by.
constexpr long MOST_ROW_TILES = 16, MOST_PART = 576;

// What the second-level cache (2 MiB on all CPUs with tiles) keeps of rows, besides panels and what is written; every value
// gives the same bits.
inline long tile_cache_bytes = 768 << 10;

// Rows whose inputs it keeps for one panel after another.
inline long rows_in_cache(long inputs) {
    constexpr long FEWEST = 64;
    return std::max(FEWEST, tile_cache_bytes / (inputs * long(sizeof(bf16))));
}

// Rows as tiles of the same height: the last one begins where it ends with the last row, and what it computes a second time
// is not given out again.
struct RowTiles {
    long rows, height, count;
    explicit RowTiles(long rows)
        : rows(rows), height(std::min<long>(rows, TILE_HEIGHT)), count((rows + TILE_HEIGHT - 1) / TILE_HEIGHT) {}
    long begin(long t) const { return std::min(t * TILE_HEIGHT, rows - height); }
    // How many of a tile's rows the one before it has, too.
    long again(long t) const { return t * TILE_HEIGHT - begin(t); }
};

// The sums of one panel's part and row tiles [first, last), to `out`, where rows are `pitch` floats apart; `k`: the part's
// first input. fetch_of(t): what is asked for beside a pair of tiles.
template <class FetchOf>
INLINE void multiply_tiles(const bf16* a, long stride, const RowTiles& row_tiles, long first, long last, const bf16* panel,
                           long k, long size, float* out, long pitch, const FetchOf& fetch_of) {
    const bf16* weights = panel + k * TILE_PANEL;
    for (long t = first; t < last; t += 2, out += 2 * TILE_HEIGHT * pitch) {
        const bool are_two = t + 1 < last;
        const bf16* const from[2] = {a + row_tiles.begin(t) * stride + k, a + row_tiles.begin(t + are_two) * stride + k};
        const long row_bytes = stride * sizeof(bf16);
        if (are_two) multiply_panel<2>(from, row_bytes, weights, size, out, pitch, fetch_of(t), k > 0);
        else multiply_panel<1>(from, row_bytes, weights, size, out, pitch, fetch_of(t), k > 0);
    }
}

// Call `sink(row, sums[2 * P])` for all rows of `a`; see `tiles` in matrix.hpp.
template <int P, class Sink>
void tile_products(const bf16* a, long stride, long rows, const bf16* const (&panels)[P], long inputs, const Sink& sink,
                   long ahead) {
    alignas(64) vf sums[MOST_ROW_TILES * TILE_HEIGHT][2 * P];
    constexpr long WIDTH = 2 * P * LANES;
    const RowTiles row_tiles(rows);
    const long row_bytes = stride * sizeof(bf16), count = row_tiles.count, steps = (count + 1) / 2;
    const long tiles = inputs / TILE_INPUTS, parts = count > 2 ? (inputs + MOST_PART - 1) / MOST_PART : 1;
    // Of more rows a panel is multiplied for so long that the processor's own foresight is enough.
    const long lines = ahead && count <= MOST_ROW_TILES ? TILE_INPUTS : 0;
    const auto fetch_of = [&](long t) {
        return TileFetch{ahead * long(sizeof(bf16)), lines * (t / 2) / steps, lines * (t / 2 + 1) / steps};
    };
    configure_tiles(int(row_tiles.height));
    asm volatile("" ::: "memory");  // nor do the loads of tiles say so
    if (count == 1) {  // two panels at once
        float* out = reinterpret_cast<float*>(sums);
        int p = 0;
        for (; p + 2 <= P; p += 2)
            multiply_panels(a, row_bytes, panels + p, inputs, out + p * TILE_PANEL, WIDTH, fetch_of(0));
        if (p < P) multiply_panel<1>(&a, row_bytes, panels[p], inputs, out + p * TILE_PANEL, WIDTH, fetch_of(0), false);
        for (long r = 0; r < rows; r++) sink(r, sums[r]);
        return;
    }
    for (long first = 0; first < count; first += MOST_ROW_TILES) {
        const long last = std::min(first + MOST_ROW_TILES, count);
        for (long i = 0; i < parts * P; i++) {
            const long p = i % P, k = tiles * (i / P) / parts * TILE_INPUTS;
            const long size = tiles * (i / P + 1) / parts * TILE_INPUTS - k;
            float* out = reinterpret_cast<float*>(sums) + p * TILE_PANEL;
            multiply_tiles(a, stride, row_tiles, first, last, panels[p], k, size, out, WIDTH, fetch_of);
        }
        for (long r = first * TILE_HEIGHT; r < std::min(last * TILE_HEIGHT, rows); r++) {
            const long t = r / TILE_HEIGHT;
            sink(r, sums[(t - first) * TILE_HEIGHT + r - row_tiles.begin(t)]);
        }
    }
}

// Panels that a thread multiplies at once where rows are too long for the second-level cache.
constexpr long WIDE_PANELS = 14;

// Whether rows are better gone through once for many panels, in parts, than again and again for two.
inline bool are_wide(long rows, long inputs) {
    return inputs % TILE_INPUTS == 0 && rows >= fewest_tile_rows && rows > rows_in_cache(inputs);
}

// Call `sink(row, sums, pitch)` for all rows of `a`, at most MOST_ROW_TILES tiles: the second-level cache keeps a part of
// all rows, and the sums of all panels, each part of which is read once. From a panel's sums to the next one's: `pitch`.
template <class Panel, class Sink>
void wide_products(const bf16* a, long stride, long rows, long num_panels, long inputs, float* sums, const Panel& panel,
                   const Sink& sink) {
    const RowTiles row_tiles(rows);
    const long count = row_tiles.count, steps = (count + 1) / 2;
    const long tiles = inputs / TILE_INPUTS, parts = (inputs + MOST_PART - 1) / MOST_PART;
    // The same part of the panel behind one.
    const auto fetch_of = [&](long t) {
        return TileFetch{inputs * TILE_PANEL * long(sizeof(bf16)), TILE_INPUTS * (t / 2) / steps,
                         TILE_INPUTS * (t / 2 + 1) / steps};
    };
    const long pitch = count * TILE_HEIGHT * TILE_PANEL;
    configure_tiles(int(row_tiles.height));
    asm volatile("" ::: "memory");  // nor do the loads of tiles say so
    for (long i = 0; i < parts * num_panels; i++) {
        const long p = i % num_panels, k = tiles * (i / num_panels) / parts * TILE_INPUTS;
        const long size = tiles * (i / num_panels + 1) / parts * TILE_INPUTS - k;
        multiply_tiles(a, stride, row_tiles, 0, count, panel(p), k, size, sums + p * pitch, TILE_PANEL, fetch_of);
    }
    for (long r = 0; r < rows; r++) {
        const long t = r / TILE_HEIGHT;
        sink(r, sums + (t * TILE_HEIGHT + r - row_tiles.begin(t)) * TILE_PANEL, pitch);
    }
}

// sums[r * 2 * P + 2 * p + v] of R rows, in the order of the tile instructions.
template <int P, int R>
__attribute__((noipa)) void chains(const bf16* a, long stride, const bf16* const* panels, long inputs, vf* out) {
    vf sums[R][2 * P] = {};
    const bf16* b[P];
    for (int p = 0; p < P; p++) b[p] = panels[p];
    for (long block = 0; block < inputs; block += TILE_INPUTS) {
        vf even[R][2 * P] = {}, odd[R][2 * P] = {};
        for (long k = block; k < block + TILE_INPUTS; k += 2) {
            vf first[R], second[R];
            for (int r = 0; r < R; r++) {
                uint32_t pair;
                std::memcpy(&pair, a + r * stride + k, sizeof(pair));
                vu both = vu{} + pair;
                first[r] = (vf)(both << 16);
                second[r] = (vf)(both & 0xffff0000u);
            }
            for (int v = 0; v < 2 * P; v++) {
                vu pairs = load_pairs(b[v / 2] + v % 2 * 2 * LANES);
                vf low = (vf)(pairs << 16), high = (vf)(pairs & 0xffff0000u);
                for (int r = 0; r < R; r++) {
                    even[r][v] = fma(first[r], low, even[r][v]);
                    odd[r][v] = fma(second[r], high, odd[r][v]);
                }
            }
            for (int p = 0; p < P; p++) b[p] += 2 * TILE_PANEL;
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < 2 * P; v++) sums[r][v] = sums[r][v] + (even[r][v] + odd[r][v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * P; v++) out[r * 2 * P + v] = sums[r][v];
}

// Call `sink` as `tile_products` does, with the same bits, without tiles: for rows that wait for the memory.
template <int P, class Sink>
void chained_products(const bf16* a, long stride, long rows, const bf16* const (&panels)[P], long inputs, const Sink& sink) {
    constexpr int MOST = P == 4 ? 1 : P == 2 ? 2 : 3;  // rows whose sums fit the registers
    vf sums[MOST][2 * P];
    for (long row = 0; row < rows; row += MOST) {
        const bf16* from = a + row * stride;
        const long height = std::min<long>(MOST, rows - row);
        // Denormals are zero, as for tiles, whatever the thread has set: for these sums only.
        constexpr unsigned FLUSH = 0x8040;
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | FLUSH);
        if (height == 1) chains<P, 1>(from, stride, panels, inputs, sums[0]);
        else if (height == 2) chains<P, std::min(2, MOST)>(from, stride, panels, inputs, sums[0]);
        else chains<P, MOST>(from, stride, panels, inputs, sums[0]);
        _mm_setcsr(before);
        for (long r = 0; r < height; r++) sink(row + r, sums[r]);
    }
}
#else
inline bool may_use_tiles() { return true; }  // none are needed
struct TileScope {
    ~TileScope() {}
};
#endif
