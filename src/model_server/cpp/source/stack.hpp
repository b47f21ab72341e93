// All blocks of a decoder of Llama's kind in one parallel region: no interpreter, no allocation between the operators.
// Attention may have gates, and layers may have a mixer instead, which reads what `qkv` gives.
//   x += output(attention(rotate(qkv(norm(x)))));  x += down(silu(gate(norm(x))) * up(norm(x)))
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "adapters.hpp"
#include "float8_product.hpp"
#include "product.hpp"
#include "rows.hpp"
#include "stack_mixers.hpp"
#include "step.hpp"

// A matrix as panels of the activations' type, or as codes.
struct StackMatrix {
    const void *panels, *bias;
    const CodeShape* codes;          // or null
    const AdapterFactors* adapters;  // by their numbers, or null: none adds to it
    const StackMatrix* parts;        // matrices of the same inputs, one after another, that this is made of; or null
    long num_parts, outputs;         // of a part

    long count() const { return std::max(1L, num_parts); }
    const StackMatrix& part(long i) const { return num_parts ? parts[i] : *this; }
    bool has_code_rows() const { return codes && !codes->is_float8; }
};

struct StackLayer {
    const float *attention_norm, *mlp_norm;
    StackMatrix qkv, output, up, down;
    const float* qk_norm;  // [num_heads + num_kv_heads, head_dim], or null
    long rope, rotary;     // which of the step's rotations (-1: none), how much of a head they turn
    AttentionShape attention;
    StackMatrix gate;  // of what attention gives, or of no outputs
    StackMixer mixer;

    bool attends() const { return mixer.kind == ATTENTION; }
    bool has_gate() const { return gate.outputs || gate.num_parts; }
    // Of a token: what `qkv` gives, and what `output` reads.
    long inner() const {
        return attends() ? (attention.heads * attention.key_dim + attention.row_width) : mixer.inputs();
    }
    long attended() const { return attends() ? attention.heads * attention.value_dim : mixer.outputs(); }
    std::array<const StackMatrix*, 5> matrices() const { return {&qkv, &gate, &output, &up, &down}; }
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
    const int64_t* adapters;  // [tokens]: the number of each one's adapter, below 0: none; null: no token has one
    Paging paging;
    const StackPart* parts;  // of the layers with states
    long num_parts;
    const Segments* segments;      // of short convolutions
    const CachedInputs* cached;    // of these
    void* const* inputs;           // per layer: the newest inputs in its slots
    float* const* states;          // per layer: the states in its slots
};

template <class T> class Stack {
    const StackConfig& config;
    const StackStep& step;
    T *qkv, *gates;
    std::vector<std::atomic<long>> mixer_counters;
    MixerStep<T, Input<T>> mixers;
    Input<T> *normed, *attended, *inner, *gathered;  // what products read
    long normed_pitch, inner_pitch;
    float* values;
    Partial* parts;
    std::vector<Schedule> schedules;
    std::vector<std::atomic<long>> counters;  // see `counter`
    static constexpr int COUNTERS = 6;
    // Products with adapters go by blocks of so many rows, whose sums stay floats until all is added.
    static constexpr long BLOCK = 256, OWN_PANELS = 4;
    std::vector<AdapterGroups> groups, kept_groups;  // of each block
    float* sums;  // of each thread [BLOCK, OWN_PANELS * PANEL]
    Input<T>* shrunk;
    long shrunk_width = 0;
    long counted;  // counters of one layer

    char* code_space;  // of the rows of one product with codes

    static Matrix<T> plain(const StackMatrix& m, long outputs, long inputs) {
        return {static_cast<const T*>(m.panels), static_cast<const T*>(m.bias), outputs, inputs};
    }
    // Rows that products read, `pitch` apart.
    struct Read {
        const Input<T>* at;
        long pitch;
        Read from(long row) const { return {at + row * pitch, pitch}; }
    };
    // out [rows, outputs] = x [rows, inputs] @ m.T (+ onto); a counter for each part.
    void multiply(const StackMatrix& m, long outputs, long inputs, Read x, long rows, T* out, const T* onto, Team team,
                  std::atomic<long>* next) const {
        char* space = code_space;
        for (long i = 0; i < m.count(); i++) {
            const StackMatrix& part = m.part(i);
            const long width = m.num_parts ? part.outputs : outputs;
            multiply_part(part, width, outputs, inputs, x, rows, out, onto, space, team, next[i]);
            out += width;
            if (onto) onto += width;
            if (part.has_code_rows()) space += code_rows_size<T>(rows, *part.codes);
        }
    }
    // `pitch`: of rows of `out`; space: for the rows of a product with codes.
    void multiply_part(const StackMatrix& m, long outputs, long pitch, long inputs, Read x, long rows, T* out, const T* onto,
                       char* space, Team team, std::atomic<long>& next) const {
        if (!m.codes) {
            Matrix<T> matrix = plain(m, outputs, inputs);
            matrix.pitch = pitch;
            return product<T, T>(matrix, x.at, x.pitch, rows, out, onto, team, next);
        }
        const CodeMatrix<T> matrix(*m.codes, pitch);
        if (m.codes->is_float8) return float8_product<T, T>(matrix, x.at, x.pitch, rows, out, onto, team, next);
        const auto codes = shared_code_rows<T>(*m.codes, x.at, x.pitch, rows, space, team);
        code_product<T, T>(matrix, codes, rows, out, onto, team, next);
    }
    // inner [rows, intermediate] = silu(normed @ gate.T) * (normed @ up.T)
    void multiply_up(const StackMatrix& m, long rows, Team team, std::atomic<long>& next) const {
        if (!m.codes) {
            const auto matrix = plain(m, 2 * config.intermediate, config.hidden);
            return gated_product<T>(matrix, normed, normed_pitch, rows, inner, inner_pitch, team, next);
        }
        if (m.codes->is_float8)
            return gated_float8_product<T>(CodeMatrix<T>(*m.codes), normed, normed_pitch, rows, inner, team, next);
        const auto codes = shared_code_rows<T>(*m.codes, normed, normed_pitch, rows, code_space, team);
        gated_code_product<T>(CodeMatrix<T>(*m.codes), codes, rows, inner, team, next);
    }
    // The product after this one, whose adapters are asked for.
    struct Upcoming {
        const StackMatrix* matrix;  // or null
        long inputs;
        bool is_kept;
    };
    bool adapts(const StackMatrix& m) const { return step.adapters && m.adapters; }

    // x [rows, inputs] @ m.T and what adapters add to it, in floats of which a thread has a few panels at a time. Then
    // `finish(first row, rows, panel, sums, pitch)` for each panel; if the outputs are two halves, for each of the first
    // half, with that of the second behind it.
    template <class F>
    void multiply_adapted(const StackMatrix& m, long outputs, long inputs, Read x, bool is_kept, bool halves,
                          Team team, std::atomic<long>* next, const Upcoming& upcoming, const F& finish) const {
        const auto& blocks = is_kept ? kept_groups : groups;
        const long rows = is_kept ? step.num_kept : step.tokens;
        const long panels = ((halves ? outputs / 2 : outputs) + PANEL - 1) / PANEL;
        float* own = sums + team.index * BLOCK * OWN_PANELS * PANEL;
        for (long first = 0, i = 0; first < rows; first += BLOCK, i++) {
            const long count = std::min(BLOCK, rows - first);
            const Read from = x.from(first);
            shrink<T>(m.adapters, blocks[i], from.at, from.pitch, inputs, shrunk, shrunk_width, team);
            CodeRows<T> codes{};
            if (m.codes && !m.codes->is_float8) codes = shared_code_rows<T>(*m.codes, from.at, from.pitch, count, code_space, team);
            team.barrier();
            AdapterLines lines;
            const auto& later = upcoming.is_kept ? kept_groups : groups;
            if (i + 1 == long(blocks.size()) && !later.empty() && upcoming.matrix && adapts(*upcoming.matrix))
                lines.expect<T>(upcoming.matrix->adapters, later[0], upcoming.inputs, team);
            const long share = lines.expected() * team.size / panels + 1;  // of each panel
            auto add = [&](long row, long height, long p, float* to, long pitch) {
                expand<T>(m.adapters, blocks[i], row, row + height, shrunk, shrunk_width, p, to, outputs, pitch);
            };
            auto work = [&](long row, long height, long begin, long end, long distance) {
                const long pitch = (halves ? 2 : end - begin) * PANEL;
                auto want = [&](long first, long last) {
                    lines.clear();
                    if (m.codes) return lines.get();  // their tiles ask for nothing else
                    for (long p = first; p < last; p++) lines.add_panel<T>(m.adapters, blocks[i], row, row + height, p);
                    lines.add_expected(share * (last - first) / (halves ? 2 : 1));
                    return lines.get();
                };
                if (!halves) some_panels(m, outputs, inputs, from, codes, row, height, begin, end, distance, own, pitch, want(begin, end));
                for (long p = begin; p < end; p++) {
                    float* to = halves ? own : own + (p - begin) * PANEL;
                    if (halves) {
                        some_panels(m, outputs, inputs, from, codes, row, height, p, p + 1, distance, to, pitch, want(p, p + 1));
                        some_panels(m, outputs, inputs, from, codes, row, height, panels + p, panels + p + 1, distance,
                                    to + PANEL, pitch, want(panels + p, panels + p + 1));
                        add(row, height, panels + p, to + PANEL, pitch);
                    }
                    add(row, height, p, to, pitch);
                    finish(first + row, height, p, to, pitch);
                }
            };
            const long most_rows = codes.planes ? cached_rows(codes) : count;
            Pieces(count, panels, team.size, most_rows).take(next[i], team.size, count == 1 ? OWN_PANELS : 2, work);
            team.barrier();
        }
    }
    // Panels [first, last) of x @ m.T for some rows, in floats, of which rows are `pitch` apart.
    void some_panels(const StackMatrix& m, long outputs, long inputs, Read x, const CodeRows<T>& codes, long row,
                     long rows, long first, long last, long distance, float* out, long pitch, Lines lines) const {
        out -= first * PANEL;
        x = x.from(row);
        if (!m.codes) {
            Matrix<T> matrix = plain(m, outputs, inputs);
            matrix.pitch = pitch;
            return ::multiply<T, float>(matrix, x.at, x.pitch, rows, out, nullptr, first, last, distance, lines);
        }
        const CodeMatrix<T> matrix(*m.codes, pitch);
        if (m.codes->is_float8) return multiply_float8<T, float>(matrix, x.at, x.pitch, rows, out, nullptr, first, last);
        multiply_codes<T, float>(matrix, codes.from(row), rows, out, nullptr, first, last, distance);
    }
    // out [rows, outputs] = x @ m.T (+ onto), with adapters or without; ends at a barrier.
    void multiply_any(const StackMatrix& m, long outputs, long inputs, Read x, bool is_kept, T* out, const T* onto, Team team,
                      std::atomic<long>* next, const Upcoming& upcoming) const {
        if (!adapts(m)) {
            multiply(m, outputs, inputs, x, is_kept ? step.num_kept : step.tokens, out, onto, team, next);
            return team.barrier();
        }
        multiply_adapted(m, outputs, inputs, x, is_kept, false, team, next, upcoming, [&](long first, long count, long p, const float* of_panel, long pitch) {
            const long limit = std::min(long(PANEL), outputs - p * PANEL);
            for (long r = 0; r < count; r++) {
                const long at = (first + r) * outputs + p * PANEL;
                const float* sum = of_panel + r * pitch;
                if (limit == PANEL) {
                    const vf values[2] = {load(sum), load(sum + LANES)};
                    put(out + at, values, 2, 0, limit, static_cast<const T*>(nullptr), onto ? onto + at : nullptr);
                    continue;
                }
                for (long i = 0; i < limit; i++) out[at + i] = narrow<T>(onto ? sum[i] + widen(onto[at + i]) : sum[i]);
            }
        });
    }
    // inner [rows, intermediate] = silu(gate) * up, with adapters or without; ends at a barrier.
    void multiply_up_any(const StackMatrix& m, bool is_kept, Team team, std::atomic<long>* next, const Upcoming& upcoming) const {
        const long width = config.intermediate;
        if (!adapts(m)) {
            multiply_up(m, is_kept ? step.num_kept : step.tokens, team, *next);
            return team.barrier();
        }
        multiply_adapted(m, 2 * width, config.hidden, {normed, normed_pitch}, is_kept, true, team, next, upcoming,
                         [&](long first, long count, long p, const float* of_panel, long pitch) {
            for (long r = 0; r < count; r++) {
                const float* gate = of_panel + r * pitch;
                Input<T>* out = inner + (first + r) * inner_pitch + p * PANEL;
                for (int i = 0; i < PANEL; i += LANES) store(out + i, silu(load(gate + i)) * load(gate + PANEL + i));
            }
        });
    }
    const Schedule& schedule(const AttentionShape& shape) const {
        for (const auto& s : schedules)
            if (s.serves(shape)) return s;
        __builtin_unreachable();
    }

  public:
    Stack(const StackConfig& config, const StackStep& step, Scratch& scratch)
        : config(config), step(step) {
        long qkv_width = 0, attended_width = 0, gates_width = 0, shared_values = 0, shared_parts = 0;
        long channels = 0, taps = 0, mixed_width = 0;
        for (long i = 0; i < config.num_layers; i++) {
            const StackLayer& layer = config.layers[i];
            qkv_width = std::max(qkv_width, layer.inner());
            attended_width = std::max(attended_width, layer.attended());
            if (!layer.attends()) {
                channels = std::max(channels, layer.mixer.channels());
                taps = std::max(taps, layer.mixer.width());
                mixed_width = std::max(mixed_width, layer.mixer.scratch());
                continue;
            }
            const auto& shape = layer.attention;
            if (layer.has_gate()) gates_width = std::max(gates_width, layer.attended());
            bool known = false;
            for (const auto& s : schedules) known = known || s.serves(shape);
            if (!known) schedules.emplace_back(shape, step.paging);
            const Schedule& plan = schedule(shape);
            shared_values = std::max(shared_values, plan.shared_values(shape));
            shared_parts = std::max(shared_parts, plan.shared_parts(shape));
        }
        const long pieces = MixerStep<T, Input<T>>::pieces(step.parts, step.num_parts);
        mixer_counters = std::vector<std::atomic<long>>(config.num_layers * pieces);
        const long threads = parallel_function ? most_threads_function() : 1;
        const long mixed_size = std::min(step.tokens, MOST_RECURRENT_TOKENS) * mixed_width;
        long n = std::max(step.tokens, step.num_kept);
        if (step.adapters) {
            for (long first = 0; first < step.tokens; first += BLOCK)
                groups.emplace_back(step.adapters, nullptr, first, std::min(first + BLOCK, step.tokens));
            for (long first = 0; first < step.num_kept; first += BLOCK)
                kept_groups.emplace_back(step.adapters, step.kept, first, std::min(first + BLOCK, step.num_kept));
        }
        long most_parts = 1;
        for (long i = 0; i < config.num_layers; i++)
            for (const auto* m : config.layers[i].matrices())
                most_parts = std::max(most_parts, m->num_parts);
        counted = 1 + (COUNTERS - 1) * std::max<long>({most_parts, long(groups.size()), long(kept_groups.size())});
        counters = std::vector<std::atomic<long>>(config.num_layers * counted);
        size_t code_size = 0;
        for (long i = 0; i < config.num_layers; i++) {
            const auto& layer = config.layers[i];
            for (const auto* m : layer.matrices()) {
                size_t of_parts = 0;
                for (long j = 0; j < m->count(); j++)
                    if (m->part(j).has_code_rows()) of_parts += code_rows_size<T>(n, *m->part(j).codes);
                code_size = std::max(code_size, of_parts);
            }
            if (!step.adapters) continue;
            for (const auto* m : layer.matrices())
                for (const auto& block : groups)
                    if (m->adapters) shrunk_width = std::max(shrunk_width, block.width(m->adapters));
        }
        normed_pitch = row_pitch<T>(config.hidden);
        inner_pitch = row_pitch<T>(config.intermediate);
        // Products of codes write rows side by side: see `multiply_up`.
        for (long i = 0; i < config.num_layers; i++)
            if (config.layers[i].up.codes) inner_pitch = config.intermediate;
        const long adapted = std::min(n, BLOCK);
        const long own_sums = step.adapters ? BLOCK * OWN_PANELS * PANEL * threads : 0;
        size_t size = sizeof(T) * (n * (qkv_width + gates_width) + channels) + sizeof(T*) * threads * taps +
                      sizeof(float) * mixed_size +
                      sizeof(Input<T>) * n * (normed_pitch + 2 * attended_width + inner_pitch) +
                      sizeof(float) * shared_values + sizeof(Partial) * shared_parts + code_size +
                      sizeof(float) * own_sums + sizeof(Input<T>) * adapted * shrunk_width + 15 * 64;
        char* at = scratch.of(size);
        normed = Scratch::take<Input<T>>(at, n * normed_pitch);
        qkv = Scratch::take<T>(at, n * qkv_width);
        gates = Scratch::take<T>(at, n * gates_width);
        T* zeros = Scratch::take<T>(at, channels);
        std::memset(zeros, 0, channels * sizeof(T));
        const T** rows = Scratch::take<const T*>(at, threads * taps);
        float* mixed = Scratch::take<float>(at, mixed_size);
        mixers = {step.parts, step.num_parts, step.segments, step.cached, zeros, rows, mixed, nullptr};
        attended = Scratch::take<Input<T>>(at, n * attended_width);
        inner = Scratch::take<Input<T>>(at, n * inner_pitch);
        gathered = Scratch::take<Input<T>>(at, n * attended_width);
        values = Scratch::take<float>(at, shared_values);
        parts = Scratch::take<Partial>(at, shared_parts);
        code_space = Scratch::take<char>(at, code_size);
        sums = Scratch::take<float>(at, own_sums);
        shrunk = Scratch::take<Input<T>>(at, adapted * shrunk_width);
    }

    void run(Team team) {
        T* hidden = static_cast<T*>(step.hidden);
        long rows = step.tokens;
        for (long i = 0; i < config.num_layers; i++) {
            const StackLayer& layer = config.layers[i];
            project(layer, i, hidden, team);
            if (layer.attends()) attention(layer, i, team);
            else mix(layer, i, team);
            Read values_of_rows{attended, layer.attended()};
            const bool is_kept = step.kept && i == config.num_layers - 1;
            if (is_kept) {
                keep(layer, hidden, team);
                rows = step.num_kept;
                hidden = static_cast<T*>(step.out);
                values_of_rows.at = gathered;
            }
            multiply_any(layer.output, config.hidden, layer.attended(), values_of_rows, is_kept, hidden, hidden, team, counter(i, 1),
                         {&layer.up, config.hidden, is_kept});
            norm(hidden, layer.mlp_norm, rows, layer.up, team);
            multiply_up_any(layer.up, is_kept, team, counter(i, 2), {&layer.down, config.intermediate, is_kept});
            multiply_any(layer.down, config.hidden, config.intermediate, {inner, inner_pitch}, is_kept, hidden, hidden, team, counter(i, 3),
                         {i + 1 < config.num_layers ? &config.layers[i + 1].qkv : nullptr, config.hidden, false});
        }
    }

  private:
    // Of a product of a layer, for each of its blocks of rows, or its parts; the layer's last one is that of its attention.
    std::atomic<long>* counter(long layer, long product) {
        return &counters[layer * counted + product * ((counted - 1) / (COUNTERS - 1))];
    }

    // For the product with `next`; whoever quantizes the rows first needs no others than its own.
    void norm(const T* x, const float* weight, long rows, const StackMatrix& next, Team team) {
        long first, last;
        team.share(rows, first, last);
        for (long r = first; r < last; r++) rms_norm(x + r * config.hidden, weight, config.eps, normed + r * normed_pitch, config.hidden);
        if (!next.part(0).has_code_rows() || adapts(next)) team.barrier();
    }

    void project(const StackLayer& layer, long index, const T* hidden, Team team) {
        const Upcoming output{&layer.output, layer.attended(), step.kept && index == config.num_layers - 1};
        norm(hidden, layer.attention_norm, step.tokens, layer.qkv, team);
        multiply_any(layer.qkv, layer.inner(), config.hidden, {normed, normed_pitch}, false, qkv, nullptr, team, counter(index, 0),
                     layer.has_gate() ? Upcoming{&layer.gate, config.hidden, false} : output);
        if (layer.has_gate())
            multiply_any(layer.gate, layer.attended(), config.hidden, {normed, normed_pitch}, false, gates, nullptr, team, counter(index, 4), output);
    }

    void mix(const StackLayer& layer, long index, Team team) {
        MixerStep<T, Input<T>> own = mixers;
        own.counters = mixer_counters.data() + index * (mixer_counters.size() / config.num_layers);
        const bool is_cached = layer.mixer.kind == SHORT_CONVOLUTION;
        own.run(layer.mixer, qkv, is_cached ? step.caches[index] : step.inputs[index],
                is_cached ? nullptr : step.states[index], attended, team);
    }

    void attention(const StackLayer& layer, long index, Team team) {
        const AttentionShape& shape = layer.attention;
        const long query_width = shape.heads * shape.key_dim, qkv_width = layer.inner();
        long first, last;
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
        team.attempt([&] { attend.run(*counter(index, COUNTERS - 1), team.size); });
        team.barrier();
        if (plan.joins()) {
            team.attempt([&] { attend.join_all(team); });
            team.barrier();
        }
        if (!layer.has_gate()) return;
        for (long r = first; r < last; r++) gate(attended + r * layer.attended(), gates + r * layer.attended(), layer.attended());
        team.barrier();
    }

    // x *= sigmoid(gate)
    static void gate(Input<T>* x, const T* gate, long n) {
        long i = 0;
        for (; i + LANES <= n; i += LANES) store(x + i, load(x + i) * sigmoid(load(gate + i)));
        for (; i < n; i++) x[i] = narrow<Input<T>>(widen(x[i]) / (1.0f + std::exp(-widen(gate[i]))));
    }

    // What nobody wants leaves after the last attention.
    void keep(const StackLayer& layer, const T* hidden, Team team) {
        long width = layer.attended(), first, last;
        team.share(step.num_kept, first, last);
        for (long r = first; r < last; r++) {
            std::memcpy(static_cast<T*>(step.out) + r * config.hidden, hidden + step.kept[r] * config.hidden, config.hidden * sizeof(T));
            std::memcpy(gathered + r * width, attended + step.kept[r] * width, width * sizeof(Input<T>));
        }
        team.barrier();
    }
};
