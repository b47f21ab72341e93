// Products with matrices packed into panels: `PANEL` outputs side by side for each input (float) or pair of inputs
// (bfloat16), so that one layout serves a single row, which streams the panels from memory once, as well as many.
// A sum runs over the inputs in order, in one chain, whatever the number of rows or threads: a row's result does not
// depend on its neighbours.
#pragma once
#include "tiles.hpp"
#include "vectors.hpp"

constexpr int PANEL = 2 * LANES;

// How a product goes over the inputs: STEP of them lie beside each other in a panel, and are multiplied in PARTS.
template <class T> struct Packing;
struct FloatRows {
    typedef float Input;  // what rows are given as
    static INLINE vf input(const float* a) { return splat(*a); }
    static INLINE vf multiply(vf sum, vf a, vf b) { return fma(a, b, sum); }
};
template <> struct Packing<float> : FloatRows {
    static constexpr int STEP = 1, PARTS = 1;
    template <int> static INLINE vf weights(const float* b, int) { return load(b); }
};
#if defined(__AVX512BF16__)
template <> struct Packing<bf16> {
    typedef bf16 Input;
    static constexpr int STEP = 2, PARTS = 1;
    static INLINE vu input(const bf16* a) {
        uint32_t pair;
        std::memcpy(&pair, a, 4);
        return vu{} + pair;
    }
    template <int> static INLINE vu weights(const bf16* b, int) { return load_pairs(b); }
    static INLINE vf multiply(vf sum, vu a, vu b) { return dot_pairs(sum, a, b); }
};
#else
// Volatile, so that it is read each time: a tile of many sums has no register for it, and where the compiler found one a
// sum went to the stack instead (measured: 38 % at 128 rows).
static const volatile vu UPPER_HALVES = vu{} + 0xffff0000u;
// Without instructions for it a weight becomes a float in the inner loop, where it serves all rows of a tile; rows are
// floats from the start.
template <> struct Packing<bf16> : FloatRows {
    static constexpr int STEP = 2, PARTS = 2;
    template <int SUMS> static INLINE vf weights(const bf16* b, int part) {
        constexpr bool KEPT = SUMS < 12 || LANES == 16;
        vu pairs = load_pairs(b);
        if (!part) return (vf)(pairs << 16);
        return (vf)(pairs & (KEPT ? vu{} + 0xffff0000u : vu(UPPER_HALVES)));
    }
};
#endif
template <class T> using Input = typename Packing<T>::Input;

// How many rows a tile of vector registers has: as many sums as the registers hold beside the operands.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6;
#else
constexpr int TILE_ROWS = 3;
#endif

// Lines of other memory that will be read soon, in the order in which they are asked for; the last one again and again.
struct Lines {
    const char* const* next;
    const char* const* last;
    void skip(long count) { next += last - next < count ? last - next : count; }
};
static const char* const NO_LINES[1] = {reinterpret_cast<const char*>(NO_LINES)};

// Memory that is asked for while a tile is computed: for each of its panels, `offset` bytes behind the panel's first, and
// `pace` bytes further at each step of the inner loop, and half of that behind it, which may be another line; and one of
// `lines` at each step.
struct Fetch {
    long offset, pace;
    Lines lines = {NO_LINES, NO_LINES};
};

// Of a panel, in a step of the inner loop: one line of the cache or two.
template <class T> constexpr long STEP_BYTES = PANEL * Packing<T>::STEP * sizeof(T);

// out[r * 2 * P + 2 * p + v] = rows[r] . columns of panel p, for R rows and P panels. On its own, not inlined: it is
// most of what is compiled.
template <class T, int P, int R>
__attribute__((noinline)) void tile(const Input<T>* a, long stride, const T* const* panels, long inputs, vf* out,
                                    Fetch fetch) {
    using K = Packing<T>;
    constexpr int VECTOR = K::STEP * LANES;
    vf sums[R][2 * P] = {};
    const T* b[P];
    for (int p = 0; p < P; p++) b[p] = panels[p];
    auto step = [&](long k) __attribute__((always_inline)) {
        if constexpr (R > 1) {
            for (int p = 0; p < P; p++) {
                const char* at = reinterpret_cast<const char*>(panels[p]) + fetch.offset;
                __builtin_prefetch(at, 0, 2);
                if constexpr (STEP_BYTES<T> > 64) __builtin_prefetch(at + fetch.pace / 2, 0, 2);
            }
            fetch.offset += fetch.pace;
            __builtin_prefetch(*fetch.lines.next, 0, 2);
            fetch.lines.next += fetch.lines.next < fetch.lines.last;
        }
        for (int part = 0; part < K::PARTS; part++) {
            // Read again rather than kept: every register counts.
            if (part)
                for (int p = 0; p < P; p++) asm("" : "+r"(b[p]));
            decltype(K::input(a)) w[2 * P];
            for (int v = 0; v < 2 * P; v++) w[v] = K::template weights<R * 2 * P>(b[v / 2] + v % 2 * VECTOR, part);
            for (int r = 0; r < R; r++) {
                auto x = K::input(a + r * stride + k + part);
                for (int v = 0; v < 2 * P; v++) sums[r][v] = K::multiply(sums[r][v], x, w[v]);
            }
        }
        for (int p = 0; p < P; p++) b[p] += 2 * VECTOR;
    };
    if constexpr (K::PARTS == 1) {
#pragma GCC unroll 4
        for (long k = 0; k < inputs; k += K::STEP) step(k);
    } else {
        for (long k = 0; k < inputs; k += K::STEP) step(k);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * P; v++) out[r * 2 * P + v] = sums[r][v];
}

template <class T, int P, int R>
void tile_of(long height, const Input<T>* a, long stride, const T* const* panels, long inputs, vf* out, Fetch fetch) {
    if (height == R) return tile<T, P, R>(a, stride, panels, inputs, out, fetch);
    if constexpr (R > 1) tile_of<T, P, R - 1>(height, a, stride, panels, inputs, out, fetch);
}

// Call `sink(row, sums[2 * P])` for all rows of `a`, in tiles of nearly equal height: a single panel leaves space for
// twice as many rows. `ahead`: how many numbers behind these panels those lie that come next, or 0; each tile asks for a
// part of them. Four panels are for a single row: it has no other sums that could be added to while one is on its way.
template <class T, int P, class Sink>
INLINE void tiles(const Input<T>* a, long stride, long rows, const T* const (&panels)[P], long inputs, const Sink& sink,
                  long ahead = 0, Lines lines = {NO_LINES, NO_LINES}) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (inputs % TILE_INPUTS == 0) {
            if (rows >= fewest_tile_rows) tile_products<P>(a, stride, rows, panels, inputs, sink, ahead);
            else chained_products<P>(a, stride, rows, panels, inputs, sink);
            return;
        }
#endif
    constexpr int MOST = P == 4 ? 1 : P == 1 ? 2 * TILE_ROWS : TILE_ROWS;
    const long count = (rows + MOST - 1) / MOST;
    const long pace = ahead ? STEP_BYTES<T> / count : 0;
    vf sums[MOST][2 * P];
    for (long t = 0; t < count; t++) {
        long row = rows * t / count, height = rows * (t + 1) / count - row;
        tile_of<T, P, MOST>(height, a + row * stride, stride, panels, inputs, sums[0],
                              {long(ahead * sizeof(T)) + inputs / Packing<T>::STEP * pace * t, pace, lines});
        lines.skip(inputs / Packing<T>::STEP);
        for (long r = 0; r < height; r++) sink(row + r, sums[r]);
    }
}

// Some more rows than a tile of two panels holds are better multiplied by one panel at a time: then every panel comes
// from memory once, while all rows are computed (measured: 15 to 20 % at 8 rows).
// With 16 registers tall tiles of one panel are better from three rows on: each weight that is loaded serves six rows, and
// with three rows of two panels sums are kept on the stack (measured: 30 % at 1024 rows, 60 % at 3).
constexpr bool FEW_REGISTERS = TILE_ROWS < 6;
constexpr long MOST_NARROW = FEW_REGISTERS ? 48 : 16;
template <class T> INLINE bool narrow_tiles(long rows) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>) return false;
#endif
    return FEW_REGISTERS ? rows > 2 : rows > TILE_ROWS && rows <= 16;
}

// With few rows memory is the limit, and the processor's own foresight does best. With more of them it must not wait for
// a panel that it could have asked for while it multiplied the one before (measured on a Zen 5, of matrices from memory:
// 1.4 to 2 times the speed at 8 and 12 rows; with AVX2 1.2 to 2 times at 2 and 3).
#if defined(TERCET_TILES)
template <class T> constexpr long MOST_UNFETCHED = TILE_ROWS;
#else
template <class T> constexpr long MOST_UNFETCHED = FEW_REGISTERS ? 1 : sizeof(T) == 2 ? 4 : TILE_ROWS;
#endif
template <class T> INLINE bool fetches(long rows) { return rows > MOST_UNFETCHED<T>; }

// How many rows are multiplied by one panel after another before the next rows are.
template <class T> INLINE long block_of_rows(long rows, long inputs) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (inputs % TILE_INPUTS == 0) return std::min(rows, rows_in_cache(inputs));
#endif
    return rows;
}

// From a row that norms or products write for the next product to read, to the next row: those that lie an odd number of
// lines apart come to all sets of the first-level cache, where the rows of a tile would otherwise drive each other out
// (measured: 8 to 15 % at 256 rows).
template <class T> INLINE long row_pitch(long inputs) {
#if defined(TERCET_TILES)
    if constexpr (std::is_same_v<T, bf16>)
        if (inputs % (2 * TILE_INPUTS) == 0) return inputs + TILE_INPUTS;
#endif
    return inputs;
}

// A matrix [outputs, inputs] as panels; the last one is filled up with zeros.
template <class T> struct Matrix {
    const T* panels;
    const T* bias;  // [outputs] or null
    long outputs, inputs;
    long pitch = outputs;  // from a row of what it is multiplied to, to the next

    long panel_count() const { return (outputs + PANEL - 1) / PANEL; }
    const T* panel(long index) const { return panels + index * PANEL * inputs; }
};

template <class T> void pack(const T* weight, T* out, long outputs, long inputs, long first, long last) {
    constexpr int STEP = Packing<T>::STEP;
    for (long p = first; p < last; p++)
        for (int c = 0; c < PANEL; c++) {
            const T* row = weight + (p * PANEL + c) * inputs;
            T* to = out + p * PANEL * inputs + c * STEP;
            bool exists = p * PANEL + c < outputs;
            for (long i = 0; i < inputs; i += STEP, to += PANEL * STEP)
                for (int s = 0; s < STEP; s++) to[s] = exists ? row[i + s] : T{};
        }
}

// Store the vectors of a panel from column `first` on, as many columns as there are below `limit`; `add` [limit] is
// added, and `onto`, if given, is a row that is added too.
template <class T, class Out>
INLINE void put(Out* row, const vf* values, int count, long first, long limit, const T* add, const Out* onto) {
    for (int v = 0; v < count; v++, first += LANES) {
        if (first + LANES <= limit) {
            vf x = values[v];
            if (add) x = x + load(add + first);
            if (onto) x = x + load(onto + first);
            store(row + first, x);
        } else {
            for (long i = first; i < limit; i++) {
                float x = values[v][i - first];
                if (add) x += widen(add[i]);
                if (onto) x += widen(onto[i]);
                row[i] = narrow<Out>(x);
            }
        }
    }
}

// Panels [first, last) of x @ matrix.T: `sink(row, column, sums, count)` gets `count` vectors from a column on. `distance`:
// how many panels further this thread's next ones are, 0: there are none. `lines`: what else is asked for meanwhile.
template <class T, class Sink>
INLINE void over_panels(const Matrix<T>& m, const Input<T>* x, long stride, long rows, long first, long last, long distance,
                        Lines lines, const Sink& sink) {
    long p = first;
    const long ahead = fetches<T>(rows) ? distance * PANEL * m.inputs : 0;
    auto next = [&](auto number) {
        constexpr int P = number;
        const T* panels[P];
        for (int i = 0; i < P; i++) panels[i] = m.panel(p + i);
        tiles<T, P>(x, stride, rows, panels, m.inputs, [&](long r, vf(&s)[2 * P]) { sink(r, p * PANEL, s, 2 * P); }, ahead, lines);
        p += P;
    };
    while (rows == 1 && p + 4 <= last) next(std::integral_constant<int, 4>{});
    while (!narrow_tiles<T>(rows) && p + 2 <= last) next(std::integral_constant<int, 2>{});
    while (p < last) next(std::integral_constant<int, 1>{});
}

// How many rows ahead the memory of what is written is asked for: rows of an output lie far from each other.
constexpr int ROWS_AHEAD = 12;

// The same as out = x @ matrix.T + bias (+ onto, which may be `out` itself).
template <class T, class Out>
void multiply(const Matrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, const Out* onto, long first,
              long last, long distance, Lines lines = {NO_LINES, NO_LINES}) {
    over_panels(m, x, stride, rows, first, last, distance, lines, [&](long r, long column, const vf* s, int count) {
        for (int i = 0; i < count * LANES * int(sizeof(Out)); i += 64)
            __builtin_prefetch(reinterpret_cast<char*>(out + (r + ROWS_AHEAD) * m.pitch + column) + i, 1);
        put(out + r * m.pitch, s, count, column, m.outputs, m.bias, onto ? onto + r * m.pitch : nullptr);
    });
}

// The same as out = activation(x @ matrix.T + bias), of whole panels.
template <class T, class F, class Out>
void multiply_activated(const Matrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, long first, long last,
                        long distance) {
    over_panels(m, x, stride, rows, first, last, distance, {NO_LINES, NO_LINES}, [&](long r, long column, const vf* s, int count) {
        for (int v = 0; v < count; v++, column += LANES)
            store(out + r * m.pitch + column, F::of(m.bias ? s[v] + load(m.bias + column) : s[v]));
    });
}

struct Silu {
    static INLINE vf of(vf x) { return silu(x); }
};

// One panel of activation(gates) * ups; `bias` [2 * width], from that of the panel's gates on, or null.
template <class F = Silu, class T, class Out>
INLINE void put_gated(Out* out, const vf* gates, const vf* ups, const T* bias, long width) {
    for (int v = 0; v < 2; v++) {
        vf gate = gates[v], up = ups[v];
        if (bias) {
            gate = gate + load(bias + v * LANES);
            up = up + load(bias + width + v * LANES);
        }
        store(out + v * LANES, F::of(gate) * up);
    }
}

// Panels [first, last) of out = activation(x @ gate.T) * (x @ up.T), of which rows are `pitch` apart; `m` holds the gate's
// panels, then those of up.
template <class T, class F = Silu, class Out>
void multiply_gated(const Matrix<T>& m, const Input<T>* x, long stride, long rows, Out* out, long pitch, long first,
                    long last, long distance) {
    long width = m.outputs / 2, half = width / PANEL;
    const long ahead = fetches<T>(rows) ? distance * PANEL * m.inputs : 0;
    auto finish = [&](long p, long r, const vf* gates, const vf* ups) {
        __builtin_prefetch(out + (r + ROWS_AHEAD) * pitch + p * PANEL, 1);
        put_gated<F>(out + r * pitch + p * PANEL, gates, ups, m.bias ? m.bias + p * PANEL : nullptr, width);
    };
    long p = first;
    for (; rows == 1 && p + 2 <= last; p += 2) {
        const T* const panels[4] = {m.panel(p), m.panel(p + 1), m.panel(half + p), m.panel(half + p + 1)};
        tiles<T, 4>(x, stride, rows, panels, m.inputs, [&](long r, vf(&s)[8]) {
            finish(p, r, s, s + 4);
            finish(p + 1, r, s + 2, s + 6);
        });
    }
    for (; p < last; p++) {
        const T *const gate[1] = {m.panel(p)}, *const up[1] = {m.panel(half + p)};
        if (!narrow_tiles<T>(rows)) {
            const T* const panels[2] = {gate[0], up[0]};
            tiles<T, 2>(x, stride, rows, panels, m.inputs, [&](long r, vf(&s)[4]) { finish(p, r, s, s + 2); }, ahead);
            continue;
        }
        vf gates[MOST_NARROW][2];
        for (long begin = 0; begin < rows; begin += MOST_NARROW) {
            long count = rows - begin < MOST_NARROW ? rows - begin : MOST_NARROW;
            const Input<T>* block = x + begin * stride;
            tiles<T, 1>(block, stride, count, gate, m.inputs, [&](long r, vf(&s)[2]) {
                gates[r][0] = s[0];
                gates[r][1] = s[1];
            }, ahead);
            tiles<T, 1>(block, stride, count, up, m.inputs, [&](long r, vf(&s)[2]) { finish(p, begin + r, gates[r], s); },
                        ahead);
        }
    }
}
