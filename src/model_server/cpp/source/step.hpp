// One layer's attention for all sequences of a step, shared among threads: single queries by spans of keys, prompts by
// runs of queries.
#pragma once
#include <algorithm>
#include <utility>

#include "attention.hpp"
#include "prompt.hpp"
#include "team.hpp"

// The pieces of one step under one rule of visibility.
struct Schedule {
    struct Span : KeySpan {
        long index;  // of the sequence's own spans
    };
    struct Run {
        long sequence, start, count;
    };
    long window, chunk;
    std::vector<Run> runs;
    std::vector<Span> spans;
    std::vector<long> begins;  // of each sequence's spans; one more at the end
    long most_spans = 0;

    Schedule(const AttentionShape& shape, const Paging& paging) : window(shape.window), chunk(shape.chunk) {
        long queries = PROMPT_ROWS / shape.group() < 8 ? 8 : PROMPT_ROWS / shape.group();
        for (long s = 0; s < paging.sequences; s++) {
            long count = paging.starts[s + 1] - paging.starts[s], length = paging.lengths[s];
            begins.push_back(long(spans.size()));
            if (paging.decodes(s)) {
                long first = shape.first_visible(length - 1);
                for (long index = 0; first < length; index++) {
                    long end = first / SPAN * SPAN + SPAN, last = end < length ? end : length;
                    spans.push_back({{s, first, last}, index});
                    first = last;
                }
                long own = long(spans.size()) - begins.back();
                most_spans = own > most_spans ? own : most_spans;
            } else {
                for (long at = 0; at < count; at += queries)
                    runs.push_back({s, at, count - at < queries ? count - at : queries});
            }
        }
        begins.push_back(long(spans.size()));
    }
    bool serves(const AttentionShape& shape) const { return window == shape.window && chunk == shape.chunk; }
    bool joins() const { return most_spans > 1; }
    // Numbers of shared memory that spans of longer sequences are kept in until they are joined.
    long shared_values(const AttentionShape& shape) const { return joins() ? spans.size() * shape.heads * shape.value_dim : 0; }
    long shared_parts(const AttentionShape& shape) const { return joins() ? spans.size() * shape.heads : 0; }
};

// C: of the numbers in the cache.
template <class T, class Out, class C = T> struct AttentionStep {
    const AttentionShape& shape;
    const Paging& paging;
    const Schedule& schedule;
    const C* cache;
    const T* query;
    long query_stride;
    Out* out;
    float* values;   // shared_values
    Partial* parts;  // shared_parts

    void run(std::atomic<long>& next, long threads) const {
        static thread_local Scratch scratch;
        const long runs = long(schedule.runs.size()) * shape.kv_heads;
        for (long i;;) {
            i = next.fetch_add(1, std::memory_order_relaxed);
            if (i >= runs) return run_spans(next, runs, i, heads_together(threads), scratch);
            // The last runs of a prompt see the most keys: they begin first.
            const auto& piece = schedule.runs[schedule.runs.size() - 1 - i / shape.kv_heads];
            attend_prompt(shape, paging, cache, piece.sequence, piece.start, piece.count, i % shape.kv_heads, query,
                          query_stride, out, scratch);
        }
    }

    // From piece `i` on, the `runs`-th of all being the first. A thread takes its next piece before it computes one, and
    // asks for its memory meanwhile.
    void run_spans(std::atomic<long>& next, long runs, long i, long together, Scratch& scratch) const {
        const long groups = (shape.kv_heads + together - 1) / together, pieces = long(schedule.spans.size()) * groups;
        const auto heads_of = [&](long i, long& first, long& last) {
            first = (i - runs) % groups * together;
            last = std::min(first + together, shape.kv_heads);
        };
        const auto set = [&](SpanRows<C>& rows, long i) {
            rows.keys = 0;
            if (i - runs >= pieces) return;
            long first, last;
            heads_of(i, first, last);
            rows.set(shape, paging, cache, schedule.spans[(i - runs) / groups], first, last - first);
        };
        SpanRows<C> rows[2];
        SpanRows<C>*own = rows, *coming = rows + 1;
        for (set(*own, i); own->keys; std::swap(own, coming)) {
            const long after = next.fetch_add(1, std::memory_order_relaxed);
            set(*coming, after);
            long first, last;
            heads_of(i, first, last);
            coming->spread((last - first) * calls_of_span(shape, own->keys));
            for (long head = first; head < last; head++) span((i - runs) / groups, head, *own, *coming, scratch);
            i = after;
        }
    }

    // How many KV heads of a span one thread takes, one after another. Their keys and values are side by side in the
    // cache, and memory that is read in its order comes faster; the second-level cache keeps them until they are used.
    long heads_together(long threads) const {
        constexpr long MOST_BYTES = 192 << 10, FEWEST_PIECES = 4;  // of a thread: fewer leave some without work at the end
        const long head = SPAN * (shape.key_dim + (shape.value_offset ? shape.value_dim : 0)) * long(sizeof(C));
        const long most = std::max(1L, std::min(shape.kv_heads, MOST_BYTES / head));
        const long pieces = long(schedule.spans.size()) * shape.kv_heads;
        return std::max(1L, std::min(most, pieces / (FEWEST_PIECES * threads)));
    }

    void span(long index, long kv_head, SpanRows<C>& keys, SpanRows<C>& next, Scratch& scratch) const {
        const auto& piece = schedule.spans[index];
        bool alone = schedule.begins[piece.sequence + 1] - schedule.begins[piece.sequence] == 1;
        long group = shape.group(), row = paging.starts[piece.sequence], position = paging.lengths[piece.sequence] - 1;
        const long own_size = MOST_HEADS * shape.value_dim, space_size = decoded_size<T, C>(shape);
        char* at = scratch.of(own_size * sizeof(float) + space_size * sizeof(T) + 2 * 64);
        float* own = Scratch::take<float>(at, own_size);
        T* space = Scratch::take<T>(at, space_size);
        for (long head = kv_head * group; head < (kv_head + 1) * group; head += MOST_HEADS) {
            long rest = (kv_head + 1) * group - head, count = rest < MOST_HEADS ? rest : MOST_HEADS;
            Partial own_parts[MOST_HEADS];
            float* to = alone ? own : values + (index * shape.heads + head) * shape.value_dim;
            Partial* to_parts = alone ? own_parts : parts + index * shape.heads + head;
            attend_span(shape, query + row * query_stride + head * shape.key_dim, head, count, position, piece.first, keys,
                        next, space, to, to_parts);
            if (!alone) continue;
            for (long h = 0; h < count; h++) {
                float factor;
                join(shape, head + h, own + h * shape.value_dim, own_parts + h, 1, 0, 0, &factor,
                     out + (row * shape.heads + head + h) * shape.value_dim);
            }
        }
    }

    // After all threads have run: the sequences with several spans.
    void join_all(Team team) const {
        std::vector<float> factors(schedule.most_spans);
        long first, last;
        team.share(paging.sequences * shape.heads, first, last);
        for (long i = first; i < last; i++) {
            long sequence = i / shape.heads, head = i % shape.heads, begin = schedule.begins[sequence];
            long count = schedule.begins[sequence + 1] - begin;
            if (count < 2) continue;
            join(shape, head, values + (begin * shape.heads + head) * shape.value_dim, parts + begin * shape.heads + head,
                 count, shape.heads * shape.value_dim, shape.heads, factors.data(),
                 out + (paging.starts[sequence] * shape.heads + head) * shape.value_dim);
        }
    }
};
