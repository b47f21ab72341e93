// Gated delta nets. With S the state of a value head [key_dim, value_dim], and for each token a query q, a key k, a value v,
// a decay g in (0, 1] and a strength b: d = b (v - g S^T k); S <- g S + k d^T; output S^T q, which is g S^T q + (k q) d of
// the state before. Kimi's have a decay for each number of a key, diag(g) instead of g: what reads the state before are then
// g k and g q. Every sum is taken in one order for each token, so that no bit depends on how prompts are cut, on the company,
// or on the number of threads.
#pragma once
#include "recurrent.hpp"

struct GatedDelta {
    long key_heads, repeats;  // value heads that read one key head
    long key_dim, value_dim, width;
    const float* convolution;  // [width, channels]
    const float* rate;         // [decays], below 0
    const float* bias;         // [decays]
    const float* norm;         // [value_dim]
    float eps;
    float most_strength;
    long by_key;   // a decay for each number of a key, where each head has its own: keys() of them
    long sigmoid;  // gates the outputs in place of SiLU

    long decays() const { return by_key ? keys() : value_heads(); }
    long value_heads() const { return key_heads * repeats; }
    long keys() const { return key_heads * key_dim; }
    long values() const { return value_heads() * value_dim; }
    long channels() const { return 2 * keys() + values(); }
    // Of the projected rows: channels, gates, strengths, decays.
    long projected() const { return channels() + values() + value_heads() + decays(); }
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

// The decay of a state's rows.
struct OneDecay {
    vf all;
    INLINE vf operator()(long) const { return all; }
};
struct RowDecays {
    const float* each;
    INLINE vf operator()(long row) const { return splat(each[row]); }
};

// tile <- decay * tile + key delta^T, and the sums of the token after it.
template <class Decay>
inline TileSums advance(float* tile, long rows, const Decay decay, const float* key, const Pair delta, const float* next_key,
                        const float* next_query) {
    return sums_over(rows, next_key, next_query, [&](long i) __attribute__((always_inline)) {
        const Pair row = fma(delta, splat(key[i]), times(load_pair(tile + i * COLUMNS), decay(i)));
        store(tile + i * COLUMNS, row);
        return row;
    });
}

// The same behind the last token, into the state.
template <class Decay>
inline void advance_into(const float* tile, long rows, const Decay decay, const float* key, const Pair delta, float* to,
                         long stride, long columns) {
    for (long i = 0; i < rows; i++) {
        const Pair row = fma(delta, splat(key[i]), times(load_pair(tile + i * COLUMNS), decay(i)));
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
    float* mixed;   // for each token of the part: channels, decays, strengths, products of key and query, keys times decays
    Out* out;

  public:
    GatedDeltaPart(const GatedDelta& shape, const Segments& segments, long first, long last, const T* projected, T* inputs,
                   float* states, const T* zeros, float* mixed, Out* out)
        : Base{segments, first, last, projected, shape.projected(), 0, shape.channels(), shape.width, inputs, zeros,
               segments.of(first), segments.of(last - 1)},
          shape(shape), states(states), mixed(mixed), out(out) {}

    static long scratch_width(const GatedDelta& shape) {
        const long decayed = shape.by_key ? shape.keys() : 0;
        return shape.channels() + shape.decays() + shape.value_heads() + shape.key_heads + decayed + COLUMNS;
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
        Base::share(heads * tiles, next, [&](long segment, long unit) {
            if (shape.by_key) recur<true>(segment, unit / tiles, unit % tiles * COLUMNS);
            else recur<false>(segment, unit / tiles, unit % tiles * COLUMNS);
        });
        team.barrier();
        for (long token = first + from; token < first + to; token++) finish(token);
    }

  private:
    float* of(long token) const { return mixed + (token - first) * scratch_width(shape); }
    float* decays(long token) const { return of(token) + shape.channels(); }
    float* strengths(long token) const { return decays(token) + shape.decays(); }
    float* products(long token) const { return strengths(token) + shape.value_heads(); }
    float* decayed_keys(long token) const { return products(token) + shape.key_heads; }

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
        for (long h = 0; h < shape.value_heads(); h++)
            strengths(token)[h] = shape.most_strength / (1.0f + std::exp(-widen(gates[h])));
        decay(token, gates + shape.value_heads());
        if (!shape.by_key) return;
        const float *decays = this->decays(token), *key = to + shape.keys();
        float* decayed = decayed_keys(token);
        for (long i = 0; i < shape.keys(); i++) {
            decayed[i] = key[i] * decays[i];
            to[i] *= decays[i];
        }
    }

    void decay(long token, const T* from) const {
        float* to = decays(token);
        long i = 0;
        for (; i + LANES <= shape.decays(); i += LANES)
            store(to + i, exp(softplus(load(from + i) + load(shape.bias + i)) * load(shape.rate + i)));
        for (; i < shape.decays(); i++) {
            const float x = widen(from[i]) + shape.bias[i];
            to[i] = std::exp((x > 20.0f ? x : std::log1p(std::exp(x))) * shape.rate[i]);
        }
    }

    static float unit(const float* x, long n) { return 1.0f / std::sqrt(dot(x, x, n) + 1e-6f); }
    static void scale(float* x, long n, float factor) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, load(x + i) * factor);
        for (; i < n; i++) x[i] *= factor;
    }

    // What reads the state before a token: its query and its key, times their decays if they have them.
    const float* query_of(long token, long key_head) const { return of(token) + key_head * shape.key_dim; }
    template <bool BY_KEY> const float* reading_key(long token, long key_head) const {
        return (BY_KEY ? decayed_keys(token) : of(token) + shape.keys()) + key_head * shape.key_dim;
    }

    // Outputs take the place of the values.
    template <bool BY_KEY> void recur(long segment, long head, long column) const {
        alignas(64) float tile[MOST_KEY_DIM * COLUMNS];
        const long dim = shape.key_dim, width = shape.value_dim, columns = std::min(COLUMNS, width - column);
        const long key_head = head / shape.repeats, stop = end(segment);
        float* state = states + (segments.slots[segment] * shape.value_heads() + head) * dim * width + column;
        long token = begin(segment);
        TileSums sums;
        if (continues(segment))
            sums = read_tile(state, width, columns, tile, dim, reading_key<BY_KEY>(token, key_head), query_of(token, key_head));
        else std::memset(tile, 0, dim * COLUMNS * sizeof(float));
        for (; token < stop; token++) {
            float* value = of(token) + 2 * shape.keys() + head * width + column;
            const vf strength = splat(strengths(token)[head]);
            if constexpr (!BY_KEY) {
                const vf decay = splat(decays(token)[head]);
                sums = {times(sums.known, decay), times(sums.read, decay)};
            }
            const float* key = of(token) + shape.keys() + key_head * dim;
            const Pair delta = times(load_pair(value, columns) - sums.known, strength);
            float output[COLUMNS];
            store(output, fma(delta, splat(products(token)[key_head]), sums.read));
            std::memcpy(value, output, columns * sizeof(float));
            const auto rows = [&] {
                if constexpr (BY_KEY) return RowDecays{decays(token) + head * dim};
                else return OneDecay{splat(decays(token)[head])};
            }();
            if (token + 1 < stop) {
                sums = advance(tile, dim, rows, key, delta, reading_key<BY_KEY>(token + 1, key_head), query_of(token + 1, key_head));
            } else {
                advance_into(tile, dim, rows, key, delta, state, width, columns);
            }
        }
    }

    // out = norm(outputs) * silu(gates), or * sigmoid(gates)
    void finish(long token) const {
        const long n = shape.value_dim;
        for (long h = 0; h < shape.value_heads(); h++) {
            const float* x = of(token) + 2 * shape.keys() + h * n;
            const T* gate = row(token) + shape.channels() + h * n;
            Out* to = out + token * shape.values() + h * n;
            const float factor = 1.0f / std::sqrt(dot(x, x, n) / n + shape.eps);
            long i = 0;
            for (; i + LANES <= n; i += LANES) {
                const vf g = load(gate + i);
                store(to + i, load(x + i) * factor * load(shape.norm + i) * (shape.sigmoid ? sigmoid(g) : silu(g)));
            }
            for (; i < n; i++) {
                const float g = widen(gate[i]);
                to[i] = narrow<Out>(x[i] * factor * shape.norm[i] * ((shape.sigmoid ? 1.0f : g) / (1.0f + std::exp(-g))));
            }
        }
    }
};
