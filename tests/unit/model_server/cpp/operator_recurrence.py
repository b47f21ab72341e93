"""The operators of recurrent layers against numpy: a step of whole sequences, and, to the bit the same, two parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.cpp_operators import AS, TOLERANCE, Operators, address, assert_near, exact, widen

from model_server.cpp.structs import (
    CachedInputsStruct,
    GatedDeltaStruct,
    KeptConvolutionStruct,
    Mamba1Struct,
    Mamba2Struct,
    SegmentsStruct,
    ShortConvolutionStruct,
)

Array = np.ndarray[Any, Any]


def _segments(counts: list[int], starts: list[int], slots: Array | None) -> tuple[SegmentsStruct, list[Array]]:
    """Return the structure, and what it points to."""
    bounds = exact(np.cumsum([0, *counts]).astype(np.int32))
    lengths = exact((np.array(starts) + counts).astype(np.int32))
    pointers = [address(values) for values in (bounds, lengths, slots)]
    return SegmentsStruct(len(counts), *[None if p is None else p.value for p in pointers]), [bounds, lengths]


def _lags(inputs: Array, width: int) -> list[Array]:
    """[tokens, channels] -> the inputs of the token itself, of the one before, and so on."""
    padded = np.concatenate((np.zeros((width - 1, inputs.shape[1])), inputs))
    return [padded[width - 1 - lag : len(padded) - lag] for lag in range(width)]


def _cuts(random: np.random.Generator, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """The spans of the sequences in one step of all, and in two steps; empty ones take no part."""
    middle = [int(random.integers(0, length + 1)) for length in lengths]
    halves = [[(0, m) for m in middle], [(m, n) for m, n in zip(middle, lengths, strict=True)]]
    return [[(0, n) for n in lengths], *halves]


def short_convolution_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """Each sequence has a row of its cache for each of its last inputs, behind those of the reserved block."""
    channels, width = int(random.choice([1, 7, 16, 33, 64, 70])), int(random.choice([2, 3, 4]))
    lengths = [int(n) for n in random.choice([1, 2, 5, 40], int(random.choice([1, 3])))]
    kept = width - 1
    weight = exact(random.standard_normal((width, channels)).astype(np.float32))
    bias = exact(random.standard_normal(channels).astype(np.float32)) if random.random() < 0.5 else None
    pointer = address(bias)
    shape = ShortConvolutionStruct(address(weight).value, None if pointer is None else pointer.value, width, channels)
    rows = [AS[type](random.standard_normal((n, 3 * channels))) for n in lengths]

    def run(steps: list[list[tuple[int, int]]]) -> tuple[list[Array], Array]:
        cache = exact(AS[type](np.full(((len(lengths) + 1) * kept, channels), np.nan)))
        found: list[list[Array]] = [[] for _ in lengths]
        for step in steps:
            taking = [i for i, (first, stop) in enumerate(step) if stop > first]
            if not taking:
                continue
            spans = [step[i] for i in taking]
            before = np.array([[first - lag for lag in range(1, width)] for first, _ in spans])
            own = np.array(taking)[:, None]
            previous = exact(((own + 1) * kept + np.maximum(before, 0) % kept).astype(np.int64))
            missing = exact(before < 0)
            written = exact(
                np.array(
                    [
                        (i + 1) * kept + p % kept if p + kept >= step[i][1] else p % kept
                        for i in taking
                        for p in range(*step[i])
                    ],
                    np.int64,
                )
            )
            plan = CachedInputsStruct(*[address(x).value for x in (previous, missing, written)], kept, 0)
            counts = [stop - first for first, stop in spans]
            segments, _held = _segments(counts, [first for first, _ in spans], None)
            given = exact(np.concatenate([rows[i][first:stop] for i, (first, stop) in zip(taking, spans, strict=True)]))
            out = exact(np.zeros((sum(counts), channels), given.dtype))
            operators.cpp_short_convolution(type, shape, segments, plan, address(given), address(cache), address(out))
            for i, part in zip(taking, np.split(out, np.cumsum(counts)[:-1]), strict=True):
                found[i].append(part.copy())
        return [np.concatenate(parts) for parts in found], cache

    whole, *halves = _cuts(random, lengths)
    outputs, cache = run([whole])
    others, other_cache = run(halves)
    np.testing.assert_array_equal(cache, other_cache)
    for given, out, other in zip(rows, outputs, others, strict=True):
        np.testing.assert_array_equal(out, other)
        first, gate, third = np.split(widen(given), 3, axis=1)
        products = widen(AS[type](first * third))
        wanted = sum(x * w for x, w in zip(_lags(products, width), weight[::-1].astype(float), strict=True))
        assert_near(out, (wanted + (0 if bias is None else bias)) * gate, TOLERANCE[type], 8)


def gated_delta_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    by_key, sigmoid, most = bool(random.integers(2)), bool(random.integers(2)), float(random.choice([1, 2]))
    repeats = 1 if by_key else int(random.choice([1, 3]))
    key_heads, width = int(random.choice([1, 2])), int(random.choice([2, 4]))
    key_dim, value_dim = int(random.choice([1, 7, 16, 33, 128])), int(random.choice([1, 16, 24, 32, 70]))
    lengths = [int(n) for n in random.choice([1, 2, 5, 63, 64, 65, 130], int(random.choice([1, 3])))]
    heads, keys = key_heads * repeats, key_heads * key_dim
    values, decays = heads * value_dim, keys if by_key else heads
    channels = 2 * keys + values
    weight, rate, bias, norm = (
        exact(x.astype(np.float32))
        for x in (
            random.standard_normal((width, channels)),
            -np.exp(random.standard_normal(decays)),
            random.standard_normal(decays),
            random.standard_normal(value_dim),
        )
    )
    pointers = [address(x).value for x in (weight, rate, bias, norm)]
    shape = GatedDeltaStruct(key_heads, repeats, key_dim, value_dim, width, *pointers, 1e-6, most, by_key, sigmoid)
    rows = [AS[type](random.standard_normal((n, channels + values + heads + decays))) for n in lengths]
    slots = random.permutation(len(lengths) + 2)[: len(lengths)]

    def run(steps: list[list[tuple[int, int]]]) -> tuple[list[Array], Array, Array]:
        inputs = exact(AS[type](np.full((slots.max() + 1, width - 1, channels), np.nan)))
        states = exact(np.full((slots.max() + 1, heads, key_dim, value_dim), np.nan, np.float32))

        def compute(segments: Any, given: Array) -> Array:
            out = exact(np.zeros((len(given), values), given.dtype))
            operators.cpp_gated_delta(
                type, shape, segments, address(given), address(inputs), address(states), address(out)
            )
            return out

        return _taken(steps, slots, rows, compute), inputs[slots], states[slots]

    outputs, inputs, states = _same_in_parts(random, lengths, run)
    for given, out, kept, state in zip(rows, outputs, inputs, states, strict=True):
        mixed, gates, strength, decay = np.split(widen(given), np.cumsum([channels, values, heads]), axis=1)
        newest = [lag[-1] for lag in _lags(mixed, width)[:-1]]
        np.testing.assert_array_equal(widen(kept), np.array(newest).reshape(width - 1, channels))
        sums = sum(x * w for x, w in zip(_lags(mixed, width), weight[::-1].astype(float), strict=True))
        mixed = _silu(np.asarray(sums))
        query, key = (
            np.repeat(_unit(x.reshape(-1, key_heads, key_dim)), repeats, axis=1)
            for x in (mixed[:, :keys], mixed[:, keys : 2 * keys])
        )
        value = mixed[:, 2 * keys :].reshape(-1, heads, value_dim)
        factor = np.exp(np.log1p(np.exp(decay + bias)) * rate.astype(float)).reshape(len(value), heads, -1, 1)
        known = np.zeros((heads, key_dim, value_dim))
        wanted = np.zeros_like(value)
        for t in range(len(value)):
            known *= factor[t]
            delta = (value[t] - np.einsum("hk,hkv->hv", key[t], known)) * most / (1 + np.exp(-strength[t]))[:, None]
            known += np.einsum("hk,hv->hkv", key[t], delta)
            wanted[t] = np.einsum("hk,hkv->hv", query[t] / np.sqrt(key_dim), known)
        assert_near(state, known, 1e-4, np.abs(known).max() + 1)
        scale = np.sqrt((wanted**2).mean(2, keepdims=True) + 1e-6)
        gate = _silu(gates.reshape(wanted.shape)) if not sigmoid else 1 / (1 + np.exp(-gates.reshape(wanted.shape)))
        # Of small outputs the norm makes large ones, with their errors.
        size = (np.abs(gate * norm) * (1 + 1e-3 / scale)).reshape(out.shape) + 1
        assert_near(out, (wanted / scale * norm * gate).reshape(out.shape), 4 * TOLERANCE[type], size)


def mamba1_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """Both halves, the second one with what stands for the products between them in its rows."""
    width, size = int(random.choice([2, 4])), int(random.choice([1, 7, 16, 33]))
    channels = int(random.choice([1, 16, 24, 32, 70, 130]))
    lengths = [int(n) for n in random.choice([1, 2, 5, 63, 130], int(random.choice([1, 3])))]
    weight, conv_bias, rate, bias, skip = (
        exact(x.astype(np.float32))
        for x in (
            random.standard_normal((width, channels)),
            random.standard_normal(channels),
            -np.exp(random.standard_normal((size, channels))),
            random.standard_normal(channels),
            random.standard_normal(channels),
        )
    )
    has_bias = random.random() < 0.5
    kept = KeptConvolutionStruct(
        address(weight).value, address(conv_bias).value if has_bias else None, width, channels, 2 * channels
    )
    shape = Mamba1Struct(channels, size, *[address(x).value for x in (rate, bias, skip)])
    given_rows = [AS[type](random.standard_normal((n, 3 * channels + 2 * size))) for n in lengths]
    slots = random.permutation(len(lengths) + 2)[: len(lengths)]

    def run(steps: list[list[tuple[int, int]]]) -> tuple[list[Array], Array, Array]:
        inputs = exact(AS[type](np.full((slots.max() + 1, width - 1, channels), np.nan)))
        states = exact(np.full((slots.max() + 1, size, channels), np.nan, np.float32))

        def compute(segments: Any, given: Array) -> Array:
            projected, mixed = exact(given[:, : 2 * channels]), exact(np.zeros((len(given), channels), given.dtype))
            operators.cpp_kept_convolution(type, kept, segments, address(projected), address(inputs), address(mixed))
            read, out = exact(np.concatenate((mixed, given[:, channels:]), axis=1)), exact(np.zeros_like(mixed))
            operators.cpp_mamba1(type, shape, segments, address(read), address(states), address(out))
            return np.concatenate((mixed, out), axis=1)

        return _taken(steps, slots, given_rows, compute), inputs[slots], states[slots]

    outputs, inputs, states = _same_in_parts(random, lengths, run)
    for given, both, newest, state in zip(given_rows, outputs, inputs, states, strict=True):
        first, gates, times, key, query = np.split(widen(given), np.cumsum([channels] * 3 + [size]), axis=1)
        lags = _lags(first, width)
        np.testing.assert_array_equal(widen(newest), np.array([lag[-1] for lag in lags[:-1]]).reshape(-1, channels))
        sums = np.asarray(sum(x * w for x, w in zip(lags, weight[::-1].astype(float), strict=True)))
        mixed = _silu(sums + conv_bias if has_bias else sums)
        assert_near(both[:, :channels], mixed, 4 * TOLERANCE[type], np.abs(mixed) + 1)
        value = widen(both[:, :channels])  # as it was rounded
        time = np.log1p(np.exp(times + bias))
        known, wanted = np.zeros((size, channels)), np.zeros_like(value)
        for t in range(len(value)):
            known = known * np.exp(time[t] * rate) + key[t][:, None] * (value[t] * time[t])
            wanted[t] = (query[t] @ known + value[t] * skip) * _silu(gates[t])
        assert_near(state, known, 1e-4, np.abs(known).max() + 1)
        assert_near(both[:, channels:], wanted, 4 * TOLERANCE[type], np.abs(wanted).max() + 1)


def mamba2_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    width, groups = int(random.choice([2, 4])), int(random.choice([1, 2]))
    each, of_group = int(random.choice([1, 3])), int(random.choice([1, 2]))
    heads, gating = groups * each, int(random.integers(4))
    rows, head_dim = int(random.choice([1, 7, 16, 33, 128])), int(random.choice([1, 16, 24, 32, 70]))
    lengths = [int(n) for n in random.choice([1, 2, 5, 63, 64, 65, 130], int(random.choice([1, 3])))]
    values, norm_groups = heads * head_dim, groups
    channels = values + 2 * groups * rows
    weight, conv_bias, rate, bias, skip, norm = (
        exact(x.astype(np.float32))
        for x in (
            random.standard_normal((width, channels)),
            random.standard_normal(channels),
            -np.exp(random.standard_normal(heads)),
            random.standard_normal(heads),
            random.standard_normal(heads),
            random.standard_normal(values),
        )
    )
    # Of groups that begin before this rank's heads, one is cut.
    first = of_group - 1 if groups == 1 else 0
    least, most = (0.0, np.inf) if random.random() < 0.5 else (0.3, 0.9)
    pointers = [address(x).value for x in (weight, conv_bias, rate, bias, skip)]
    shape = Mamba2Struct(
        heads, head_dim, groups, rows, width, first, each + first, *pointers, least, most, gating,
        address(norm).value, norm_groups, 1e-6,
    )  # fmt: skip
    given_rows = [AS[type](random.standard_normal((n, values + channels + heads))) for n in lengths]
    slots = random.permutation(len(lengths) + 2)[: len(lengths)]

    def run(steps: list[list[tuple[int, int]]]) -> tuple[list[Array], Array, Array]:
        inputs = exact(AS[type](np.full((slots.max() + 1, width - 1, channels), np.nan)))
        states = exact(np.full((slots.max() + 1, heads, rows, head_dim), np.nan, np.float32))

        def compute(segments: Any, given: Array) -> Array:
            out = exact(np.zeros((len(given), values), given.dtype if gating else np.float32))
            operators.cpp_mamba2(type, shape, segments, address(given), address(inputs), address(states), address(out))
            return out

        return _taken(steps, slots, given_rows, compute), inputs[slots], states[slots]

    outputs, inputs, states = _same_in_parts(random, lengths, run)
    group_of = (first + np.arange(heads)) // (each + first)
    for given, out, kept, state in zip(given_rows, outputs, inputs, states, strict=True):
        gates, mixed, times = np.split(widen(given), np.cumsum([values, channels]), axis=1)
        newest = [lag[-1] for lag in _lags(mixed, width)[:-1]]
        np.testing.assert_array_equal(widen(kept), np.array(newest).reshape(width - 1, channels))
        sums = sum(x * w for x, w in zip(_lags(mixed, width), weight[::-1].astype(float), strict=True))
        mixed = _silu(np.asarray(sums) + conv_bias)
        value = mixed[:, :values].reshape(-1, heads, head_dim)
        key, query = (x.reshape(-1, groups, rows)[:, group_of] for x in np.split(mixed[:, values:], 2, axis=1))
        time = np.clip(np.log1p(np.exp(times + bias)), least, most)
        factor = np.exp(time * rate.astype(float))
        known = np.zeros((heads, rows, head_dim))
        wanted = np.zeros_like(value)
        for t in range(len(value)):
            known *= factor[t, :, None, None]
            known += np.einsum("hk,hv->hkv", key[t], value[t] * time[t][:, None])
            wanted[t] = np.einsum("hk,hkv->hv", query[t], known) + value[t] * skip[:, None]
        assert_near(state, known, 1e-4, np.abs(known).max() + 1)
        gate, wanted, largest = _silu(gates), wanted.reshape(-1, values), np.abs(wanted).max() + 1
        if gating == 0:
            assert_near(out, wanted, 1e-4, largest)
        elif gating == 1:
            assert_near(out, wanted * gate, 4 * TOLERANCE[type], largest * (np.abs(gate) + 1))
        else:
            normed = wanted * gate if gating == 2 else wanted
            parts = normed.reshape(len(normed), norm_groups, -1)
            scale = np.sqrt((parts**2).mean(2, keepdims=True) + 1e-6)
            normed = (parts / scale).reshape(normed.shape) * norm * (1 if gating == 2 else gate)
            # Of small outputs the norm makes large ones, with their errors.
            loss = np.broadcast_to(1 + 1e-3 * largest / scale, parts.shape).reshape(normed.shape)
            assert_near(out, normed, 4 * TOLERANCE[type], np.abs(norm) * (np.abs(gate) + 1) * loss + 1)


Steps = list[list[tuple[int, int]]]
Found = tuple[list[Array], Array, Array]


def _taken(steps: Steps, slots: Array, rows: list[Array], compute: Callable[[Any, Array], Array]) -> list[Array]:
    """What `compute(segments, given)` makes of each sequence's rows, step by step."""
    found: list[list[Array]] = [[] for _ in rows]
    for step in steps:
        taking = [i for i, (start, stop) in enumerate(step) if stop > start]
        if not taking:
            continue
        counts = [step[i][1] - step[i][0] for i in taking]
        taken = exact(slots[taking])
        segments, _held = _segments(counts, [step[i][0] for i in taking], taken)
        out = compute(segments, exact(np.concatenate([rows[i][step[i][0] : step[i][1]] for i in taking])))
        for i, part in zip(taking, np.split(out, np.cumsum(counts)[:-1]), strict=True):
            found[i].append(part.copy())
    return [np.concatenate(parts) for parts in found]


def _same_in_parts(random: np.random.Generator, lengths: list[int], run: Callable[[Steps], Found]) -> Found:
    """Outputs, inputs and states of one step of all, which are those of two steps to the bit."""
    whole, *halves = _cuts(random, lengths)
    found = run([whole])
    for one, other in zip(_flat(found), _flat(run(halves)), strict=True):
        np.testing.assert_array_equal(one, other)
    return found


def _flat(found: tuple[list[Array], Array, Array]) -> list[Array]:
    outputs, inputs, states = found
    return [*outputs, inputs, states]


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _unit(heads: Array) -> Array:
    return heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
