// All blocks of a decoder of Llama's kind in one parallel region: no interpreter, no allocation between the operators.
//   x += output(attention(rotate(qkv(norm(x)))));  x += down(silu(gate(norm(x))) * up(norm(x)))
#pragma once
#include <algorithm>
#include <vector>

#include "float8_product.hpp"
#include "product.hpp"
#include "rows.hpp"
#include "step.hpp"

// A matrix as panels of the activations' type, or as codes.
struct StackMatrix {
    const void *panels, *bias;
    const CodeShape* codes;  // or null
};

struct StackLayer {
    const float *attention_norm, *mlp_norm;
    StackMatrix qkv, output, up, down;
    const float* qk_norm;  // [num_heads + num_kv_heads, head_dim], or null
    long rope, rotary;     // which of the step's rotations (-1: none), how much of a head they turn
    AttentionShape attention;
};

struct StackConfig {
    long num_layers, hidden, intermediate;
    float eps, qk_eps;
    const StackLayer* layers;
};

struct StackStep {
    long tokens, num_kept;
    void* hidden;             // [tokens, hidden]; overwritten
    const float* const* rotations;  // each [tokens, rotary], cos and sin side by side
    const int64_t* slots;     // [tokens]
    const int64_t* kept;      // [num_kept]: the rows that leave the last layer, or null: all
    void* const* caches;      // per layer
    void* out;                // [num_kept, hidden], if kept
    Paging paging;
};

template <class T> class Stack {
    const StackConfig& config;
    const StackStep& step;
    T* qkv;
    Input<T> *normed, *attended, *inner, *gathered;  // what products read
    float* values;
    Partial* parts;
    std::vector<Schedule> schedules;
    std::vector<std::atomic<long>> counters;
    static constexpr int COUNTERS = 5;

    char* code_space;  // of the rows of one product with codes

    static Matrix<T> plain(const StackMatrix& m, long outputs, long inputs) {
        return {static_cast<const T*>(m.panels), static_cast<const T*>(m.bias), outputs, inputs};
    }
    // out [rows, outputs] = x [rows, inputs] @ m.T (+ onto)
    void multiply(const StackMatrix& m, long outputs, long inputs, const Input<T>* x, long rows, T* out, const T* onto,
                  Team team, std::atomic<long>& next) const {
        if (!m.codes) return product<T, T>(plain(m, outputs, inputs), x, inputs, rows, out, onto, team, next);
        if (m.codes->is_float8) return float8_product<T, T>(CodeMatrix<T>(*m.codes), x, inputs, rows, out, onto, team, next);
        const auto codes = shared_code_rows<T>(*m.codes, x, inputs, rows, code_space, team);
        code_product<T, T>(CodeMatrix<T>(*m.codes), codes, rows, out, onto, team, next);
    }
    // inner [rows, intermediate] = silu(normed @ gate.T) * (normed @ up.T)
    void multiply_up(const StackMatrix& m, long rows, Team team, std::atomic<long>& next) const {
        if (!m.codes) {
            const auto matrix = plain(m, 2 * config.intermediate, config.hidden);
            return gated_product<T>(matrix, normed, config.hidden, rows, inner, team, next);
        }
        if (m.codes->is_float8)
            return gated_float8_product<T>(CodeMatrix<T>(*m.codes), normed, config.hidden, rows, inner, team, next);
        const auto codes = shared_code_rows<T>(*m.codes, normed, config.hidden, rows, code_space, team);
        gated_code_product<T>(CodeMatrix<T>(*m.codes), codes, rows, inner, team, next);
    }
    const Schedule& schedule(const AttentionShape& shape) const {
        for (const auto& s : schedules)
            if (s.serves(shape)) return s;
        __builtin_unreachable();
    }

  public:
    Stack(const StackConfig& config, const StackStep& step, Scratch& scratch)
        : config(config), step(step), counters(config.num_layers * COUNTERS) {
        long qkv_width = 0, attended_width = 0, shared_values = 0, shared_parts = 0;
        for (long i = 0; i < config.num_layers; i++) {
            const auto& shape = config.layers[i].attention;
            long width = (shape.heads + shape.kv_heads) * shape.key_dim + shape.kv_heads * shape.value_dim;
            qkv_width = width > qkv_width ? width : qkv_width;
            attended_width = shape.heads * shape.value_dim > attended_width ? shape.heads * shape.value_dim : attended_width;
            bool known = false;
            for (const auto& s : schedules) known = known || s.serves(shape);
            if (!known) schedules.emplace_back(shape, step.paging);
            const Schedule& plan = schedule(shape);
            shared_values = std::max(shared_values, plan.shared_values(shape));
            shared_parts = std::max(shared_parts, plan.shared_parts(shape));
        }
        long n = std::max(step.tokens, step.num_kept);
        size_t code_size = 0;
        for (long i = 0; i < config.num_layers; i++) {
            const auto& layer = config.layers[i];
            for (const auto* m : {&layer.qkv, &layer.output, &layer.up, &layer.down})
                if (m->codes && !m->codes->is_float8) code_size = std::max(code_size, code_rows_size<T>(n, *m->codes));
        }
        size_t size = sizeof(T) * n * qkv_width +
                      sizeof(Input<T>) * n * (config.hidden + 2 * attended_width + config.intermediate) +
                      sizeof(float) * shared_values + sizeof(Partial) * shared_parts + code_size + 9 * 64;
        char* at = scratch.of(size);
        normed = Scratch::take<Input<T>>(at, n * config.hidden);
        qkv = Scratch::take<T>(at, n * qkv_width);
        attended = Scratch::take<Input<T>>(at, n * attended_width);
        inner = Scratch::take<Input<T>>(at, n * config.intermediate);
        gathered = Scratch::take<Input<T>>(at, n * attended_width);
        values = Scratch::take<float>(at, shared_values);
        parts = Scratch::take<Partial>(at, shared_parts);
        code_space = Scratch::take<char>(at, code_size);
    }

    void run(Team team) {
        T* hidden = static_cast<T*>(step.hidden);
        long rows = step.tokens;
        for (long i = 0; i < config.num_layers; i++) {
            const StackLayer& layer = config.layers[i];
            attention(layer, i, hidden, team);
            const Input<T>* values_of_rows = attended;
            if (step.kept && i == config.num_layers - 1) {
                keep(layer, hidden, team);
                rows = step.num_kept;
                hidden = static_cast<T*>(step.out);
                values_of_rows = gathered;
            }
            long width = layer.attention.heads * layer.attention.value_dim;
            multiply(layer.output, config.hidden, width, values_of_rows, rows, hidden, hidden, team, counters[i * COUNTERS + 2]);
            team.barrier();
            norm(hidden, layer.mlp_norm, rows, layer.up, team);
            multiply_up(layer.up, rows, team, counters[i * COUNTERS + 3]);
            team.barrier();
            multiply(layer.down, config.hidden, config.intermediate, inner, rows, hidden, hidden, team, counters[i * COUNTERS + 4]);
            team.barrier();
        }
    }

  private:
    // For the product with `next`; whoever quantizes the rows first needs no others than its own.
    void norm(const T* x, const float* weight, long rows, const StackMatrix& next, Team team) {
        long first, last;
        team.share(rows, first, last);
        for (long r = first; r < last; r++) rms_norm(x + r * config.hidden, weight, config.eps, normed + r * config.hidden, config.hidden);
        if (!next.codes || next.codes->is_float8) team.barrier();
    }

    void attention(const StackLayer& layer, long index, const T* hidden, Team team) {
        const AttentionShape& shape = layer.attention;
        long query_width = shape.heads * shape.key_dim;
        long qkv_width = query_width + shape.row_width, first, last;
        norm(hidden, layer.attention_norm, step.tokens, layer.qkv, team);
        multiply(layer.qkv, qkv_width, config.hidden, normed, step.tokens, qkv, nullptr, team, counters[index * COUNTERS]);
        team.barrier();
        T* cache = static_cast<T*>(step.caches[index]);
        HeadLayout layout = {shape.heads + shape.kv_heads, shape.key_dim, layer.rotary, query_width,
                             qkv_width, layer.qk_norm, config.qk_eps};
        const float* turns = layer.rope < 0 ? nullptr : step.rotations[layer.rope];
        team.share(step.tokens, first, last);
        for (long r = first; r < last; r++)
            rotate_and_write(layout, qkv + r * qkv_width, turns ? turns + r * layer.rotary : nullptr, cache,
                             shape.row_width, step.slots[r]);
        team.barrier();
        const Schedule& plan = schedule(shape);
        AttentionStep<T, Input<T>> attend{shape, step.paging, plan, cache, qkv, qkv_width, attended, values, parts};
        team.attempt([&] { attend.run(counters[index * COUNTERS + 1]); });
        team.barrier();
        if (!plan.joins()) return;
        team.attempt([&] { attend.join_all(team); });
        team.barrier();
    }

    // What nobody wants leaves after the last attention.
    void keep(const StackLayer& layer, const T* hidden, Team team) {
        long width = layer.attention.heads * layer.attention.value_dim, first, last;
        team.share(step.num_kept, first, last);
        for (long r = first; r < last; r++) {
            std::memcpy(static_cast<T*>(step.out) + r * config.hidden, hidden + step.kept[r] * config.hidden, config.hidden * sizeof(T));
            std::memcpy(gathered + r * width, attended + step.kept[r] * width, width * sizeof(Input<T>));
        }
        team.barrier();
    }
};
