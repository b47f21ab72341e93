"""Tokens from logits without sorting a vocabulary: argmax, draws, and top-k, top-p and min-p by searched thresholds.

Results are those of `sampling.drawing` and `sampling.filters`, whose rules these kernels restate: weights are integers,
so sums do not depend on how a row is split, and the random number is a function of (seed, tokens generated so far).
What may differ from plain torch is the exponential. On CUDA both call libdevice's `expf` and agree bit for bit; other
implementations differ in the last place of some weights (relative 2^-23), which moves a drawn token only if the draw
falls into that sliver between two tokens. Whatever the implementation, a draw depends on its row's logits, its seed and
its count alone: never on neighbours, launch sizes or the order in which programs run.

A vocabulary is cut into tiles, one program each, so that a single row keeps all processors busy:

1. `_scan`: each tile's largest logit, its lowest id and the sum of exponentials. Greedy rows are finished from these.
2. `_weigh`: each tile's sum of weights, once the row's maximum is known. Unfiltered draws are finished from these.
3. `_collect`: for filtered rows, ids of the candidates. Distances from the maximum fall into 16 buckets (half octaves:
   0.25, 0.375, 0.5, ... 32); counted or weighed, they say which bucket the threshold lies in, and what is further away
   than its end is left behind. Rows with too many candidates are read whole by the next step.
4. `_draw_filtered`: thresholds, bit by bit over the patterns of floats (non-negative ones sort as integers), and draw.

Nothing waits for the device, and grids depend on shapes alone: a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from model_server.kernels.variant import Variant

_TILE = 1024
# Candidates of one row that are worth listing, and how many of them are looked at together.
_CAPACITY = 8192
_CHUNK = 2048
_NUM_BUCKETS = 16

_BUCKETS = tl.constexpr(_NUM_BUCKETS)
_FIRST_EDGE = tl.constexpr(0x3E800000)  # the pattern of 0.25
_EDGE_SHIFT = tl.constexpr(22)  # half an octave
_TO_NEXT_EDGE = tl.constexpr((1 << 22) - 1)
_LAST_BUCKET = tl.constexpr(_NUM_BUCKETS - 1)
_FARTHEST = tl.constexpr(0x7F800000)  # the pattern of infinity
_NO_ID = tl.constexpr(0x7FFFFFFF)
_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no libdevice


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a batch in the order greedy, unfiltered, filtered; all tensors [n], on the device of the logits."""

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
    """Choose a token for each of `taken.rows`, and advance `taken.counts` of the drawn ones.

    logits: [num_rows, vocab] float32 with adjacent columns, left as it is; bits: `drawing.weight_bits(vocab)`.
    Written at the rows taken: ids [num_rows] int64, packed [3, num_rows] float64 (id, logprob, 1.0 where the row
    failed). A row fails if a logit is NaN or +inf, or all are -inf: its id and logprob are 0.
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
    _scan[(num_tiles, num)](logits, stride, taken.rows, peaks, places, sums, vocab, TILE=_TILE)
    if taken.num_greedy:
        _finish_greedy[(taken.num_greedy,)](
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
        _weigh[(num_tiles, last - first)](
            *shared, taken.top_k, taken.dropped, masses, masses, masses, first, vocab, num_tiles,
            SCALE=scale, TILE=_TILE, TILES=tiles, FILTERED=False,
        )  # fmt: skip
        _draw_unfiltered[(last - first,)](
            *shared, masses, *state, first, vocab, num_rows, num_tiles, SCALE=scale, TILE=_TILE, TILES=tiles
        )
    if last < num:
        counted = torch.empty(num, num_tiles, _NUM_BUCKETS, dtype=torch.int32, device=device)
        weighed = torch.empty(num, num_tiles, _NUM_BUCKETS, dtype=torch.int64, device=device)
        candidates = torch.empty(num, _CAPACITY, dtype=torch.int32, device=device)
        num_candidates = torch.empty(num, dtype=torch.int32, device=device)
        steps = (taken.top_k, taken.dropped, taken.min_p)
        _weigh[(num_tiles, num - last)](
            *shared, taken.top_k, taken.dropped, masses, counted, weighed, last, vocab, num_tiles,
            SCALE=scale, TILE=_TILE, TILES=tiles, FILTERED=True,
        )  # fmt: skip
        _collect[(num_tiles, num - last)](
            *shared, *steps, masses, counted, weighed, candidates, num_candidates, last, vocab, num_tiles,
            TILE=_TILE, TILES=tiles, CAPACITY=_CAPACITY,
        )  # fmt: skip
        _draw_filtered[(num - last,)](
            *shared, *steps, masses, candidates, num_candidates, *state, last, vocab, num_rows, num_tiles,
            SCALE=scale, TILES=tiles, CAPACITY=_CAPACITY, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip


@triton.jit
def _load_peak(peaks, place, num_tiles, TILES: tl.constexpr):
    """A row's largest logit, and whether the row is unusable."""
    tile = tl.arange(0, TILES)
    each = tl.load(peaks + place.to(tl.int64) * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
    has_nan = tl.max((each != each).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(each != each, -float("inf"), each), 0)
    return peak, has_nan | (peak == float("inf")) | (peak == -float("inf"))


@triton.jit
def _weight(value, SCALE: tl.constexpr):
    """`drawing.weights`."""
    if _LIBDEVICE:  # noqa: SIM108 - only one of the two may be compiled
        exponential = libdevice.exp(value)
    else:
        exponential = tl.exp(value)
    return (exponential * SCALE).to(tl.int64)


@triton.jit
def _distance(value):
    """The pattern of -value, for values up to 0: ascends as the value falls."""
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def _bucket(distance):
    beyond = (distance - _FIRST_EDGE + _TO_NEXT_EDGE) >> _EDGE_SHIFT
    return tl.where(distance <= _FIRST_EDGE, 0, tl.minimum(beyond, _LAST_BUCKET))


@triton.jit
def _mix(z):
    """`randomness._mix`, on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seeds, counts, place):
    """`randomness.uniforms`; the row has one token more from now on."""
    count = tl.load(counts + place)
    tl.debug_barrier()  # all threads have loaded before one of them stores: they must draw with the same number
    tl.store(counts + place, count + 1)
    seed = tl.load(seeds + place).to(tl.uint64, bitcast=True)
    number = count.to(tl.uint64, bitcast=True)
    one = tl.full([], 1, tl.uint64)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed) + golden * (number + one)) >> 11
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _target(uniform, total):
    """`drawing._target`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _num_wanted(total, dropped):
    """Top-p: a token stays if the weight of all before it is below this."""
    return total - tl.floor(dropped * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _write(ids, packed, row, num_rows, token, logprob, failed):
    token = tl.where(failed, 0, token).to(tl.int64)
    tl.store(ids + row, token)
    tl.store(packed + row, token.to(tl.float64))
    tl.store(packed + num_rows + row, tl.where(failed, 0.0, logprob).to(tl.float64))
    tl.store(packed + 2 * num_rows + row, failed.to(tl.float64))


@triton.jit
def _write_drawn(
    logits_row, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE: tl.constexpr
):
    token = tl.minimum(token, vocab - 1)  # of failed rows: anything that can be read
    value = tl.div_rn(tl.load(logits_row + token) - peak, temperature)
    share = tl.maximum(total, 1).to(tl.float64) * (1.0 / SCALE)
    _write(ids, packed, row, num_rows, token, value - tl.log(share).to(tl.float32), failed)


@triton.jit
def _scan(logits, stride, rows, peaks, places, sums, vocab, TILE: tl.constexpr):
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(x != x, -float("inf"), x), 0)
    lowest = tl.min(tl.where(x == peak, column, _NO_ID), 0)
    # A tile that is masked as a whole has no maximum to subtract.
    total = tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    out = place * tl.num_programs(0) + tile
    tl.store(peaks + out, tl.where(has_nan, float("nan"), peak))
    tl.store(places + out, lowest)
    tl.store(sums + out, total)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _finish_greedy(rows, peaks, places, sums, ids, packed, num_rows, num_tiles, TILES: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(rows + place)
    tile = tl.arange(0, TILES)
    at = place.to(tl.int64) * num_tiles + tile
    each = tl.load(peaks + at, mask=tile < num_tiles, other=-float("inf"))
    lowest = tl.load(places + at, mask=tile < num_tiles, other=_NO_ID)
    part = tl.load(sums + at, mask=tile < num_tiles, other=0.0)
    peak, failed = _load_peak(peaks, place, num_tiles, TILES)
    token = tl.min(tl.where(each == peak, lowest, _NO_ID), 0)
    total = tl.sum(part * tl.exp(each - tl.where(failed, 0.0, peak)), 0)
    _write(ids, packed, row, num_rows, token, -tl.log(total), failed)


@triton.jit(do_not_specialize=["first", "num_tiles"])
def _weigh(
    logits,
    stride,
    rows,
    peaks,
    temperatures,
    top_k,
    dropped,
    masses,
    counted,
    weighed,
    first,
    vocab,
    num_tiles,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FILTERED: tl.constexpr,
):
    tile = tl.program_id(0)
    place = first + tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64)
    peak, failed = _load_peak(peaks, place, num_tiles, TILES)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    # What is written of an unusable row is never looked at; zeros keep it finite.
    value = tl.where(failed, 0.0, tl.div_rn(x - peak, tl.load(temperatures + place)))
    weight = _weight(value, SCALE)
    out = place.to(tl.int64) * num_tiles + tile
    tl.store(masses + out, tl.sum(weight, 0))
    if FILTERED:
        bucket = _bucket(_distance(value))
        number = tl.arange(0, _BUCKETS)
        padding = tl.maximum((tile + 1) * TILE - vocab, 0)
        counts = tl.histogram(bucket, _BUCKETS) - tl.where(number == _LAST_BUCKET, padding, 0)
        tl.store(counted + out * _BUCKETS + number, counts)
        # With top-k numbers decide what the candidates are; the last bucket's end is never in question.
        if (tl.load(top_k + place) >= vocab) & (tl.load(dropped + place) >= 0):
            for index in tl.static_range(_LAST_BUCKET):
                inside = tl.where(bucket == index, weight, 0)
                tl.store(weighed + out * _BUCKETS + index, tl.sum(inside, 0))


@triton.jit(do_not_specialize=["first", "num_rows", "num_tiles"])
def _draw_unfiltered(
    logits,
    stride,
    rows,
    peaks,
    temperatures,
    masses,
    seeds,
    counts,
    ids,
    packed,
    first,
    vocab,
    num_rows,
    num_tiles,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    place = first + tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64)
    peak, failed = _load_peak(peaks, place, num_tiles, TILES)
    tile = tl.arange(0, TILES)
    mass = tl.load(masses + place.to(tl.int64) * num_tiles + tile, mask=tile < num_tiles, other=0)
    total = tl.sum(mass, 0)
    target = _target(_uniform(seeds, counts, place), total)
    cumulative = tl.cumsum(mass, 0)
    found = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), num_tiles - 1)
    target -= tl.sum(tl.where(tile < found, mass, 0), 0)
    column = found * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    temperature = tl.load(temperatures + place)
    weight = _weight(tl.where(failed, 0.0, tl.div_rn(x - peak, temperature)), SCALE)
    token = found * TILE + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    _write_drawn(
        logits + row * stride, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE
    )


@triton.jit(do_not_specialize=["first", "num_tiles"])
def _collect(
    logits,
    stride,
    rows,
    peaks,
    temperatures,
    top_k,
    dropped,
    min_p,
    masses,
    counted,
    weighed,
    candidates,
    num_candidates,
    first,
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    tile = tl.program_id(0)
    place = first + tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64)
    base = place.to(tl.int64) * num_tiles
    peak, failed = _load_peak(peaks, place, num_tiles, TILES)
    each = tl.arange(0, TILES)
    number = tl.arange(0, _BUCKETS)
    at = (base + each)[:, None] * _BUCKETS + number[None, :]
    counts = tl.load(counted + at, mask=(each < num_tiles)[:, None], other=0)

    wanted = tl.load(top_k + place)
    share = tl.load(dropped + place)
    if wanted < vocab:
        last = tl.sum((tl.cumsum(tl.sum(counts, 0), 0) < wanted).to(tl.int32), 0)
    elif share >= 0:
        inside = (each < num_tiles)[:, None] & (number < _LAST_BUCKET)[None, :]
        mass = tl.cumsum(tl.sum(tl.load(weighed + at, mask=inside, other=0), 0), 0)
        total = tl.sum(tl.load(masses + base + each, mask=each < num_tiles, other=0), 0)
        short = (mass < _num_wanted(total, share)) & (number < _LAST_BUCKET)
        last = tl.sum(short.to(tl.int32), 0)
    else:
        last = _bucket(_distance(tl.load(min_p + place)))
    last = tl.minimum(last, _LAST_BUCKET)

    sizes = tl.sum(tl.where(number[None, :] <= last, counts, 0), 1)
    size = tl.where(failed, CAPACITY + 1, tl.sum(sizes, 0))
    if tile == 0:
        tl.store(num_candidates + place, size)
    if size <= CAPACITY:
        column = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
        value = tl.div_rn(x - peak, tl.load(temperatures + place))
        taken = (_bucket(_distance(value)) <= last) & (column < vocab)
        before = tl.sum(tl.where(each < tile, sizes, 0), 0)
        slot = before + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + place.to(tl.int64) * CAPACITY + slot, column, mask=taken)


@triton.jit
def _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK: tl.constexpr):
    """Ids, values and their distances of some candidates, ascending ids; past the end: beyond all distances."""
    index = start + tl.arange(0, CHUNK)
    inside = index < length
    column = tl.load(listed_row + index, mask=inside & listed, other=0)
    column = tl.where(listed, column, index)
    x = tl.load(logits_row + column, mask=inside, other=-float("inf"))
    value = tl.div_rn(x - peak, temperature)
    return column, value, tl.where(inside, _distance(value), _NO_ID)


@triton.jit(do_not_specialize=["first", "num_rows", "num_tiles"])
def _draw_filtered(
    logits,
    stride,
    rows,
    peaks,
    temperatures,
    top_k,
    dropped,
    min_p,
    masses,
    candidates,
    num_candidates,
    seeds,
    counts,
    ids,
    packed,
    first,
    vocab,
    num_rows,
    num_tiles,
    SCALE: tl.constexpr,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    place = first + tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64)
    logits_row = logits + row * stride
    listed_row = candidates + place.to(tl.int64) * CAPACITY
    peak, failed = _load_peak(peaks, place, num_tiles, TILES)
    temperature = tl.load(temperatures + place)
    num_listed = tl.load(num_candidates + place)
    listed = num_listed <= CAPACITY
    # Nothing is searched in a row that failed.
    length = tl.where(failed, 0, tl.where(listed, num_listed, vocab))

    # Top-k keeps all that is not farther than the k-th: the smallest distance that has k within it.
    wanted = tl.load(top_k + place)
    farthest = tl.full([], _FARTHEST, tl.int32)
    if wanted < vocab:
        farthest = tl.full([], 0, tl.int32)
        for step in tl.range(31):
            bit = tl.full([], 1, tl.int32) << (30 - step)
            trial = farthest | (bit - 1)
            number = tl.full([], 0, tl.int32)
            start = tl.full([], 0, tl.int32)
            while start < length:
                _, _, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
                number += tl.sum((distance <= trial).to(tl.int32), 0)
                start += CHUNK
            farthest = tl.where(number < wanted, farthest | bit, farthest)

    # Top-p: the smallest distance with the wanted weight within it; of its ties the last ones stay.
    share = tl.load(dropped + place)
    num_dropped = tl.full([], 0, tl.int32)
    if share >= 0:
        if wanted < vocab:
            total = tl.full([], 0, tl.int64)
            start = tl.full([], 0, tl.int32)
            while start < length:
                _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
                total += tl.sum(tl.where(distance <= farthest, _weight(value, SCALE), 0), 0)
                start += CHUNK
        else:
            tile = tl.arange(0, TILES)
            at = place.to(tl.int64) * num_tiles + tile
            total = tl.sum(tl.load(masses + at, mask=tile < num_tiles, other=0), 0)
        needed = _num_wanted(total, share)
        nucleus = tl.full([], 0, tl.int32)
        for step in tl.range(31):
            bit = tl.full([], 1, tl.int32) << (30 - step)
            trial = tl.minimum(nucleus | (bit - 1), farthest)
            within = tl.full([], 0, tl.int64)
            start = tl.full([], 0, tl.int32)
            while start < length:
                _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
                within += tl.sum(tl.where(distance <= trial, _weight(value, SCALE), 0), 0)
                start += CHUNK
            nucleus = tl.where(within < needed, nucleus | bit, nucleus)
        nucleus = tl.minimum(nucleus, farthest)
        nearer = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int32)
        start = tl.full([], 0, tl.int32)
        while start < length:
            _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
            nearer += tl.sum(tl.where(distance < nucleus, _weight(value, SCALE), 0), 0)
            num_ties += tl.sum((distance == nucleus).to(tl.int32), 0)
            start += CHUNK
        each = tl.maximum(_weight(-nucleus.to(tl.float32, bitcast=True), SCALE), 1)
        kept = tl.maximum((needed - nearer + each - 1) // each, 1)
        num_dropped = (num_ties - tl.minimum(kept, num_ties.to(tl.int64))).to(tl.int32)
        farthest = nucleus

    # The weight of what is left, then the first token that reaches beyond the target.
    least = tl.load(min_p + place)
    total = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < length:
        _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
        weight, num_seen = _kept_weight(value, distance, farthest, num_dropped, least, seen, SCALE)
        total += tl.sum(weight, 0)
        seen = num_seen
        start += CHUNK
    target = _target(_uniform(seeds, counts, place), total)
    token = tl.full([], _NO_ID, tl.int32)
    reached = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < length:
        column, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
        weight, num_seen = _kept_weight(value, distance, farthest, num_dropped, least, seen, SCALE)
        beyond = (weight > 0) & (reached + tl.cumsum(weight, 0) > target)
        token = tl.minimum(token, tl.min(tl.where(beyond, column, _NO_ID), 0))
        reached += tl.sum(weight, 0)
        seen = num_seen
        start += CHUNK
    _write_drawn(logits_row, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE)


@triton.jit
def _kept_weight(value, distance, farthest, num_dropped, least, seen, SCALE: tl.constexpr):
    """Weights, 0 for what is filtered out; the first `num_dropped` at exactly `farthest` are, `seen` came before."""
    tie = (distance == farthest).to(tl.int32)
    rank = seen + tl.cumsum(tie, 0)
    kept = (distance < farthest) | ((tie == 1) & (rank > num_dropped))
    return tl.where(kept & (value >= least), _weight(value, SCALE), 0), seen + tl.sum(tie, 0)


def variants() -> Sequence[Variant]:
    """Vocabularies of Llama 3, Qwen 3 and Gemma (262k), and one that nothing divides (GPT-2)."""
    found: list[Variant] = []
    for vocab, divisible in ((128256, True), (151936, True), (262144, True), (50257, False)):
        found += _variants_of(vocab, divisible)
    return found


_POINTERS = {
    "logits": "*fp32", "rows": "*i32", "peaks": "*fp32", "places": "*i32", "sums": "*fp32", "temperatures": "*fp32",
    "top_k": "*i32", "dropped": "*fp64", "min_p": "*fp32", "masses": "*i64", "counted": "*i32", "weighed": "*i64",
    "candidates": "*i32", "num_candidates": "*i32", "seeds": "*i64", "counts": "*i64", "ids": "*i64",
    "packed": "*fp64",
}  # fmt: skip


def _variants_of(vocab: int, divisible: bool) -> list[Variant]:
    bits = 62 - vocab.bit_length()
    given = {
        "SCALE": float(1 << bits),
        "TILE": _TILE,
        "TILES": triton.next_power_of_2(triton.cdiv(vocab, _TILE)),
        "CAPACITY": _CAPACITY,
        "CHUNK": _CHUNK,
    }

    def variant(kernel: triton.JITFunction, label: str, num_warps: int = 4, **more: object) -> Variant:
        constants = {name: value for name, value in (given | more).items() if name in kernel.arg_names}
        arguments = [name for name in kernel.arg_names if name not in constants]
        return Variant(
            name=f"sampling_{label}_{vocab}",
            kernel=kernel,
            signature={name: _POINTERS.get(name, "i32") for name in arguments},
            constants=constants,
            divisible=tuple(
                name for name in arguments if name in _POINTERS or (divisible and name in ("stride", "vocab"))
            ),
            num_warps=num_warps,
        )

    return [
        variant(_scan, "scan"),
        variant(_finish_greedy, "greedy"),
        variant(_weigh, "weigh", FILTERED=False),
        variant(_draw_unfiltered, "unfiltered"),
        variant(_weigh, "weigh_filtered", FILTERED=True),
        variant(_collect, "collect"),
        variant(_draw_filtered, "filtered", num_warps=8),
    ]
