"""Tokens from logits without sorting a vocabulary: argmax, draws, and filters by searched thresholds."""

# Results are those of `sampling.categorical` and `sampling.filters`, whose rules these kernels restate: weights are
# integers, so sums do not depend on how a row is split, and the random number is a function of (seed, tokens
# generated). What may differ from plain torch is the exponential. On CUDA both call libdevice's `expf` and agree bit
# for bit; other implementations differ in the last place of some weights (relative 2^-23), which moves a drawn token
# only if the draw falls into that sliver between two tokens. Whatever the implementation, a draw depends on its row's
# logits, its seed and its count alone: never on other rows, launch sizes or the order in which programs run.
#
# A vocabulary is cut into tiles, one program each, so that a single row keeps all processors busy:
#
# 1. `scan`: each tile's largest logit, its lowest id and the sum of exponentials. Greedy rows are finished from these.
# 2. `weigh`: each tile's sum of weights, once the row's maximum is known. Unfiltered draws are finished from these.
# 3. `collect`: for filtered rows, ids of the candidates. Distances from the maximum fall into 16 buckets (half octaves:
#    0.25, 0.375, 0.5, ... 32); counted or weighed, they say which bucket the threshold is in, and what is further away
#    than its end is left behind. Rows with too many candidates are read whole by the next step.
# 4. `draw_filtered`: thresholds, bit by bit over the patterns of floats (non-negative ones sort as integers), and draw.
#
# Nothing waits for the device, and grids depend on shapes alone: a step can be captured in a CUDA graph.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from model_server.kernels.sampling.filtered import collect, draw_filtered
from model_server.kernels.sampling.parts import NUM_BUCKETS
from model_server.kernels.sampling.tiles import draw_unfiltered, finish_greedy, scan, weigh

_TILE = 1024
# Candidates of one row that are worth listing, and how many of them are looked at together.
_CAPACITY = 8192
_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows in the order greedy, unfiltered, filtered; tensors [n] on the logits' device."""

    rows: Tensor  # int32: which row of the logits
    seeds: Tensor  # int64: the bits of the unsigned seed
    counts: Tensor  # int64: tokens generated so far; every step of a drawn row adds one
    temperature: Tensor  # float32
    top_k: Tensor  # int32; the vocabulary's size where off
    dropped: Tensor  # float64: 1 - top_p; negative where off
    min_p: Tensor  # float32: log of min_p; -inf where off
    num_greedy: int
    num_unfiltered: int


def sample(logits: Tensor, taken: SampledRows, bits: int, ids: Tensor, packed: Tensor) -> None:
    """Choose a token for each of `taken.rows`, and advance the counts of drawn ones.

    A row fails if a logit is NaN or +inf, or all are -inf: its id and logprob are 0.

    Args:
        logits: [num_rows, vocab] float32, adjacent columns.
        bits: `categorical.weight_bits(vocab)`.
        ids: [num_rows] int64, written.
        packed: [3, num_rows] float64, written: id, logprob, 1.0 for failures.
    """
    num = len(taken.rows)
    if num == 0:
        return
    vocab, num_rows, device = logits.shape[1], len(ids), logits.device
    num_tiles = triton.cdiv(vocab, _TILE)
    tiles = triton.next_power_of_2(num_tiles)
    stride = logits.stride(0)
    peaks = torch.empty(num, num_tiles, dtype=torch.float32, device=device)
    places = torch.empty(num, num_tiles, dtype=torch.int32, device=device)
    sums = torch.empty_like(peaks)
    scan[(num * num_tiles,)](logits, stride, taken.rows, peaks, places, sums, vocab, num_tiles, TILE=_TILE)
    if taken.num_greedy:
        finish_greedy[(taken.num_greedy,)](
            taken.rows, peaks, places, sums, ids, packed, num_rows, num_tiles, TILES=tiles
        )
    first = taken.num_greedy
    last = first + taken.num_unfiltered
    if first == num:
        return
    masses = torch.empty(num, num_tiles, dtype=torch.int64, device=device)
    scale = float(1 << bits)
    shared = (logits, stride, taken.rows, peaks, taken.temperature)
    state = (taken.seeds, taken.counts, ids, packed)
    if first < last:
        weigh[((last - first) * num_tiles,)](
            *shared, taken.top_k, taken.dropped, masses, masses, masses, first, vocab, num_tiles,
            SCALE=scale, TILE=_TILE, TILES=tiles, FILTERED=False,
        )  # fmt: skip
        draw_unfiltered[(last - first,)](
            *shared, masses, *state, first, vocab, num_rows, num_tiles, SCALE=scale, TILE=_TILE, TILES=tiles
        )
    if last < num:
        counted = torch.empty(num, num_tiles, NUM_BUCKETS, dtype=torch.int32, device=device)
        weighed = torch.empty(num, num_tiles, NUM_BUCKETS, dtype=torch.int64, device=device)
        candidates = torch.empty(num, _CAPACITY, dtype=torch.int32, device=device)
        num_candidates = torch.empty(num, dtype=torch.int32, device=device)
        steps = (taken.top_k, taken.dropped, taken.min_p)
        weigh[((num - last) * num_tiles,)](
            *shared, taken.top_k, taken.dropped, masses, counted, weighed, last, vocab, num_tiles,
            SCALE=scale, TILE=_TILE, TILES=tiles, FILTERED=True,
        )  # fmt: skip
        collect[((num - last) * num_tiles,)](
            *shared, *steps, masses, counted, weighed, candidates, num_candidates, last, vocab, num_tiles,
            TILE=_TILE, TILES=tiles, CAPACITY=_CAPACITY,
        )  # fmt: skip
        draw_filtered[(num - last,)](
            *shared, *steps, masses, candidates, num_candidates, *state, last, vocab, num_rows, num_tiles,
            SCALE=scale, TILES=tiles, CAPACITY=_CAPACITY, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
