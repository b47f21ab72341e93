// Mamba-2. With S the state of a head [state_size, head_dim], and for each token an input x, a step in time d > 0, and B and
// C of the head's group: S <- e^(rate d) S + B (d x)^T; output C^T S + skip x; then gates, and perhaps a norm over groups.
#pragma once
#include "recurrent.hpp"

// What follows the recurrence: nothing, and outputs are float32; gates; norm(outputs * gates); norm(outputs) * gates.
enum Gating : long { APART, GATES, NORM_BEHIND_GATES, NORM_BEFORE_GATES };

struct Mamba2 {
    long heads, head_dim, groups, state_size, width;
    long first, heads_per_group;  // head h reads B and C of group (first + h) / heads_per_group
    const float* convolution;     // [width, channels]: x, B, C
    const float* convolution_bias;  // [channels], or null
    const float* rate;            // [heads], below 0
    const float* bias;            // [heads], of the steps in time
    const float* skip;            // [heads]
    float least, most;            // steps in time
    long gating;
    const float* norm;  // [values], or null
    long norm_groups;
    float eps;

    long values() const { return heads * head_dim; }
    long group_size() const { return groups * state_size; }
    long channels() const { return values() + 2 * group_size(); }
    // Of the projected rows: gates, channels, steps in time.
    long projected() const { return values() + channels() + heads; }
};

// At most MOST_RECURRENT_TOKENS tokens of a step, [first, last).
template <class T, class Out = T> class Mamba2Part : RecurrentPart<T> {
    using Base = RecurrentPart<T>;
    using Base::begin, Base::continues, Base::end, Base::first, Base::last, Base::row, Base::segments;

    const Mamba2& shape;
    float* states;  // [slots, heads, state_size, head_dim]
    float* mixed;   // for each token of the part: channels, decays, steps in time
    void* out;      // [tokens, values], float if gates are apart

  public:
    Mamba2Part(const Mamba2& shape, const Segments& segments, long first, long last, const T* projected, T* inputs,
               float* states, const T* zeros, float* mixed, void* out)
        : Base{segments, first, last, projected, shape.projected(), shape.values(), shape.channels(), shape.width, inputs,
               zeros, segments.of(first), segments.of(last - 1)},
          shape(shape), states(states), mixed(mixed), out(out) {}

    static long scratch_width(const Mamba2& shape) { return shape.channels() + 2 * shape.heads + COLUMNS; }

    void run(Team team, const T** rows, std::atomic<long>& next) const {
        long from, to;
        team.share(last - first, from, to);
        long segment = segments.of(first + from);
        for (long token = first + from; token < first + to; token++) {
            while (token >= segments.bounds[segment + 1]) segment++;
            mix(segment, token, rows + team.index * shape.width);
        }
        team.barrier();
        const long tiles = (shape.head_dim + COLUMNS - 1) / COLUMNS;
        Base::share(shape.heads * tiles, next,
                    [&](long segment, long unit) { recur(segment, unit / tiles, unit % tiles * COLUMNS); });
        team.barrier();
        for (long token = first + from; token < first + to; token++) finish(token);
    }

  private:
    float* of(long token) const { return mixed + (token - first) * scratch_width(shape); }
    float* decays(long token) const { return of(token) + shape.channels(); }
    float* times(long token) const { return decays(token) + shape.heads; }

    void mix(long segment, long token, const T** rows) const {
        Base::convolve_into(of(token), segment, token, rows, shape.convolution, shape.convolution_bias);
        const T* given = row(token) + shape.values() + shape.channels();
        for (long h = 0; h < shape.heads; h++) {
            const float x = widen(given[h]) + shape.bias[h];
            const float softplus = x > 20.0f ? x : std::log1p(std::exp(x));
            const float time = std::min(std::max(softplus, shape.least), shape.most);
            times(token)[h] = time;
            decays(token)[h] = std::exp(time * shape.rate[h]);
        }
    }

    // Outputs take the place of the inputs.
    void recur(long segment, long head, long column) const {
        alignas(64) float tile[MOST_KEY_DIM * COLUMNS];
        const long rows = shape.state_size, width = shape.head_dim, columns = std::min(COLUMNS, width - column);
        const long group = (shape.first + head) / shape.heads_per_group;
        float* state = states + (segments.slots[segment] * shape.heads + head) * rows * width + column;
        if (!continues(segment) || columns < COLUMNS) std::memset(tile, 0, rows * COLUMNS * sizeof(float));
        if (continues(segment))
            for (long i = 0; i < rows; i++) std::memcpy(tile + i * COLUMNS, state + i * width, columns * sizeof(float));
        const vf skip = splat(shape.skip[head]);
        for (long token = begin(segment); token < end(segment); token++) {
            float* value = of(token) + head * width + column;
            const float* key = of(token) + shape.values() + group * rows;
            const float* query = key + shape.group_size();
            const Pair x = load_pair(value, columns), added = ::times(x, splat(times(token)[head]));
            const vf decay = splat(decays(token)[head]);
            Pair even, odd;
            long i = 0;
            for (; i + 2 <= rows; i += 2) {
                even = fma(advance(tile + i * COLUMNS, decay, added, key[i]), splat(query[i]), even);
                odd = fma(advance(tile + (i + 1) * COLUMNS, decay, added, key[i + 1]), splat(query[i + 1]), odd);
            }
            if (i < rows) even = fma(advance(tile + i * COLUMNS, decay, added, key[i]), splat(query[i]), even);
            float output[COLUMNS];
            store(output, fma(x, skip, even + odd));
            std::memcpy(value, output, columns * sizeof(float));
        }
        for (long i = 0; i < rows; i++) std::memcpy(state + i * width, tile + i * COLUMNS, columns * sizeof(float));
    }

    INLINE static Pair advance(float* row, vf decay, const Pair& added, float key) {
        const Pair next = fma(added, splat(key), ::times(load_pair(row), decay));
        store(row, next);
        return next;
    }

    void finish(long token) const {
        const long n = shape.values();
        float* x = of(token);
        if (shape.gating == APART) {
            std::memcpy(static_cast<float*>(out) + token * n, x, n * sizeof(float));
            return;
        }
        const T* gate = row(token);
        Out* to = static_cast<Out*>(out) + token * n;
        if (shape.gating != NORM_BEFORE_GATES) multiply(x, gate, x, n);
        if (shape.gating != GATES) {
            const long size = n / shape.norm_groups;
            for (long g = 0; g < n; g += size) {
                const float factor = 1.0f / std::sqrt(dot(x + g, x + g, size) / size + shape.eps);
                long i = g;
                for (; i + LANES <= g + size; i += LANES) store(x + i, load(x + i) * factor * load(shape.norm + i));
                for (; i < g + size; i++) x[i] *= factor * shape.norm[i];
            }
        }
        if (shape.gating == NORM_BEFORE_GATES) multiply(x, gate, to, n);
        else convert(x, to, n);
    }

    // out = x * silu(gate)
    template <class To> static void multiply(const float* x, const T* gate, To* out, long n) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(out + i, load(x + i) * silu(load(gate + i)));
        for (; i < n; i++) {
            const float g = widen(gate[i]);
            out[i] = narrow<To>(x[i] * (g / (1.0f + std::exp(-g))));
        }
    }

    static void convert(const float* x, Out* out, long n) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(out + i, load(x + i));
        for (; i < n; i++) out[i] = narrow<Out>(x[i]);
    }
};
