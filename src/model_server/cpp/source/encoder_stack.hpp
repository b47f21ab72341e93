// All blocks of an encoder in one parallel region. With the norms behind the sums, as BERT has them:
//   x = norm(x + output(attention(qkv(x))));  x = norm(x + down(activation(up(x))))
// or before what is added, as ModernBERT has them:
//   x += output(attention(qkv(norm(x))));  x += down(activation(gate(norm(x))) * up(norm(x)))
#pragma once
#include <algorithm>
#include <vector>

#include "product.hpp"
#include "rows.hpp"
#include "step.hpp"

struct EncoderNorm {
    const float *weight, *bias;  // weight null: there is no norm; bias null: it has none
};

struct EncoderMatrix {
    const void *panels, *bias;
    long outputs, inputs;

    template <class T> Matrix<T> of() const {
        return {static_cast<const T*>(panels), static_cast<const T*>(bias), outputs, inputs};
    }
};

struct EncoderLayer {
    EncoderNorm attention_norm, mlp_norm;
    EncoderMatrix qkv, output, up, down;
    long rope, rotary;  // which of the step's rotations (-1: none), how much of a head they turn
    long paging;        // which of the step's
    AttentionShape attention;
};

struct EncoderConfig {
    long num_layers, hidden, intermediate;
    long norms_after, gated, activation;  // activation: see `with_activation`
    float eps;
    const EncoderLayer* layers;
};

struct EncoderStep {
    long tokens, num_pagings;
    void* hidden;                   // [tokens, hidden]; overwritten
    const float* const* rotations;  // each [tokens, rotary], cos and sin side by side
    const int64_t* slots;           // [tokens]
    void* const* caches;            // per layer
    const Paging* pagings;          // by the windows of layers
};

struct Gelu {
    static INLINE vf of(vf x) { return gelu(x); }
};
struct GeluTanh {
    static INLINE vf of(vf x) { return gelu_tanh(x); }
};
struct Relu {
    static INLINE vf of(vf x) { return relu(x); }
};
template <class F> void with_activation(long kind, const F& run) {
    if (kind == 0) run(Gelu{});
    else if (kind == 1) run(GeluTanh{});
    else if (kind == 2) run(Silu{});
    else run(Relu{});
}

template <class T> class EncoderStack {
    // Products read floats where there are no instructions for pairs of bfloat16: then norms give both.
    static constexpr bool READS_STREAM = std::is_same_v<T, Input<T>>;

    const EncoderConfig& config;
    const EncoderStep& step;
    std::vector<Schedule> schedules;  // by pagings
    std::vector<std::atomic<long>> counters;
    static constexpr int COUNTERS = 5;
    T* qkv;
    Input<T> *normed, *attended, *inner;
    long inner_pitch;
    float* values;
    Partial* parts;

  public:
    EncoderStack(const EncoderConfig& config, const EncoderStep& step, Scratch& scratch)
        : config(config), step(step), counters(config.num_layers * COUNTERS) {
        long qkv_width = 0, attended_width = 0, shared_values = 0, shared_parts = 0;
        for (long i = 0; i < step.num_pagings; i++) {
            const EncoderLayer *end = config.layers + config.num_layers;
            const EncoderLayer *user = std::find_if(config.layers, end, [&](const EncoderLayer& l) { return l.paging == i; });
            schedules.emplace_back((user == end ? config.layers : user)->attention, step.pagings[i]);
        }
        for (long i = 0; i < config.num_layers; i++) {
            const EncoderLayer& layer = config.layers[i];
            const Schedule& plan = schedules[layer.paging];
            qkv_width = std::max(qkv_width, layer.qkv.outputs);
            attended_width = std::max(attended_width, layer.output.inputs);
            shared_values = std::max(shared_values, plan.shared_values(layer.attention));
            shared_parts = std::max(shared_parts, plan.shared_parts(layer.attention));
        }
        const long n = step.tokens;
        inner_pitch = row_pitch<T>(config.intermediate);
        const bool is_apart = !config.norms_after || !READS_STREAM;
        char* at = scratch.of(sizeof(T) * n * qkv_width +
                              sizeof(Input<T>) * n * (is_apart * config.hidden + attended_width + inner_pitch) +
                              sizeof(float) * shared_values + sizeof(Partial) * shared_parts + 6 * 64);
        normed = Scratch::take<Input<T>>(at, is_apart * n * config.hidden);
        qkv = Scratch::take<T>(at, n * qkv_width);
        attended = Scratch::take<Input<T>>(at, n * attended_width);
        inner = Scratch::take<Input<T>>(at, n * inner_pitch);
        values = Scratch::take<float>(at, shared_values);
        parts = Scratch::take<Partial>(at, shared_parts);
        if constexpr (READS_STREAM)
            if (!is_apart) normed = static_cast<T*>(step.hidden);
    }

    void run(Team team) {
        T* hidden = static_cast<T*>(step.hidden);
        if (config.norms_after && !READS_STREAM) {
            over_rows(team, [&](long r) { convert(hidden + r * config.hidden, normed + r * config.hidden, config.hidden); });
            team.barrier();
        }
        for (long i = 0; i < config.num_layers; i++) {
            const EncoderLayer& layer = config.layers[i];
            std::atomic<long>* next = &counters[i * COUNTERS];
            if (!config.norms_after) norm_before(layer.attention_norm, hidden, team);
            product<T, T>(layer.qkv.of<T>(), normed, config.hidden, step.tokens, qkv, nullptr, team, next[0]);
            team.barrier();
            attention(layer, i, team, next[1]);
            product<T, T>(layer.output.of<T>(), attended, layer.output.inputs, step.tokens, hidden, hidden, team, next[2]);
            team.barrier();
            if (config.norms_after) norm_after(layer.attention_norm, hidden, team);
            else norm_before(layer.mlp_norm, hidden, team);
            multiply_up(layer.up.of<T>(), team, next[3]);
            team.barrier();
            product<T, T>(layer.down.of<T>(), inner, inner_pitch, step.tokens, hidden, hidden, team, next[4]);
            team.barrier();
            if (config.norms_after) norm_after(layer.mlp_norm, hidden, team);
        }
    }

  private:
    template <class F> void over_rows(Team team, const F& work) const {
        long first, last;
        team.share(step.tokens, first, last);
        for (long r = first; r < last; r++) work(r);
    }

    void norm_before(const EncoderNorm& norm, const T* hidden, Team team) const {
        over_rows(team, [&](long r) {
            const long at = r * config.hidden;
            if (norm.weight) layer_norm(hidden + at, norm.weight, norm.bias, config.eps, normed + at, config.hidden);
            else convert(hidden + at, normed + at, config.hidden);
        });
        team.barrier();
    }

    void norm_after(const EncoderNorm& norm, T* hidden, Team team) const {
        over_rows(team, [&](long r) {
            const long at = r * config.hidden;
            layer_norm(hidden + at, norm.weight, norm.bias, config.eps, hidden + at, config.hidden);
            if constexpr (!READS_STREAM) convert(hidden + at, normed + at, config.hidden);
        });
        team.barrier();
    }

    void multiply_up(const Matrix<T>& up, Team team, std::atomic<long>& next) const {
        with_activation(config.activation, [&](auto activation) {
            using F = decltype(activation);
            if (config.gated)
                return gated_product<T, F>(up, normed, config.hidden, step.tokens, inner, inner_pitch, team, next);
            Matrix<T> apart = up;
            apart.pitch = inner_pitch;
            auto work = [&](long row, long count, long first, long last, long distance) {
                multiply_activated<T, F>(apart, normed + row * config.hidden, config.hidden, count,
                                         inner + row * inner_pitch, first, last, distance);
            };
            Pieces(step.tokens, up.panel_count(), team.size, block_of_rows<T>(step.tokens, up.inputs)).take(next, team.size, step.tokens == 1 ? 4 : 2, work);
        });
    }

    void attention(const EncoderLayer& layer, long index, Team team, std::atomic<long>& next) {
        const AttentionShape& shape = layer.attention;
        const long query_width = shape.heads * shape.key_dim, qkv_width = layer.qkv.outputs;
        const HeadLayout layout = {shape.heads + shape.kv_heads, shape.key_dim, layer.rotary, query_width, qkv_width, nullptr, 0};
        const float* turns = layer.rope < 0 ? nullptr : step.rotations[layer.rope];
        T* cache = static_cast<T*>(step.caches[index]);
        over_rows(team, [&](long r) {
            rotate_and_write(layout, qkv + r * qkv_width, turns ? turns + r * layer.rotary : nullptr, cache, shape.row_width,
                             step.slots[r]);
        });
        team.barrier();
        const Schedule& plan = schedules[layer.paging];
        const AttentionStep<T, Input<T>> attend{shape, step.pagings[layer.paging], plan, cache, qkv, qkv_width, attended, values, parts};
        team.attempt([&] { attend.run(next, team.size); });
        team.barrier();
        if (!plan.joins()) return;
        team.attempt([&] { attend.join_all(team); });
        team.barrier();
    }
};
