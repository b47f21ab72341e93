// Mamba-1, in two halves between which there are products. First a convolution whose newest inputs are kept with each
// sequence's state. Then the recurrence: with S the state [state_size, channels], and for each token inputs x and steps in time
// d > 0 of all channels, and B and C [state_size]: S <- e^(rate d) S + B (d x)^T; output (C^T S + skip x) * silu(gates).
#pragma once
#include "recurrent.hpp"

struct KeptConvolution {
    const float* weight;  // [width, channels]
    const float* bias;    // [channels], or null
    long width, channels;
    long row_width;  // of projected rows, which begin with the channels
};

// All tokens of a step: out [tokens, channels] = silu(convolution).
template <class T> class KeptConvolutionStep : RecurrentPart<T> {
    using Base = RecurrentPart<T>;

    const KeptConvolution& shape;
    T* out;

    struct Activated {
        T* to;
        INLINE void operator()(long c, vf total) const { store(to + c, silu(total)); }
        INLINE void operator()(long c, float total) const { to[c] = narrow<T>(total / (1.0f + std::exp(-total))); }
    };

  public:
    KeptConvolutionStep(const KeptConvolution& shape, const Segments& segments, const T* projected, T* inputs, const T* zeros,
                        T* out)
        : Base{segments, 0, segments.bounds[segments.count], projected, shape.row_width, 0, shape.channels, shape.width, inputs,
               zeros, 0, segments.count - 1},
          shape(shape), out(out) {}

    // rows: [threads, width].
    void run(Team team, const T** rows) const {
        rows += team.index * shape.width;
        long from, to;
        team.share(Base::last, from, to);
        long segment = Base::segments.of(from);
        for (long token = from; token < to; token++) {
            while (token >= Base::segments.bounds[segment + 1]) segment++;
            for (long lag = 0; lag < shape.width; lag++)
                rows[lag] = Base::input(segment, token, token - Base::begin(segment), lag);
            convolve(rows, shape.width, shape.weight, shape.bias, shape.channels, Activated{out + token * shape.channels});
        }
        team.barrier();
        team.share(Base::segments.count, from, to);
        for (segment = from; segment < to; segment++) Base::keep_inputs(segment);
    }
};

struct Mamba1 {
    long channels, state_size;
    const float* rate;  // [state_size, channels], below 0
    const float* bias;  // [channels], of the steps in time
    const float* skip;  // [channels]

    // Of the projected rows: inputs, gates and steps in time of all channels; B, C.
    long projected() const { return 3 * channels + 2 * state_size; }
};

template <class T> class Mamba1Step {
    const Mamba1& shape;
    const Segments& segments;
    const T* projected;
    float* states;  // [slots, state_size, channels]
    T* out;         // [tokens, channels]

    static Pair load_some(const T* p, long columns) {
        if (columns == COLUMNS) return {load(p), load(p + LANES)};
        T part[COLUMNS] = {};
        std::memcpy(part, p, columns * sizeof(T));
        return {load(part), load(part + LANES)};
    }

    static void store_some(T* p, const Pair& x, long columns) {
        T part[COLUMNS];
        store(part, x.low);
        store(part + LANES, x.high);
        std::memcpy(p, part, columns * sizeof(T));
    }

    INLINE static vf advance(float* row, vf time, vf rate, vf added, vf key) {
        const vf next = fma(added, key, rounded(load(row) * exp(time * rate)));
        store(row, next);
        return next;
    }

    INLINE static vf gated(vf total, vf skip, vf x, vf gate) { return fma(x, skip, total) * silu(gate); }

    void recur(long segment, long column) const {
        alignas(64) float tile[MOST_KEY_DIM * COLUMNS];
        const long rows = shape.state_size, width = shape.channels, columns = std::min(COLUMNS, width - column);
        float* state = states + segments.slots[segment] * rows * width + column;
        const bool continues = segments.start(segment) > 0;
        if (!continues || columns < COLUMNS) std::memset(tile, 0, rows * COLUMNS * sizeof(float));
        if (continues)
            for (long i = 0; i < rows; i++) std::memcpy(tile + i * COLUMNS, state + i * width, columns * sizeof(float));
        const Pair skip = load_pair(shape.skip + column, columns), bias = load_pair(shape.bias + column, columns);
        const long last = segments.bounds[segment + 1];
        for (long token = segments.first(segment); token < last; token++) {
            const T* row = projected + token * shape.projected();
            const T *key = row + 3 * width, *query = key + rows;
            const Pair x = load_some(row + column, columns), gate = load_some(row + width + column, columns);
            Pair time = load_some(row + 2 * width + column, columns) + bias, total;
            time = {softplus(time.low), softplus(time.high)};
            const Pair added = {time.low * x.low, time.high * x.high};
            for (long i = 0; i < rows; i++) {
                float* at = tile + i * COLUMNS;
                const Pair rate = load_pair(shape.rate + i * width + column, columns);
                const vf k = splat(widen(key[i])), q = splat(widen(query[i]));
                total.low = fma(advance(at, time.low, rate.low, added.low, k), q, total.low);
                total.high = fma(advance(at + LANES, time.high, rate.high, added.high, k), q, total.high);
            }
            store_some(out + token * width + column,
                       {gated(total.low, skip.low, x.low, gate.low), gated(total.high, skip.high, x.high, gate.high)}, columns);
        }
        for (long i = 0; i < rows; i++) std::memcpy(state + i * width, tile + i * COLUMNS, columns * sizeof(float));
    }

  public:
    Mamba1Step(const Mamba1& shape, const Segments& segments, const T* projected, float* states, T* out)
        : shape(shape), segments(segments), projected(projected), states(states), out(out) {}

    // Each tile of every segment, by whichever thread comes first.
    void run(std::atomic<long>& next) const {
        const long tiles = (shape.channels + COLUMNS - 1) / COLUMNS, all = segments.count * tiles;
        for (long unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < all;)
            recur(unit / tiles, unit % tiles * COLUMNS);
    }
};
