// The C interface: pointers to torch's memory, called through ctypes. `type`: 0 float32, 1 bfloat16. Operators return 0,
// or 1 where there was no memory for their own scratch: their output is then worth nothing.
#include <algorithm>
#include <vector>

#include "adapters.hpp"
#include "codes.hpp"
#include "encoder_stack.hpp"
#include "float8_product.hpp"
#include "gated_delta.hpp"
#include "mamba1.hpp"
#include "mamba2.hpp"
#include "product.hpp"
#include "rows.hpp"
#include "sampling.hpp"
#include "stack.hpp"

ParallelFunction parallel_function = nullptr;
int (*thread_number_function)() = nullptr;
int (*team_size_function)() = nullptr;
int (*most_threads_function)() = nullptr;

namespace {
// Rows are shared among threads only if there is work for them: a wake-up costs as much as some 10,000 numbers.
constexpr long SMALLEST_SHARED = 16384;

template <class F> void over_rows(long rows, long width, const F& work) {
    int limit = int(std::min<long>(rows, 1 + rows * width / SMALLEST_SHARED));
    parallel([&](Team team) {
        long first, last;
        team.share(rows, first, last);
        for (long r = first; r < last; r++) work(r);
    }, limit);
}

// As many threads as there are, up to `limit`.
int most_threads(long limit) {
    const long all = parallel_function ? most_threads_function() : 1;
    return int(std::max(1L, std::min(all, limit)));
}

// A recurrent layer's step in parts; numbers: of a sequence's state.
template <class Part, class T, class Shape, class Out>
void recurrent(const Shape& shape, const Segments& segments, long numbers, const void* projected, void* inputs, float* states,
               Out* out) {
    static thread_local Scratch scratch;
    const long tokens = segments.bounds[segments.count], most = std::min(tokens, MOST_RECURRENT_TOKENS);
    const int threads = most_threads(1 + most * numbers / (4 * SMALLEST_SHARED));
    const long values = most * Part::scratch_width(shape);
    char* at = scratch.of(shape.channels() * sizeof(T) + threads * shape.width * sizeof(T*) + values * sizeof(float) + 192);
    T* zeros = Scratch::take<T>(at, shape.channels());
    std::memset(zeros, 0, shape.channels() * sizeof(T));
    const T** rows = Scratch::take<const T*>(at, threads * shape.width);
    float* mixed = Scratch::take<float>(at, values);
    for (long first = 0; first < tokens; first += MOST_RECURRENT_TOKENS) {
        const Part part(shape, segments, first, std::min(tokens, first + MOST_RECURRENT_TOKENS),
                        static_cast<const T*>(projected), static_cast<T*>(inputs), states, zeros, mixed, out);
        std::atomic<long> next{0};
        parallel([&](Team team) { part.run(team, rows, next); }, threads);
    }
}

// As many rows are quantized at once.
constexpr long MOST_CODE_ROWS = 1024;

constexpr long DONE = 0, NO_MEMORY = 1;

// No exception may leave for Python: it would end the process.
template <class F> long status_of(const F& run) {
    try {
        run();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

template <class F> long with_type(long type, const F& run) {
    return status_of([&] {
        if (type == 0) run(float{});
        else run(bf16{});
    });
}

template <class T, class C>
void attend(const AttentionShape& shape, const Paging& paging, const void* cache, const void* query, long query_stride,
            void* out) {
    Schedule plan(shape, paging);
    std::vector<float> values(plan.shared_values(shape));
    std::vector<Partial> parts(plan.shared_parts(shape));
    AttentionStep<T, T, C> step{shape, paging, plan, static_cast<const C*>(cache), static_cast<const T*>(query),
                                query_stride, static_cast<T*>(out), values.data(), parts.data()};
    std::atomic<long> next{0};
    parallel([&](Team team) {
        team.attempt([&] { step.run(next, team.size); });
        team.barrier();
        if (plan.joins()) team.attempt([&] { step.join_all(team); });
    });
}
}  // namespace

extern "C" {

// A hash of what this library was built from (instruction_sets.py).
long cpp_sources() { return TERCET_SOURCES; }

// Ask the operating system for what the instructions need; 1: it does not let this process use them.
long cpp_prepare() { return may_use_tiles() ? 0 : 1; }

void cpp_init(void* parallel_pointer, void* number, void* size, void* most) {
    parallel_function = reinterpret_cast<ParallelFunction>(parallel_pointer);
    thread_number_function = reinterpret_cast<int (*)()>(number);
    team_size_function = reinterpret_cast<int (*)()>(size);
    most_threads_function = reinterpret_cast<int (*)()>(most);
}

long cpp_panel() { return PANEL; }

// Products of at least so many rows use tiles, where this library has them; the results are the same.
long cpp_set_tile_rows([[maybe_unused]] long rows) {
#if defined(TERCET_TILES)
    fewest_tile_rows = rows;
#endif
    return DONE;
}

// Products by tiles keep so many bytes of rows in the second-level cache; the results are the same.
long cpp_set_tile_cache([[maybe_unused]] long bytes) {
#if defined(TERCET_TILES)
    tile_cache_bytes = bytes;
#endif
    return DONE;
}

// weight [outputs, inputs] -> out [outputs filled up to whole panels, inputs].
long cpp_pack(long type, const void* weight, void* out, long outputs, long inputs) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        parallel([&](Team team) {
            long first, last;
            team.share((outputs + PANEL - 1) / PANEL, first, last);
            pack(static_cast<const T*>(weight), static_cast<T*>(out), outputs, inputs, first, last);
        });
    });
}

// out [rows, outputs] = x @ matrix.T + bias; float32 whatever the type if `wide`.
long cpp_linear(long type, const void* panels, const void* bias, long outputs, long inputs, const void* x, long stride,
                   long rows, void* out, long wide) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        Matrix<T> m = {static_cast<const T*>(panels), static_cast<const T*>(bias), outputs, inputs};
        // A product of few numbers is over before a second thread has woken up.
        int limit = outputs * inputs < 4 * SMALLEST_SHARED ? 1 : 1 << 30;
        const long block = std::is_same_v<Input<T>, T> ? rows : MOST_CONVERTED;
        for (long first = 0; first < rows; first += block) {
            std::atomic<long> next{0};
            const T* from = static_cast<const T*>(x) + first * stride;
            const long count = std::min(block, rows - first), done = first * outputs;
            parallel([&](Team team) {
                if (wide) product<T, float>(m, from, stride, count, static_cast<float*>(out) + done, nullptr, team, next);
                else product<T, T>(m, from, stride, count, static_cast<T*>(out) + done, nullptr, team, next);
            }, limit);
        }
    });
}

// out[r][k] = sum over heads of weights[r][h] * max(0, queries[r][h] . key k), of keys packed as a matrix [keys, inputs].
long cpp_index_scores(long type, const void* panels, long keys, long inputs, const void* queries, const float* weights,
                      long heads, long rows, float* out) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        constexpr long RUN = 16;  // panels that a thread takes at once
        const Matrix<T> m = {static_cast<const T*>(panels), nullptr, keys, inputs};
        const long runs = (m.panel_count() + RUN - 1) / RUN;
        std::atomic<long> next{0};
        parallel([&](Team team) {
            alignas(64) float sums[RUN * PANEL];
            for (long item; (item = next.fetch_add(1, std::memory_order_relaxed)) < rows * runs;) {
                const long row = item / runs, first = item % runs * RUN, last = std::min(first + RUN, m.panel_count());
                const T* query = static_cast<const T*>(queries) + row * heads * inputs;
                long stride = inputs;
                const Input<T>* x = nullptr;
                team.attempt([&] { x = rows_as_input<T>(query, stride, heads, inputs); });
                if (!x) return;
                std::memset(sums, 0, sizeof(sums));
                over_panels(m, x, stride, heads, first, last, 0, Lines{NO_LINES, NO_LINES},
                            [&](long head, long column, const vf* products, int count) {
                    float* to = sums + column - first * PANEL;
                    const vf weight = splat(weights[row * heads + head]);
                    for (int v = 0; v < count; v++, to += LANES)
                        store(to, fma(weight, larger(products[v], vf{}), load(to)));
                });
                const long columns = std::min((last - first) * PANEL, keys - first * PANEL);
                std::memcpy(out + row * keys + first * PANEL, sums, columns * sizeof(float));
            }
        }, keys * inputs * heads * rows < 4 * SMALLEST_SHARED ? 1 : 1 << 30);
    });
}

// out[r][h] = x[r][h] @ matrix[h].T for each of `heads` matrices [outputs, inputs], packed one after another. Strides:
// from a row or a head of x, and of out, to the next.
long cpp_head_linear(long type, const void* panels, long heads, long outputs, long inputs, const void* x, long x_row,
                     long x_head, long rows, void* out, long out_row, long out_head) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long of_head = (outputs + PANEL - 1) / PANEL;
        int limit = heads * outputs * inputs < 4 * SMALLEST_SHARED ? 1 : 1 << 30;
        for (long first = 0; first < rows; first += MOST_CONVERTED) {
            std::atomic<long> next{0};
            const T* from = static_cast<const T*>(x) + first * x_row;
            T* to = static_cast<T*>(out) + first * out_row;
            const long count = std::min(MOST_CONVERTED, rows - first);
            parallel([&](Team team) {
                auto work = [&](long row, long some, long begin, long end, long) {
                    for (long stop; begin < end; begin = stop) {
                        const long head = begin / of_head, start = head * of_head;
                        stop = std::min(end, start + of_head);
                        const T* own = static_cast<const T*>(panels) + start * PANEL * inputs;
                        const Matrix<T> m = {own, nullptr, outputs, inputs, out_row};
                        long stride = x_row;
                        const Input<T>* given = nullptr;
                        team.attempt([&] {
                            given = rows_as_input<T>(from + row * x_row + head * x_head, stride, some, inputs);
                        });
                        if (!given) return;
                        multiply<T, T>(m, given, stride, some, to + row * out_row + head * out_head, nullptr,
                                       begin - start, stop - start, 0);
                    }
                };
                Pieces(count, of_head * heads, team.size, count).take(next, team.size, of_head, work);
            }, limit);
        }
    });
}

// How scales and offsets [outputs, groups] (offsets: null if the matrix has none) are kept exactly in the fewest bytes.
long cpp_number_kind(const CodeShape* m, const float* scales, const float* offsets) {
    std::atomic<bool> can_be[3] = {{true}, {true}, {true}};
    parallel([&](Team team) {
        long first, last;
        team.share(m->outputs, first, last);
        for (const NumberKind kind : {HALVES, STEPS})
            for (const float* numbers : {scales, offsets})
                if (numbers && can_be[kind] && !can_keep(*m, kind, numbers, first, last)) can_be[kind] = false;
    });
    return can_be[HALVES] ? HALVES : can_be[STEPS] ? STEPS : FLOATS;
}

// codes [outputs, columns] of bytes, or of 4 bits [outputs, columns / 2], -> out, `cpp_code_bytes` of zeros. offsets: null
// if the matrix has none.
long cpp_pack_codes(const CodeShape* m, const uint8_t* codes, const float* scales, const uint8_t* zeros, const float* offsets,
                    uint8_t* out) {
    return status_of([&] {
        parallel([&](Team team) {
            long first, last;
            team.share(m->panel_count(), first, last);
            pack_codes(*m, codes, scales, zeros, offsets, out, first, last);
        });
    });
}

// weight [outputs, columns * bits / 8] of e4m3 or of codes of a table, for activations of the type.
long cpp_pack_float8(long type, const CodeShape* m, const uint8_t* weight, const float* scales, uint8_t* out) {
    return with_type(type, [&](auto zero) {
        parallel([&](Team team) {
            long first, last;
            team.share(m->panel_count(), first, last);
            pack_float8<decltype(zero)>(*m, weight, scales, out, first, last);
        });
    });
}

long cpp_code_bytes(const CodeShape* m) { return m->panel_count() * m->panel_bytes(); }

// cpp_linear with a matrix of codes.
long cpp_code_linear(long type, const CodeShape* shape, const void* x, long stride, long rows, void* out, long wide) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const CodeMatrix<T> m(*shape);
        const int limit = m.outputs * m.columns < 4 * SMALLEST_SHARED ? 1 : 1 << 30;
        const long block = !m.is_float8 ? MOST_CODE_ROWS : std::is_same_v<Input<T>, T> ? rows : MOST_CONVERTED;
        for (long first = 0; first < rows; first += block) {
            std::atomic<long> next{0};
            const T* from = static_cast<const T*>(x) + first * stride;
            const long count = std::min(block, rows - first), done = first * m.outputs;
            char* space = scratch.of(m.is_float8 ? 0 : code_rows_size<T>(count, m));
            auto run = [&](auto* to, Team team) {
                if (m.is_float8) return float8_product<T>(m, from, stride, count, to, decltype(to)(nullptr), team, next);
                const auto codes = shared_code_rows<T>(m, from, stride, count, space, team);
                code_product<T>(m, codes, count, to, decltype(to)(nullptr), team, next);
            };
            parallel([&](Team team) {
                if (wide) run(static_cast<float*>(out) + done, team);
                else run(static_cast<T*>(out) + done, team);
            }, limit);
        }
    });
}

// out = norm(x) [rows, n], each row with weight row (r % heads); with `added`, x += added first.
long cpp_rms_norm(long type, void* x, const void* added, const float* weight, long heads, float eps, void* out, long rows,
                     long n) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        over_rows(rows, n, [&](long r) {
            T* row = static_cast<T*>(x) + r * n;
            if (added) add(row, static_cast<const T*>(added) + r * n, n);
            rms_norm(row, weight + (r % heads) * n, eps, static_cast<T*>(out) + r * n, n);
        });
    });
}

// out [rows, n] = silu(gate_up[:, :n]) * gate_up[:, n:]
long cpp_silu_gated(long type, const void* gate_up, void* out, long rows, long n) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        over_rows(rows, 4 * n, [&](long r) {
            const T* gate = static_cast<const T*>(gate_up) + r * 2 * n;
            silu_gated(gate, gate + n, static_cast<T*>(out) + r * n, n);
        });
    });
}

long cpp_rotate_write(long type, void* qkv, const HeadLayout* layout, const float* turns, void* cache, long row_width,
                         const int64_t* slots, long rows) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        over_rows(rows, layout->qkv_width, [&](long r) {
            rotate_and_write(*layout, static_cast<T*>(qkv) + r * layout->qkv_width,
                             turns ? turns + r * layout->rotary : nullptr, static_cast<T*>(cache), row_width, slots[r]);
        });
    });
}

// Attention of one layer; query and out: see AttentionStep.
long cpp_attend(long type, const AttentionShape* shape, const Paging* paging, const void* cache, const void* query,
                   long query_stride, void* out) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        if (shape->stored == 1) attend<T, e4m3>(*shape, *paging, cache, query, query_stride, out);
        else if (shape->stored == 2) attend<T, e5m2>(*shape, *paging, cache, query, query_stride, out);
        else attend<T, T>(*shape, *paging, cache, query, query_stride, out);
    });
}

long cpp_stack(long type, const StackConfig* config, const StackStep* step) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        Stack<decltype(zero)> stack(*config, *step, scratch);
        parallel([&](Team team) { stack.run(team); });
    });
}

long cpp_encoder_stack(long type, const EncoderConfig* config, const EncoderStep* step) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        EncoderStack<decltype(zero)> stack(*config, *step, scratch);
        parallel([&](Team team) { stack.run(team); });
    });
}

// out [tokens, channels] of projected [tokens, 3 * channels], which is overwritten; cache: of the layer, rows of `channels`.
long cpp_short_convolution(long type, const ShortConvolution* shape, const Segments* segments, const CachedInputs* plan,
                           void* projected, void* cache, void* out) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long numbers = segments->bounds[segments->count] * shape->channels * shape->width;
        const int threads = most_threads(1 + numbers / SMALLEST_SHARED);
        char* at = scratch.of(shape->channels * sizeof(T) + threads * shape->width * sizeof(T*) + 64);
        T* zeros = Scratch::take<T>(at, shape->channels);
        std::memset(zeros, 0, shape->channels * sizeof(T));
        const T** inputs = Scratch::take<const T*>(at, threads * shape->width);
        const ShortConvolutionStep<T> run(*shape, *segments, *plan, static_cast<T*>(projected), static_cast<T*>(cache), zeros,
                                          static_cast<T*>(out));
        parallel([&](Team team) { run.run(team, inputs); }, threads);
    });
}

// out [tokens, values] of projected [tokens, shape.projected()]; inputs and states: of the layer's slots.
long cpp_gated_delta(long type, const GatedDelta* shape, const Segments* segments, const void* projected, void* inputs,
                     float* states, void* out) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long numbers = shape->value_heads() * shape->key_dim * shape->value_dim;
        recurrent<GatedDeltaPart<T>, T>(*shape, *segments, numbers, projected, inputs, states, static_cast<T*>(out));
    });
}

// The same; out is float32 if gates are apart.
long cpp_mamba2(long type, const Mamba2* shape, const Segments* segments, const void* projected, void* inputs, float* states,
                void* out) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long numbers = shape->heads * shape->state_size * shape->head_dim;
        recurrent<Mamba2Part<T>, T>(*shape, *segments, numbers, projected, inputs, states, out);
    });
}

// out [tokens, channels] of the first channels of projected [tokens, row_width]; inputs: of the layer's slots.
long cpp_kept_convolution(long type, const KeptConvolution* shape, const Segments* segments, const void* projected,
                          void* inputs, void* out) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long numbers = segments->bounds[segments->count] * shape->channels * shape->width;
        const int threads = most_threads(1 + numbers / SMALLEST_SHARED);
        char* at = scratch.of(shape->channels * sizeof(T) + threads * shape->width * sizeof(T*) + 128);
        T* zeros = Scratch::take<T>(at, shape->channels);
        std::memset(zeros, 0, shape->channels * sizeof(T));
        const T** rows = Scratch::take<const T*>(at, threads * shape->width);
        const KeptConvolutionStep<T> step(*shape, *segments, static_cast<const T*>(projected), static_cast<T*>(inputs), zeros,
                                          static_cast<T*>(out));
        parallel([&](Team team) { step.run(team, rows); }, threads);
    });
}

// out [tokens, channels] of projected [tokens, shape.projected()]; states: of the layer's slots.
long cpp_mamba1(long type, const Mamba1* shape, const Segments* segments, const void* projected, float* states, void* out) {
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const long numbers = segments->bounds[segments->count] * shape->channels * shape->state_size;
        const Mamba1Step<T> step(*shape, *segments, static_cast<const T*>(projected), states, static_cast<T*>(out));
        std::atomic<long> next{0};
        parallel([&](Team) { step.run(next); }, most_threads(1 + numbers / SMALLEST_SHARED));
    });
}

// out [rows, outputs] += what the rows' adapters give for x [rows, inputs]; float32 whatever the type if `wide`.
long cpp_adapt(long type, const AdapterFactors* of_number, const int64_t* numbers, const void* x, long stride, long inputs,
               long rows, void* out, long outputs, long wide) {
    static thread_local Scratch scratch;
    return with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const T* from = static_cast<const T*>(x);
        const AdapterGroups groups(numbers, nullptr, 0, rows);
        const long width = groups.width(of_number);
        if (!width) return;
        auto* inner = reinterpret_cast<Input<T>*>(scratch.of(rows * width * sizeof(Input<T>)));
        const int limit = rows * width * inputs < 4 * SMALLEST_SHARED ? 1 : 1 << 30;
        parallel([&](Team team) {
            shrink<T>(of_number, groups, from, stride, inputs, inner, width, team);
            team.barrier();
            long first, last;
            team.share((outputs + PANEL - 1) / PANEL, first, last);
            for (long p = first; p < last; p++) {
                const long at = p * PANEL;
                if (wide) expand<T>(of_number, groups, 0, rows, inner, width, p, static_cast<float*>(out) + at, outputs, outputs);
                else expand<T>(of_number, groups, 0, rows, inner, width, p, static_cast<T*>(out) + at, outputs, outputs);
            }
        }, limit);
    });
}

// Of each row of float logits the lowest id of the largest, that logit, and the sum of e^(logit - largest).
long cpp_greedy(const float* logits, long rows, long width, long stride, int64_t* ids, float* peaks, float* totals) {
    return status_of([&] {
        over_rows(rows, width, [&](long r) { greedy(logits + r * stride, width, ids[r], peaks[r], totals[r]); });
    });
}
}
