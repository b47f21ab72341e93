// Attention of a run of queries of one sequence: blocks of keys and values are packed into panels once and multiplied
// with many query rows; the softmax is joined block by block (FlashAttention's online softmax, Dao et al. 2022).
#pragma once
#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "product.hpp"

constexpr int BLOCK_KEYS = 256;    // blocks begin at multiples of it
#if defined(TERCET_TILES)
constexpr int BLOCK_ROWS = 2 * TILE_HEIGHT;  // query rows that are multiplied at once
#else
// With 16 registers tiles of one panel throughout (matrix.hpp says why; measured here: 1.5 to 2.5 times as fast).
constexpr int BLOCK_ROWS = FEW_REGISTERS ? 2 * TILE_ROWS : TILE_ROWS;
#endif
constexpr int PROMPT_ROWS = 512;   // query rows (queries times heads) that share a packed block, about

// Weighted values are summed over keys filled up to a multiple of this with weights and values of zero.
template <class T> constexpr long VALUE_STEP = Packing<T>::STEP;
#if defined(TERCET_TILES)
template <> constexpr long VALUE_STEP<bf16> = TILE_INPUTS;
#endif

// What a panel has of a row beside each other, in the type that is multiplied: a number, or a pair.
template <class T, class Out> INLINE vu units(const T* x) {
    if constexpr (std::is_same_v<Out, bf16>) return load_pairs(x);
    else return (vu)load(x);
}

// Keys as a matrix with a column for each: panels of PANEL keys over their numbers. Columns from `count` on are zeros.
template <class T, class Out> void pack_keys(const T* const* rows, long offset, long dim, long count, Out* out) {
    constexpr int STEP = Packing<Out>::STEP, WIDE = LANES * STEP;
    for (long first = 0; first < (count + PANEL - 1) / PANEL * PANEL; first += LANES) {
        Out* to = out + first / PANEL * PANEL * dim + first % PANEL * STEP;
        long ahead = std::min(first + FETCHED, count), end = std::min(ahead + LANES, count);
        fetch(rows, ahead, end, offset, dim);
        long d = 0;
        for (; d + WIDE <= dim; d += WIDE) {
            vu square[LANES];
            for (int k = 0; k < LANES; k++)
                square[k] = first + k < count ? units<T, Out>(rows[first + k] + offset + d) : vu{};
            transpose(square);
            for (int i = 0; i < LANES; i++) std::memcpy(to + (d + i * STEP) * PANEL, &square[i], sizeof(vu));
        }
        for (; d < dim; d += STEP)
            for (int k = 0; k < LANES; k++) {
                Out* at = to + d * PANEL + k * STEP;
                if (first + k < count) convert<STEP>(rows[first + k] + offset + d, at);
                else std::memset(at, 0, STEP * sizeof(Out));
            }
    }
}

// Values as a matrix with a column for each of their numbers, over BLOCK_KEYS keys; zeros fill both up.
template <class T, class Out> void pack_values(const T* const* rows, long offset, long dim, long count, Out* out) {
    constexpr int STEP = Packing<Out>::STEP;
    long panels = (dim + PANEL - 1) / PANEL, used = (count + VALUE_STEP<Out> - 1) / VALUE_STEP<Out> * VALUE_STEP<Out>;
    for (long p = 0; p < panels; p++) {
        Out* to = out + p * PANEL * BLOCK_KEYS;
        long width = dim - p * PANEL < PANEL ? dim - p * PANEL : PANEL;
        for (long k = 0; k < used; k += STEP, to += PANEL * STEP) {
            const T* from[STEP];
            for (int s = 0; s < STEP; s++) from[s] = k + s < count ? rows[k + s] + offset + p * PANEL : nullptr;
            if (width < PANEL) {
                for (int s = 0; s < STEP; s++)
                    for (long c = 0; c < PANEL; c++) {
                        if (from[s] && c < width) convert<1>(from[s] + c, to + c * STEP + s);
                        else to[c * STEP + s] = Out{};
                    }
                continue;
            }
            vu both[2];
            if constexpr (STEP == 1) {
                for (int v = 0; v < 2; v++) both[v] = from[0] ? units<T, Out>(from[0] + v * LANES) : vu{};
            } else {
                vu a = from[0] ? load_pairs(from[0]) : vu{}, b = from[1] ? load_pairs(from[1]) : vu{};
                vu even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
                both[0] = __builtin_shuffle(even, odd, LOWER_LANES);
                both[1] = __builtin_shuffle(even, odd, UPPER_LANES);
            }
            std::memcpy(to, both, sizeof(both));
        }
    }
}

// A query row: where it is, and the first and last key that it sees.
struct RowReach {
    long position, first, last;
};

// Everything a product reads, in the type that it multiplies at once (see Packing).
template <class T> struct PromptTile {
    const AttentionShape& shape;
    T *keys, *values, *queries, *weights;
    float *scores, *sums;
    Partial* parts;
    long width;  // of `sums`: value_dim filled up to whole panels

    char* space;  // `space_size` bytes for who uses the tile

    PromptTile(const AttentionShape& shape, Scratch& scratch, long rows, size_t space_size) : shape(shape) {
        width = (shape.value_dim + PANEL - 1) / PANEL * PANEL;
        size_t size = sizeof(T) * (BLOCK_KEYS * (shape.key_dim + width) + rows * shape.key_dim + BLOCK_ROWS * BLOCK_KEYS) +
                      sizeof(float) * (BLOCK_ROWS * BLOCK_KEYS + rows * width) + sizeof(Partial) * rows + space_size + 8 * 64;
        char* at = scratch.of(size);
        keys = Scratch::take<T>(at, BLOCK_KEYS * shape.key_dim);
        values = Scratch::take<T>(at, BLOCK_KEYS * width);
        queries = Scratch::take<T>(at, rows * shape.key_dim);
        weights = Scratch::take<T>(at, BLOCK_ROWS * BLOCK_KEYS);
        scores = Scratch::take<float>(at, BLOCK_ROWS * BLOCK_KEYS);
        sums = Scratch::take<float>(at, rows * width);
        parts = Scratch::take<Partial>(at, rows);
        space = at;
    }

    // Rows [row, row + count): scores of the block's keys [0, used), the first of which is key `first`, softmax, weighted
    // values onto the sums.
    void block(long row, long count, const RowReach* reach, const long* heads, long first, long used) {
        long panels = (used + PANEL - 1) / PANEL, columns = panels * PANEL, p = 0;
        const T* q = queries + row * shape.key_dim;
        for (; !FEW_REGISTERS && p + 2 <= panels; p += 2) {
            const T* const pair[2] = {keys + p * PANEL * shape.key_dim, keys + (p + 1) * PANEL * shape.key_dim};
            tiles<T, 2>(q, shape.key_dim, count, pair, shape.key_dim, [&](long r, vf(&s)[4]) {
                for (int v = 0; v < 4; v++) store(scores + r * BLOCK_KEYS + p * PANEL + v * LANES, s[v]);
            });
        }
        for (; p < panels; p++) {
            const T* const one[1] = {keys + p * PANEL * shape.key_dim};
            tiles<T, 1>(q, shape.key_dim, count, one, shape.key_dim, [&](long r, vf(&s)[2]) {
                for (int v = 0; v < 2; v++) store(scores + r * BLOCK_KEYS + p * PANEL + v * LANES, s[v]);
            });
        }
        for (long r = 0; r < count; r++) soften(row + r, r, reach[r], heads[r], first, columns);
        long total = (used + VALUE_STEP<T> - 1) / VALUE_STEP<T> * VALUE_STEP<T>, all = width / PANEL;
        for (p = 0; !FEW_REGISTERS && p + 2 <= all; p += 2) {
            const T* const pair[2] = {values + p * PANEL * BLOCK_KEYS, values + (p + 1) * PANEL * BLOCK_KEYS};
            tiles<T, 2>(weights, BLOCK_KEYS, count, pair, total, [&](long r, vf(&s)[4]) {
                float* to = sums + (row + r) * width + p * PANEL;
                for (int v = 0; v < 4; v++) store(to + v * LANES, load(to + v * LANES) + s[v]);
            });
        }
        for (; p < all; p++) {
            const T* const one[1] = {values + p * PANEL * BLOCK_KEYS};
            tiles<T, 1>(weights, BLOCK_KEYS, count, one, total, [&](long r, vf(&s)[2]) {
                float* to = sums + (row + r) * width + p * PANEL;
                for (int v = 0; v < 2; v++) store(to + v * LANES, load(to + v * LANES) + s[v]);
            });
        }
    }

    // The scores of one row become weights; its sums and total are brought to the new peak.
    void soften(long row, long r, const RowReach& reach, long head, long first, long columns) {
        float* s = scores + r * BLOCK_KEYS;
        long position = reach.position;
        float lowest = float(reach.first - position), highest = float(reach.last - position);
        vf peaks = splat(-INFINITY);
        for (long k = 0; k < columns; k += LANES) {
            vf distance = counting() + float(first + k - position);
            vf x = score(shape, head, load(s + k), distance);
            x = choose((distance <= highest) & (distance >= lowest), x, splat(-INFINITY));
            peaks = larger(peaks, x);
            store(s + k, x);
        }
        Partial& part = parts[row];
        float peak = std::fmax(part.peak, largest(peaks));
        vf totals = {};
        float floor = peak == -INFINITY ? 0.0f : peak;  // nothing seen yet: weights of 0, not of NaN
        for (long k = 0; k < columns; k += LANES) {
            vf w = exp(load(s + k) - floor);
            totals = totals + w;
            store(weights + r * BLOCK_KEYS + k, w);
        }
        if (peak != part.peak) {
            float factor = std::exp(part.peak - floor);
            part.total *= factor;
            for (long d = 0; d < width; d += LANES) {
                float* to = sums + row * width + d;
                store(to, load(to) * factor);
            }
        }
        part = {peak, part.total + sum(totals)};
    }
};

// `count` queries of a sequence from `start` (of its step's queries) on, the heads of one KV head. query and out: rows of
// the whole step, `query_stride` and heads * value_dim apart.
template <class T, class Out, class C>
void attend_prompt(const AttentionShape& shape, const Paging& paging, const C* cache, long sequence, long start,
                   long count, long kv_head, const T* query, long query_stride, Out* out, Scratch& scratch) {
    long group = shape.group(), rows = count * group, dim = shape.key_dim;
    long token = paging.starts[sequence] + start;
    long position = paging.lengths[sequence] - (paging.starts[sequence + 1] - paging.starts[sequence]) + start;
    PromptTile<Input<T>> tile(shape, scratch, rows, decoded_size<T, C>(shape) * sizeof(T));
    T* space = reinterpret_cast<T*>(tile.space);
    for (long i = 0; i < count; i++)
        convert(query + (token + i) * query_stride + kv_head * group * dim, tile.queries + i * group * dim, group * dim);
    std::memset(tile.sums, 0, rows * tile.width * sizeof(float));
    for (long r = 0; r < rows; r++) tile.parts[r] = {-INFINITY, 0};
    const T* at[BLOCK_KEYS];
    SpanRows<C> stored;
    auto reach_of = [&](long i) {
        return RowReach{position + i, paging.first_seen(shape, token + i, position + i),
                        paging.last_seen(token + i, position + i)};
    };
    long end = reach_of(count - 1).last + 1, lowest = reach_of(0).first;
    for (long first = lowest / BLOCK_KEYS * BLOCK_KEYS; first < end; first += BLOCK_KEYS) {
        // Keys before the first query's reach may hold anything by now: they are not read.
        long from = first < lowest ? lowest - first : 0;
        long keys = end - first < BLOCK_KEYS ? end - first : BLOCK_KEYS;
        stored.set(shape, paging, cache, {sequence, first + from, first + keys}, kv_head, 1);
        auto [key_at, value_at] = decoded_rows(stored, shape, kv_head, space, at + from);
        for (long k = 0; k < from; k++) at[k] = at[from];
        fetch(at, 0, keys < FETCHED ? keys : FETCHED, key_at, dim);
        pack_keys(at, key_at, dim, keys, tile.keys);
        pack_values(at, value_at, shape.value_dim, keys, tile.values);
        for (long row = 0; row < rows; row += BLOCK_ROWS) {
            long height = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
            long last = reach_of((row + height - 1) / group).last;
            if (last < first || reach_of(row / group).first >= first + keys) continue;
            RowReach reach[BLOCK_ROWS];
            long heads[BLOCK_ROWS];
            for (long r = 0; r < height; r++) {
                reach[r] = reach_of((row + r) / group);
                heads[r] = kv_head * group + (row + r) % group;
            }
            tile.block(row, height, reach, heads, first, last + 1 - first < keys ? last + 1 - first : keys);
        }
    }
    long width = shape.heads * shape.value_dim;
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group + r % group;
        Out* to = out + (token + r / group) * width + head * shape.value_dim;
        float factor;
        join(shape, head, tile.sums + r * tile.width, tile.parts + r, 1, 0, 0, &factor, to);
    }
}
