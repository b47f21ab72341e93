// Attention over the paged cache: what is computed, the paging, and one query row against a span of keys (decode).
// Prompts: prompt.hpp.
//
// Keys are taken in spans that begin at multiples of SPAN, each reduced on its own and the spans joined in their order:
// a row's result depends neither on its neighbours nor on how spans were shared among threads.
#pragma once
#include "vectors.hpp"
#include "float8.hpp"
#include "matrix.hpp"

constexpr int SPAN = 256;
constexpr int FETCHED = 64;    // how many keys ahead memory is asked for, where nothing asked for them earlier
constexpr int MOST_HEADS = 8;  // query heads that are computed at once

struct AttentionShape {
    long heads, kv_heads, key_dim, value_dim;
    long value_offset, row_width;  // in a row of the cache: where values begin, how many numbers there are
    long window, chunk;            // 0: none
    float scale, softcap;          // softcap 0: none
    const float* slopes;           // ALiBi [heads], or null
    const float* sinks;            // [heads], or null
    long stored;                   // of the cache: 0: the query's type, 1: e4m3, 2: e5m2

    long group() const { return heads / kv_heads; }
    long first_visible(long position) const {
        if (window) return position + 1 > window ? position + 1 - window : 0;
        return chunk ? position - position % chunk : 0;
    }
    long value_at(long kv_head) const { return value_offset + kv_head * (value_offset ? value_dim : key_dim); }
};

struct Paging {
    const int32_t* tables;  // [sequences, max_blocks]
    const int32_t* lengths; // [sequences] keys, those of this step included
    const int32_t* starts;  // [sequences + 1] rows of the step
    long sequences, max_blocks, block_size;
    // Of each row of the step the last key that it sees, and in a layer with a window the first one if the window
    // says no earlier one (-1: as it says); null: itself. Neither decreases within a sequence; one with a single row sees up to itself.
    const int64_t *last_keys, *first_keys;
    // Of each sequence whether its one query is of its prompt, and computed as those of longer chunks are; null: of none.
    const uint8_t* single_prompts;

    bool decodes(long sequence) const {
        return starts[sequence + 1] - starts[sequence] == 1 && !(single_prompts && single_prompts[sequence]);
    }
    long last_seen(long row, long position) const { return last_keys ? last_keys[row] : position; }
    long first_seen(const AttentionShape& shape, long row, long position) const {
        long first = shape.first_visible(position);
        return first_keys && shape.window && first_keys[row] >= 0 ? std::min<long>(first, first_keys[row]) : first;
    }

    template <class T> void rows_of(const T* cache, long width, long sequence, long first, long count, const T** out) const {
        const int32_t* table = tables + sequence * max_blocks;
        for (long i = 0; i < count;) {
            long block = (first + i) / block_size, offset = (first + i) % block_size;
            const T* row = cache + (table[block] * block_size + offset) * width;
            for (; i < count && offset < block_size; offset++, i++, row += width) out[i] = row;
        }
    }
};

// The parts of a softmax over some of the keys: weights are relative to `peak`.
struct Partial {
    float peak, total;
};

// Dot products of `query` with LANES keys.
template <class T> INLINE vf dots(const T* query, const T* const* keys, long offset, long dim) {
    vf s[LANES];
    long d = 0;
    for (int j = 0; j < LANES; j++) s[j] = vf{};
    if constexpr (std::is_same_v<T, bf16>)
        for (; d + 2 * LANES <= dim; d += 2 * LANES) {
            vu q = load_pairs(query + d);
            for (int j = 0; j < LANES; j++) s[j] = dot_pairs(s[j], q, load_pairs(keys[j] + offset + d));
        }
    for (; d + LANES <= dim; d += LANES) {
        vf q = load(query + d);
        for (int j = 0; j < LANES; j++) s[j] = fma(q, load(keys[j] + offset + d), s[j]);
    }
    vf out = sums_of<LANES>(s);
    for (; d < dim; d++)
        for (int j = 0; j < LANES; j++) out[j] += widen(query[d]) * widen(keys[j][offset + d]);
    return out;
}

// Ask for the memory of `count` numbers of some rows: a cache's rows lie in blocks that no hardware foresees.
template <class T> INLINE void fetch(const T* const* rows, long first, long last, long offset, long count) {
    for (long k = first; k < last; k++)
        for (long at = 0; at < count * long(sizeof(T)); at += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(rows[k] + offset) + at, 0, 2);
}

// Where the key and the value of one KV head begin in its rows.
struct HeadPlaces {
    long key, value;
};

// Keys [first, last) of a sequence.
struct KeySpan {
    long sequence, first, last;
};

// Rows of the cache of at most SPAN keys, and how far the memory of some KV heads has been asked for: by who reads them,
// shortly before, or while something else is computed.
template <class C> struct SpanRows {
    const C* rows[SPAN];
    long keys = 0;  // 0: none
    HeadPlaces at = {};
    long key_numbers = 0, value_numbers = 0;  // of the heads in a row; no values where they are a part of the keys
    long asked = 0;
    float due = 0, pace = 0;  // of `advance`: keys that should have been asked for, and what one call adds

    void set(const AttentionShape& shape, const Paging& paging, const C* cache, KeySpan span, long kv_head, long heads) {
        keys = span.last - span.first;
        paging.rows_of(cache, shape.row_width, span.sequence, span.first, keys, rows);
        at = {kv_head * shape.key_dim, shape.value_at(kv_head)};
        key_numbers = heads * shape.key_dim;
        value_numbers = shape.value_offset ? heads * shape.value_dim : 0;
        asked = 0;
    }
    INLINE void ask(long end) {
        for (end = end < keys ? end : keys; asked < end; asked++) {
            fetch(rows, asked, asked + 1, at.key, key_numbers);
            fetch(rows, asked, asked + 1, at.value, value_numbers);
        }
    }
    // Ask for all by `calls` calls of `advance`.
    void spread(long calls) {
        due = float(asked);
        pace = float(keys - asked) / float(calls);
    }
    INLINE void advance() { ask(long(due += pace)); }
};

// The rows of one KV head in the query's type: those of the cache, or, if that is in 8 bits, decoded to `space`, which has
// as many numbers as `decoded_size` says.
template <class T, class C>
HeadPlaces decoded_rows(SpanRows<C>& stored, const AttentionShape& shape, long kv_head, T* space, const T** rows) {
    const HeadPlaces at = {kv_head * shape.key_dim, shape.value_at(kv_head)};
    if constexpr (std::is_same_v<T, C>) {
        std::memcpy(rows, stored.rows, stored.keys * sizeof(*rows));
        return at;
    } else {
        constexpr long AHEAD = 16;
        for (long k = 0; k < stored.keys; k++, space += shape.key_dim + shape.value_dim) {
            stored.ask(k + AHEAD);
            decode(stored.rows[k] + at.key, space, shape.key_dim);
            decode(stored.rows[k] + at.value, space + shape.key_dim, shape.value_dim);
            rows[k] = space;
        }
        return {0, shape.key_dim};
    }
}
template <class T, class C> long decoded_size(const AttentionShape& shape) {
    return std::is_same_v<T, C> ? 0 : SPAN * (shape.key_dim + shape.value_dim);
}

// From raw products to scores: scale, softcap, ALiBi. `distance`: key position - query position.
INLINE vf score(const AttentionShape& shape, long head, vf product, vf distance) {
    vf s = product * shape.scale;
    if (shape.softcap) s = tanh(s / shape.softcap) * shape.softcap;
    if (shape.slopes) s = fma(splat(shape.slopes[head]), distance, s);
    return s;
}

INLINE vf counting() { return __builtin_convertvector(COUNTING, vf); }

// Weighted values: out[h][d] = sum of weights[h][k] * values[k][d], for H heads and V vectors of the values from `d` on.
template <class T, int H, int V, class C>
INLINE void weigh(const float (*weights)[SPAN], const T* const* rows, long offset, long count, float* out, long dim,
                  SpanRows<C>& next) {
    vf sums[H][V] = {};
    for (long k = 0; k < count; k++) {
        if (V > 1 && k % LANES == 0) next.advance();
        vf values[V];
        for (int v = 0; v < V; v++) values[v] = load(rows[k] + offset + v * LANES);
        for (int h = 0; h < H; h++)
            for (int v = 0; v < V; v++) sums[h][v] = fma(splat(weights[h][k]), values[v], sums[h][v]);
    }
    for (int h = 0; h < H; h++)
        for (int v = 0; v < V; v++) store(out + h * dim + v * LANES, sums[h][v]);
}

template <class T, int H, class C>
void weigh_heads(const float (*weights)[SPAN], const T* const* rows, long offset, long count, float* out, long dim,
                 SpanRows<C>& next) {
    long d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<T, H, 4>(weights, rows, offset + d, count, out + d, dim, next);
    for (; d + LANES <= dim; d += LANES) weigh<T, H, 1>(weights, rows, offset + d, count, out + d, dim, next);
    for (; d < dim; d++)
        for (int h = 0; h < H; h++) {
            float total = 0;
            for (long k = 0; k < count; k++) total += weights[h][k] * widen(rows[k][offset + d]);
            out[h * dim + d] = total;
        }
}

// How often `attend_span` advances what is read next while it computes all heads of a KV head against some keys.
INLINE long calls_of_span(const AttentionShape& shape, long keys) {
    const long heads = shape.group(), weighings = (heads + 3) / 4 * (shape.value_dim / (4 * LANES));
    return (keys + LANES - 1) / LANES * (heads + weighings);
}

// `count` <= MOST_HEADS query heads from `head` on, which read one KV head, against `own`, the keys from `first` on of one
// span. next: what is read afterwards. out: [count, value_dim] weighted values, parts: [count]. space: see decoded_rows.
template <class T, class C>
void attend_span(const AttentionShape& shape, const T* query, long head, long count, long position, long first,
                 SpanRows<C>& own, SpanRows<C>& next, T* space, float* out, Partial* parts) {
    const T* rows[SPAN + LANES];
    float weights[MOST_HEADS][SPAN];
    const long keys = own.keys;
    auto [key_at, value_at] = decoded_rows(own, shape, head / shape.group(), space, rows);
    for (int i = 0; i < LANES; i++) rows[keys + i] = rows[keys - 1];  // what is computed too much is hidden below
    for (long h = 0; h < count; h++) {
        vf peaks = splat(-INFINITY);
        for (long k = 0; k < keys; k += LANES) {
            own.ask(k + LANES + FETCHED);
            next.advance();
            vf distance = counting() + float(first + k - position);
            vf s = score(shape, head + h, dots(query + h * shape.key_dim, rows + k, key_at, shape.key_dim), distance);
            s = choose(distance < float(first + keys - position), s, splat(-INFINITY));
            peaks = larger(peaks, s);
            store(weights[h] + k, s);
        }
        float peak = largest(peaks);
        vf totals = {};
        for (long k = 0; k < keys; k += LANES) {
            vf w = exp(load(weights[h] + k) - peak);
            totals = totals + w;
            store(weights[h] + k, w);
        }
        parts[h] = {peak, sum(totals)};
    }
    long h = 0;
    for (; h + 4 <= count; h += 4)
        weigh_heads<T, 4>(weights + h, rows, value_at, keys, out + h * shape.value_dim, shape.value_dim, next);
    float(*rest)[SPAN] = weights + h;
    float* to = out + h * shape.value_dim;
    if (count - h == 3) weigh_heads<T, 3>(rest, rows, value_at, keys, to, shape.value_dim, next);
    if (count - h == 2) weigh_heads<T, 2>(rest, rows, value_at, keys, to, shape.value_dim, next);
    if (count - h == 1) weigh_heads<T, 1>(rest, rows, value_at, keys, to, shape.value_dim, next);
}

// Join the parts of `spans` spans, in their order, to the result of one head. Of span s: values + s * stride and
// parts[s * part_stride]; factors: space for `spans` numbers.
template <class Out>
void join(const AttentionShape& shape, long head, const float* values, const Partial* parts, long spans, long stride,
          long part_stride, float* factors, Out* out) {
    float peak = shape.sinks ? shape.sinks[head] : -INFINITY, total = 0;
    for (long s = 0; s < spans; s++) peak = std::fmax(peak, parts[s * part_stride].peak);
    if (shape.sinks) total = std::exp(shape.sinks[head] - peak);
    for (long s = 0; s < spans; s++) {
        factors[s] = std::exp(parts[s * part_stride].peak - peak);
        total += parts[s * part_stride].total * factors[s];
    }
    for (long s = 0; s < spans; s++) factors[s] /= total;
    long d = 0;
    for (; d + LANES <= shape.value_dim; d += LANES) {
        vf x = {};
        for (long s = 0; s < spans; s++) x = fma(splat(factors[s]), load(values + s * stride + d), x);
        store(out + d, x);
    }
    for (; d < shape.value_dim; d++) {
        float x = 0;
        for (long s = 0; s < spans; s++) x += factors[s] * values[s * stride + d];
        out[d] = narrow<Out>(x);
    }
}
