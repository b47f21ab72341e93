// Gated delta nets. With S the state of a value head [key_dim, value_dim], and for each token a query q, a key k, a value v,
// a decay g in (0, 1] and a strength b: d = b (v - g S^T k); S <- g S + k d^T; output S^T q, which is g S^T q + (k q) d of
// the state before. Every sum is taken in one order for each token, so that no bit depends on how prompts are cut, on the
// company, or on the number of threads.
#pragma once
#include "recurrent.hpp"

struct GatedDelta {
    long key_heads, repeats;  // value heads that read one key head
    long key_dim, value_dim, width;
    const float* convolution;  // [width, channels]
    const float* rate;         // [value heads], below 0
    const float* bias;         // [value heads], of the decays
    const float* norm;         // [value_dim]
    float eps;

    long value_heads() const { return key_heads * repeats; }
    long keys() const { return key_heads * key_dim; }
    long values() const { return value_heads() * value_dim; }
    long channels() const { return 2 * keys() + values(); }
    // Of the projected rows: channels, gates, strengths, decays.
    long projected() const { return channels() + values() + 2 * value_heads(); }
};

// What a tile of columns gives for a key and a query.
struct TileSums {
    Pair known, read;
    INLINE void add(const Pair& row, float key, float query) {
        known = fma(row, splat(key), known);
        read = fma(row, splat(query), read);
    }
};

// The sums over `row(i)` for a key and a query: of even and of odd rows, added at the end.
template <class Row> INLINE TileSums sums_over(long rows, const float* key, const float* query, const Row& row) {
    TileSums even, odd;
    long i = 0;
    for (; i + 2 <= rows; i += 2) {
        even.add(row(i), key[i], query[i]);
        odd.add(row(i + 1), key[i + 1], query[i + 1]);
    }
    if (i < rows) even.add(row(i), key[i], query[i]);
    return {even.known + odd.known, even.read + odd.read};
}

// tile <- decay * tile + key delta^T, and the sums of the token after it.
inline TileSums advance(float* tile, long rows, vf decay, const float* key, const Pair delta, const float* next_key,
                        const float* next_query) {
    return sums_over(rows, next_key, next_query, [&](long i) __attribute__((always_inline)) {
        const Pair row = fma(delta, splat(key[i]), times(load_pair(tile + i * COLUMNS), decay));
        store(tile + i * COLUMNS, row);
        return row;
    });
}

// The same behind the last token, into the state.
inline void advance_into(const float* tile, long rows, vf decay, const float* key, const Pair delta, float* to, long stride,
                         long columns) {
    for (long i = 0; i < rows; i++) {
        const Pair row = fma(delta, splat(key[i]), times(load_pair(tile + i * COLUMNS), decay));
        if (columns == COLUMNS) {
            store(to + i * stride, row);
        } else {
            float part[COLUMNS];
            store(part, row);
            std::memcpy(to + i * stride, part, columns * sizeof(float));
        }
    }
}

// The tile of a state, and the sums of the first token.
inline TileSums read_tile(const float* from, long stride, long columns, float* tile, long rows, const float* key,
                          const float* query) {
    if (columns < COLUMNS) std::memset(tile, 0, rows * COLUMNS * sizeof(float));
    return sums_over(rows, key, query, [&](long i) __attribute__((always_inline)) {
        float* to = tile + i * COLUMNS;
        if (columns == COLUMNS) store(to, load_pair(from + i * stride));
        else std::memcpy(to, from + i * stride, columns * sizeof(float));
        return load_pair(to);
    });
}

// At most MOST_RECURRENT_TOKENS tokens of a step, [first, last).
template <class T, class Out = T> class GatedDeltaPart : RecurrentPart<T> {
    using Base = RecurrentPart<T>;
    using Base::begin, Base::continues, Base::end, Base::first, Base::last, Base::row, Base::segments;

    const GatedDelta& shape;
    float* states;  // [slots, value heads, key_dim, value_dim]
    float* mixed;   // for each token of the part: channels, decays, strengths, products of key and query
    Out* out;

  public:
    GatedDeltaPart(const GatedDelta& shape, const Segments& segments, long first, long last, const T* projected, T* inputs,
                   float* states, const T* zeros, float* mixed, Out* out)
        : Base{segments, first, last, projected, shape.projected(), 0, shape.channels(), shape.width, inputs, zeros,
               segments.of(first), segments.of(last - 1)},
          shape(shape), states(states), mixed(mixed), out(out) {}

    static long scratch_width(const GatedDelta& shape) {
        return shape.channels() + 2 * shape.value_heads() + shape.key_heads + COLUMNS;
    }

    void run(Team team, const T** rows, std::atomic<long>& next) const {
        long from, to;
        team.share(last - first, from, to);
        long segment = segments.of(first + from);
        for (long token = first + from; token < first + to; token++) {
            while (token >= segments.bounds[segment + 1]) segment++;
            mix(segment, token, rows + team.index * shape.width);
        }
        team.barrier();
        const long tiles = (shape.value_dim + COLUMNS - 1) / COLUMNS, heads = shape.value_heads();
        Base::share(heads * tiles, next, [&](long segment, long unit) { recur(segment, unit / tiles, unit % tiles * COLUMNS); });
        team.barrier();
        for (long token = first + from; token < first + to; token++) finish(token);
    }

  private:
    float* of(long token) const { return mixed + (token - first) * scratch_width(shape); }
    float* decays(long token) const { return of(token) + shape.channels(); }
    float* strengths(long token) const { return decays(token) + shape.value_heads(); }
    float* products(long token) const { return strengths(token) + shape.value_heads(); }
    void mix(long segment, long token, const T** rows) const {
        float* to = of(token);
        Base::convolve_into(to, segment, token, rows, shape.convolution, nullptr);
        const long dim = shape.key_dim;
        for (long h = 0; h < shape.key_heads; h++) {
            float *query = to + h * dim, *key = to + shape.keys() + h * dim;
            scale(query, dim, unit(query, dim) / std::sqrt(float(dim)));
            scale(key, dim, unit(key, dim));
            products(token)[h] = dot(query, key, dim);
        }
        const T* gates = row(token) + shape.channels() + shape.values();
        for (long h = 0; h < shape.value_heads(); h++) {
            const float x = widen(gates[shape.value_heads() + h]) + shape.bias[h];
            const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            strengths(token)[h] = 1.0f / (1.0f + std::exp(-widen(gates[h])));
            decays(token)[h] = std::exp(softplus * shape.rate[h]);
        }
    }

    static float unit(const float* x, long n) { return 1.0f / std::sqrt(dot(x, x, n) + 1e-6f); }
    static void scale(float* x, long n, float factor) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, load(x + i) * factor);
        for (; i < n; i++) x[i] *= factor;
    }

    // Outputs take the place of the values.
    void recur(long segment, long head, long column) const {
        alignas(64) float tile[MOST_KEY_DIM * COLUMNS];
        const long dim = shape.key_dim, width = shape.value_dim, columns = std::min(COLUMNS, width - column);
        const long key_head = head / shape.repeats, stop = end(segment);
        float* state = states + (segments.slots[segment] * shape.value_heads() + head) * dim * width + column;
        long token = begin(segment);
        const float* query = of(token) + key_head * dim;
        TileSums sums;
        if (continues(segment)) sums = read_tile(state, width, columns, tile, dim, query + shape.keys(), query);
        else std::memset(tile, 0, dim * COLUMNS * sizeof(float));
        for (; token < stop; token++) {
            float* value = of(token) + 2 * shape.keys() + head * width + column;
            const vf decay = splat(decays(token)[head]), strength = splat(strengths(token)[head]);
            const float* key = of(token) + shape.keys() + key_head * dim;
            const Pair delta = times(load_pair(value, columns) - times(sums.known, decay), strength);
            float output[COLUMNS];
            store(output, fma(delta, splat(products(token)[key_head]), times(sums.read, decay)));
            std::memcpy(value, output, columns * sizeof(float));
            if (token + 1 < stop) {
                const float* next = of(token + 1) + key_head * dim;
                sums = advance(tile, dim, decay, key, delta, next + shape.keys(), next);
            } else {
                advance_into(tile, dim, decay, key, delta, state, width, columns);
            }
        }
    }

    // out = norm(outputs) * silu(gates)
    void finish(long token) const {
        const long n = shape.value_dim;
        for (long h = 0; h < shape.value_heads(); h++) {
            const float* x = of(token) + 2 * shape.keys() + h * n;
            const T* gate = row(token) + shape.channels() + h * n;
            Out* to = out + token * shape.values() + h * n;
            const float factor = 1.0f / std::sqrt(dot(x, x, n) / n + shape.eps);
            long i = 0;
            for (; i + LANES <= n; i += LANES)
                store(to + i, load(x + i) * factor * load(shape.norm + i) * silu(load(gate + i)));
            for (; i < n; i++) {
                const float g = widen(gate[i]);
                to[i] = narrow<Out>(x[i] * factor * shape.norm[i] * (g / (1.0f + std::exp(-g))));
            }
        }
    }
};
