// What layers of a stack have in place of attention, as they share a step's threads and scratch.
#pragma once
#include <vector>

#include "gated_delta.hpp"
#include "mamba2.hpp"

enum MixerKind : long { ATTENTION, GATED_DELTA, MAMBA2, SHORT_CONVOLUTION };

// A step of layers with states is computed up to where states are saved, and then on.
struct StackPart {
    long first;  // token of the step
    Segments segments;
    const int64_t* saves;  // [num_saves, 2]: slots, from and to, copied in turn behind the part
    long num_saves;

    long tokens() const { return segments.bounds[segments.count]; }
    long pieces() const { return (tokens() + MOST_RECURRENT_TOKENS - 1) / MOST_RECURRENT_TOKENS; }
};

struct StackMixer {
    long kind;
    const GatedDelta* delta;
    const Mamba2* mamba;
    const ShortConvolution* convolution;

    // Of a token: what the mixer reads, and what it gives.
    long inputs() const {
        return kind == GATED_DELTA ? delta->projected() : kind == MAMBA2 ? mamba->projected() : 3 * convolution->channels;
    }
    long outputs() const {
        return kind == GATED_DELTA ? delta->values() : kind == MAMBA2 ? mamba->values() : convolution->channels;
    }
    long channels() const {
        return kind == GATED_DELTA ? delta->channels() : kind == MAMBA2 ? mamba->channels() : convolution->channels;
    }
    long width() const { return kind == GATED_DELTA ? delta->width : kind == MAMBA2 ? mamba->width : convolution->width; }
    // Floats of a token that is being computed.
    long scratch() const {
        if (kind == GATED_DELTA) return GatedDeltaPart<float>::scratch_width(*delta);
        return kind == MAMBA2 ? Mamba2Part<float>::scratch_width(*mamba) : 0;
    }
    // Numbers of a sequence's state.
    long state() const {
        if (kind == GATED_DELTA) return delta->value_heads() * delta->key_dim * delta->value_dim;
        return mamba->heads * mamba->state_size * mamba->head_dim;
    }
};

// Out: of what products read.
template <class T, class Out> struct MixerStep {
    const StackPart* parts;
    long num_parts;
    const Segments* segments;    // of short convolutions
    const CachedInputs* cached;  // of these
    const T* zeros;
    const T** rows;  // for each thread, of the widest convolution
    float* mixed;
    std::atomic<long>* counters;  // of this layer, for each piece

    static long pieces(const StackPart* parts, long count) {
        long all = 0;
        for (long i = 0; i < count; i++) all += parts[i].pieces();
        return all;
    }

    // Ends at a barrier.
    void run(const StackMixer& mixer, T* projected, void* inputs, float* states, Out* out, Team team) const {
        if (mixer.kind == SHORT_CONVOLUTION) {
            ShortConvolutionStep<T, Out>(*mixer.convolution, *segments, *cached, projected, static_cast<T*>(inputs), zeros, out)
                .run(team, rows);
            return team.barrier();
        }
        std::atomic<long>* next = counters;
        for (long i = 0; i < num_parts; i++) {
            const StackPart& part = parts[i];
            const T* from = projected + part.first * mixer.inputs();
            Out* to = out + part.first * mixer.outputs();
            if (mixer.kind == GATED_DELTA) advance<GatedDeltaPart<T, Out>>(*mixer.delta, part, from, inputs, states, to, team, next);
            else advance<Mamba2Part<T, Out>>(*mixer.mamba, part, from, inputs, states, to, team, next);
            if (!part.num_saves) continue;
            const long kept = (mixer.width() - 1) * mixer.channels();
            for (long j = 0; j < part.num_saves; j++) {
                copy(static_cast<T*>(inputs), part.saves + 2 * j, kept, team);
                copy(states, part.saves + 2 * j, mixer.state(), team);
            }
            team.barrier();
        }
    }

  private:
    template <class Part, class Shape>
    void advance(const Shape& shape, const StackPart& part, const T* from, void* inputs, float* states, Out* to, Team team,
                 std::atomic<long>*& next) const {
        const long tokens = part.tokens();
        for (long first = 0; first < tokens; first += MOST_RECURRENT_TOKENS) {
            const long last = std::min(tokens, first + MOST_RECURRENT_TOKENS);
            const Part piece(shape, part.segments, first, last, from, static_cast<T*>(inputs), states, zeros, mixed, to);
            piece.run(team, rows, *next++);
            team.barrier();
        }
    }
    // Each thread has its own numbers of all slots, so that copies follow each other.
    template <class N> static void copy(N* slots, const int64_t* pair, long count, Team team) {
        long first, last;
        team.share(count, first, last);
        std::memcpy(slots + pair[1] * count + first, slots + pair[0] * count + first, (last - first) * sizeof(N));
    }
};
