"""Kernels of all rows: sums of vocabulary tiles, greedy tokens, and unfiltered draws."""

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
    place_and_tile,
    target_of,
    weight_of,
    write_choice,
    write_drawn,
)


@triton.jit(do_not_specialize=["num_tiles"])
def scan(logits, stride, rows, peaks, places, sums, vocab, num_tiles, TILE: tl.constexpr):
    place, tile = place_and_tile(num_tiles)
    row = tl.load(rows + place).to(tl.int64)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(x != x, -float("inf"), x), 0)
    lowest = tl.min(tl.where(x == peak, column, NO_ID), 0)
    # A tile that is masked as a whole has no maximum to subtract.
    total = tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    out = place.to(tl.int64) * num_tiles + tile
    tl.store(peaks + out, tl.where(has_nan, float("nan"), peak))
    tl.store(places + out, lowest)
    tl.store(sums + out, total)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def finish_greedy(rows, peaks, places, sums, ids, packed, num_rows, num_tiles, TILES: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(rows + place)
    tile = tl.arange(0, TILES)
    at = place.to(tl.int64) * num_tiles + tile
    each = tl.load(peaks + at, mask=tile < num_tiles, other=-float("inf"))
    lowest = tl.load(places + at, mask=tile < num_tiles, other=NO_ID)
    part = tl.load(sums + at, mask=tile < num_tiles, other=0.0)
    peak, failed = load_peak(peaks, place, num_tiles, TILES)
    token = tl.min(tl.where(each == peak, lowest, NO_ID), 0)
    total = tl.sum(part * tl.exp(each - tl.where(failed, 0.0, peak)), 0)
    write_choice(ids, packed, row, num_rows, token, -tl.log(total), failed)


@triton.jit(do_not_specialize=["first", "num_tiles"])
def weigh(
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
    place, tile = place_and_tile(num_tiles)
    place += first
    row = tl.load(rows + place).to(tl.int64)
    peak, failed = load_peak(peaks, place, num_tiles, TILES)
    column = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    # What is written of an unusable row is never looked at; zeros keep it finite.
    value = tl.where(failed, 0.0, tl.div_rn(x - peak, tl.load(temperatures + place)))
    weight = weight_of(value, SCALE)
    out = place.to(tl.int64) * num_tiles + tile
    tl.store(masses + out, tl.sum(weight, 0))
    if FILTERED:
        bucket = bucket_of(distance_of(value))
        number = tl.arange(0, BUCKETS)
        padding = tl.maximum((tile + 1) * TILE - vocab, 0)
        counts = tl.histogram(bucket, BUCKETS) - tl.where(number == LAST_BUCKET, padding, 0)
        tl.store(counted + out * BUCKETS + number, counts)
        # With top-k numbers decide what the candidates are; the last bucket's end is never in question.
        if (tl.load(top_k + place) >= vocab) & (tl.load(dropped + place) >= 0):
            for index in tl.static_range(LAST_BUCKET):
                inside = tl.where(bucket == index, weight, 0)
                tl.store(weighed + out * BUCKETS + index, tl.sum(inside, 0))


@triton.jit(do_not_specialize=["first", "num_rows", "num_tiles"])
def draw_unfiltered(
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
    peak, failed = load_peak(peaks, place, num_tiles, TILES)
    tile = tl.arange(0, TILES)
    mass = tl.load(masses + place.to(tl.int64) * num_tiles + tile, mask=tile < num_tiles, other=0)
    total = tl.sum(mass, 0)
    target = target_of(next_uniform(seeds, counts, place), total)
    cumulative = tl.cumsum(mass, 0)
    found = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), num_tiles - 1)
    target -= tl.sum(tl.where(tile < found, mass, 0), 0)
    column = found * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab, other=-float("inf"))
    temperature = tl.load(temperatures + place)
    weight = weight_of(tl.where(failed, 0.0, tl.div_rn(x - peak, temperature)), SCALE)
    token = found * TILE + tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    write_drawn(
        logits + row * stride, ids, packed, row, num_rows, token, peak, temperature, total, failed, vocab, SCALE
    )
