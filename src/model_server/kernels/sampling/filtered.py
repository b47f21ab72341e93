"""Kernels of filtered rows: candidates, searched thresholds of top-k, top-p and min-p, and the draw."""

from __future__ import annotations

import triton
import triton.language as tl

from model_server.kernels.sampling.parts import (
    BUCKETS,
    LAST_BUCKET,
    NO_ID,
    bucket_of,
    distance_of,
    load_peak,
    next_uniform,
    num_wanted,
    place_and_tile,
    target_of,
    weight_of,
    write_drawn,
)

_FARTHEST = tl.constexpr(0x7F800000)  # the pattern of infinity


@triton.jit(do_not_specialize=["first", "num_tiles"])
def collect(
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
    place, tile = place_and_tile(num_tiles)
    place += first
    row = tl.load(rows + place).to(tl.int64)
    base = place.to(tl.int64) * num_tiles
    peak, failed = load_peak(peaks, place, num_tiles, TILES)
    each = tl.arange(0, TILES)
    number = tl.arange(0, BUCKETS)
    at = (base + each)[:, None] * BUCKETS + number[None, :]
    counts = tl.load(counted + at, mask=(each < num_tiles)[:, None], other=0)

    wanted = tl.load(top_k + place)
    share = tl.load(dropped + place)
    if wanted < vocab:
        last = tl.sum((tl.cumsum(tl.sum(counts, 0), 0) < wanted).to(tl.int32), 0)
    elif share >= 0:
        inside = (each < num_tiles)[:, None] & (number < LAST_BUCKET)[None, :]
        mass = tl.cumsum(tl.sum(tl.load(weighed + at, mask=inside, other=0), 0), 0)
        total = tl.sum(tl.load(masses + base + each, mask=each < num_tiles, other=0), 0)
        short = (mass < num_wanted(total, share)) & (number < LAST_BUCKET)
        last = tl.sum(short.to(tl.int32), 0)
    else:
        last = bucket_of(distance_of(tl.load(min_p + place)))
    last = tl.minimum(last, LAST_BUCKET)

    sizes = tl.sum(tl.where(number[None, :] <= last, counts, 0), 1)
    size = tl.where(failed, CAPACITY + 1, tl.sum(sizes, 0))
    if tile == 0:
        tl.store(num_candidates + place, size)
    if size <= CAPACITY:
        column = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
        value = tl.div_rn(x - peak, tl.load(temperatures + place))
        taken = (bucket_of(distance_of(value)) <= last) & (column < vocab)
        before = tl.sum(tl.where(each < tile, sizes, 0), 0)
        slot = before + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + place.to(tl.int64) * CAPACITY + slot, column, mask=taken)


@triton.jit
def _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK: tl.constexpr):
    """Load ids, values and distances of candidates, ascending ids; past the end beyond all distances."""
    index = start + tl.arange(0, CHUNK)
    inside = index < length
    column = tl.load(listed_row + index, mask=inside & listed, other=0)
    column = tl.where(listed, column, index)
    x = tl.load(logits_row + column, mask=inside, other=-float("inf"))
    value = tl.div_rn(x - peak, temperature)
    return column, value, tl.where(inside, distance_of(value), NO_ID)


@triton.jit(do_not_specialize=["first", "num_rows", "num_tiles"])
def draw_filtered(
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
    peak, failed = load_peak(peaks, place, num_tiles, TILES)
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
                total += tl.sum(tl.where(distance <= farthest, weight_of(value, SCALE), 0), 0)
                start += CHUNK
        else:
            tile = tl.arange(0, TILES)
            at = place.to(tl.int64) * num_tiles + tile
            total = tl.sum(tl.load(masses + at, mask=tile < num_tiles, other=0), 0)
        needed = num_wanted(total, share)
        nucleus = tl.full([], 0, tl.int32)
        for step in tl.range(31):
            bit = tl.full([], 1, tl.int32) << (30 - step)
            trial = tl.minimum(nucleus | (bit - 1), farthest)
            within = tl.full([], 0, tl.int64)
            start = tl.full([], 0, tl.int32)
            while start < length:
                _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
                within += tl.sum(tl.where(distance <= trial, weight_of(value, SCALE), 0), 0)
                start += CHUNK
            nucleus = tl.where(within < needed, nucleus | bit, nucleus)
        nucleus = tl.minimum(nucleus, farthest)
        nearer = tl.full([], 0, tl.int64)
        num_ties = tl.full([], 0, tl.int32)
        start = tl.full([], 0, tl.int32)
        while start < length:
            _, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
            nearer += tl.sum(tl.where(distance < nucleus, weight_of(value, SCALE), 0), 0)
            num_ties += tl.sum((distance == nucleus).to(tl.int32), 0)
            start += CHUNK
        each = tl.maximum(weight_of(-nucleus.to(tl.float32, bitcast=True), SCALE), 1)
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
    target = target_of(next_uniform(seeds, counts, place), total)
    token = tl.full([], NO_ID, tl.int32)
    reached = tl.full([], 0, tl.int64)
    seen = tl.full([], 0, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < length:
        column, value, distance = _chunk(logits_row, listed_row, listed, start, length, peak, temperature, CHUNK)
        weight, num_seen = _kept_weight(value, distance, farthest, num_dropped, least, seen, SCALE)
        beyond = (weight > 0) & (reached + tl.cumsum(weight, 0) > target)
        token = tl.minimum(token, tl.min(tl.where(beyond, column, NO_ID), 0))
        reached += tl.sum(weight, 0)
        seen = num_seen
        start += CHUNK
    write_drawn(logits_row, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE)


@triton.jit
def _kept_weight(value, distance, farthest, num_dropped, least, seen, SCALE: tl.constexpr):
    """Return weights, 0 where filtered out, as the first `num_dropped` at exactly `farthest`."""
    tie = (distance == farthest).to(tl.int32)
    rank = seen + tl.cumsum(tie, 0)
    kept = (distance < farthest) | ((tie == 1) & (rank > num_dropped))
    return tl.where(kept & (value >= least), weight_of(value, SCALE), 0), seen + tl.sum(tie, 0)
