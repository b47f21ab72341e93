"""Every C++ operator with shapes at and around its boundaries, against numpy in float64.

    python operator_cases.py LIBRARY THREADS ROUNDS SEED [OPENMP_RUNTIME]

Memory is exactly as large as each operator's contract says; what must not be read holds NaN or a block that does not
exist. For libraries built with sanitizers, in a process of their own, and without.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from operator_adapters import adapter_case
from operator_attention import attention_case, rotated
from operator_codes import code_case, float8_case
from operator_encoder import encoder_case
from operator_recurrence import gated_delta_case, mamba1_case, mamba2_case, short_convolution_case
from operator_stack import stack_case
from support.cpp_operators import (
    AS,
    BF16,
    DTYPE,
    FLOAT,
    TOLERANCE,
    Operators,
    address,
    assert_near,
    exact,
    rows_apart,
    widen,
)

from model_server.cpp.structs import HeadLayoutStruct

OUTPUTS = 1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 100, 129, 200
INPUTS = {FLOAT: (1, 2, 3, 15, 16, 17, 32, 33, 65, 100), BF16: (2, 4, 16, 30, 32, 34, 62, 64, 66, 94, 96, 98, 128, 160)}
ROWS = (*range(41), 48, 49, 64, 65, 100)
WIDTHS = 1, 2, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 70


def linear_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """One matrix by several numbers of rows: bit for bit the same, of which the largest is compared with numpy."""
    outputs, inputs = int(random.choice(OUTPUTS)), int(random.choice(INPUTS[type]))
    if random.random() < 0.1:
        outputs, inputs = 600, 128  # shared among threads
    elif type == BF16 and random.random() < 0.1:
        outputs, inputs = 70, 704  # gone through in parts where rows are many
    weight = AS[type](random.standard_normal((outputs, inputs)))
    panels = operators.packed(type, weight)
    bias = exact(AS[type](random.standard_normal(outputs)), True) if random.random() < 0.5 else None
    most = 300 if random.random() < 0.1 else 100
    x = AS[type](random.standard_normal((most, inputs)))
    stride = inputs + int(random.choice([0, 1, 2, 32]))
    is_shifted = random.random() < 0.5

    def product(rows: int, is_wide: bool) -> np.ndarray:
        out = exact(np.full((rows, outputs), 7, np.float32 if is_wide else DTYPE[type]), is_shifted)
        given = rows_apart(x[:rows], stride, is_shifted)
        operators.cpp_linear(
            type, address(panels), address(bias), outputs, inputs, address(given), stride, rows, address(out), is_wide
        )
        return out

    wanted = widen(x) @ widen(weight).T + (0 if bias is None else widen(bias))
    scale = np.abs(widen(x)) @ np.abs(widen(weight)).T + 1
    whole = {is_wide: product(most, is_wide) for is_wide in (False, True)}
    assert_near(whole[True], wanted, 2e-6, scale)
    np.testing.assert_array_equal(whole[False], AS[type](whole[True]))  # rounded once
    for rows in random.choice(ROWS, 8, replace=False):
        is_wide = random.random() < 0.5
        np.testing.assert_array_equal(product(rows, is_wide), whole[is_wide][:rows], f"{rows} rows")


def head_linear_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """A matrix for each head, of parts of wider rows: bit for bit the same for any number of rows."""
    outputs, inputs = int(random.choice(OUTPUTS)), int(random.choice(INPUTS[type]))
    heads, most = int(random.choice([1, 2, 5])), 300 if random.random() < 0.1 else 40
    if random.random() < 0.1:
        outputs, inputs = 300, 128  # shared among threads
    weight = AS[type](random.standard_normal((heads, outputs, inputs)))
    panels = exact(np.concatenate([operators.packed(type, matrix) for matrix in weight]))
    gap, spare = (int(random.choice([0, 2, 32])) for _ in range(2))
    x = AS[type](random.standard_normal((most, heads, inputs + gap)))

    def product(rows: int) -> np.ndarray:
        out = exact(np.full((rows, heads, outputs + spare), 7, DTYPE[type]), True)
        given = exact(x[:rows], True)
        operators.cpp_head_linear(
            type, address(panels), heads, outputs, inputs, address(given), heads * (inputs + gap), inputs + gap, rows,
            address(out), heads * (outputs + spare), outputs + spare,
        )  # fmt: skip
        assert bool((widen(out[..., outputs:]) == widen(np.full(1, 7, DTYPE[type]))).all())
        return out[..., :outputs]

    whole, wide = product(most), widen(x[..., :inputs])
    assert_near(whole, np.einsum("nhi,hoi->nho", wide, widen(weight)), TOLERANCE[type], np.sqrt(inputs) * 8)
    for rows in random.choice(range(1, most), 4, replace=False):
        np.testing.assert_array_equal(product(int(rows)), whole[:rows], f"{rows} rows")


def index_scores_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    """Sums over heads: bit for bit the same for any number of queries and of keys behind."""
    keys, inputs = int(random.choice(OUTPUTS)), int(random.choice(INPUTS[type]))
    heads, most = int(random.choice([1, 2, 7, 16, 64])), int(random.choice([1, 2, 5, 17]))
    if random.random() < 0.2:
        keys, inputs = 1100, 128  # several runs of panels, shared among threads
    matrix = AS[type](random.standard_normal((keys, inputs)))
    queries = AS[type](random.standard_normal((most, heads, inputs)))
    weights = random.standard_normal((most, heads)).astype(np.float32)

    def scores(first: int, rows: int, length: int) -> np.ndarray:
        panels = operators.packed(type, matrix[:length])
        out = exact(np.full((rows, length), 7, np.float32), random.random() < 0.5)
        given, own = exact(queries[first : first + rows], True), exact(weights[first : first + rows], True)
        operators.cpp_index_scores(
            type, address(panels), length, inputs, address(given), address(own), heads, rows, address(out)
        )
        return out

    whole = scores(0, most, keys)
    products = np.maximum(np.einsum("rhi,ki->rhk", widen(queries), widen(matrix)), 0)
    scale = np.einsum("rh,rhk->rk", np.abs(weights), products) + np.sqrt(inputs) * heads
    assert_near(whole, np.einsum("rh,rhk->rk", weights, products), 1e-5, scale)
    for _ in range(4):
        first, length = int(random.integers(most)), int(random.integers(1, keys + 1))
        rows = int(random.integers(1, most - first + 1))
        np.testing.assert_array_equal(scores(first, rows, length), whole[first : first + rows, :length])


def norm_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    n, heads, rows = int(random.choice(WIDTHS)), int(random.choice([1, 2, 3])), int(random.choice([1, 3, 40, 700]))
    x = AS[type](random.standard_normal((rows, n)))
    given, out = exact(x, True), exact(np.zeros_like(x), True)
    weight = random.standard_normal((heads, n)).astype(np.float32)
    added = exact(AS[type](random.standard_normal((rows, n))), True) if random.random() < 0.5 else None
    operators.cpp_rms_norm(
        type, address(given), address(added), address(exact(weight)), heads, 1e-5, address(out), rows, n
    )
    if added is not None:
        assert_near(given, widen(x) + widen(added), TOLERANCE[type])
    wide = widen(given)
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight[np.arange(rows) % heads]
    assert_near(out, wanted, TOLERANCE[type])


def silu_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    n, rows = int(random.choice(WIDTHS)), int(random.choice([1, 3, 40, 300]))
    x = AS[type](random.standard_normal((rows, 2 * n)) * random.choice([1.0, 60.0]))
    out = exact(np.zeros((rows, n), x.dtype), True)
    operators.cpp_silu_gated(type, address(exact(x, True)), address(out), rows, n)
    gate, up = widen(x)[:, :n], widen(x)[:, n:]
    assert_near(out, gate / (1 + np.exp(-gate)) * up, TOLERANCE[type])


def rotation_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    dim, heads, kv_heads = int(random.choice([2, 4, 6, 14, 16, 18, 32, 34, 64, 256])), int(random.choice([1, 2, 5])), 1
    rotary = int(random.choice([dim, 2, dim // 4 * 2]))
    rows = int(random.choice([1, 2, 40]))
    query_width, row_width = heads * dim, kv_heads * (dim + int(random.choice([0, dim, 3])))
    qkv = AS[type](random.standard_normal((rows, query_width + row_width)))
    turns = random.standard_normal((rows, rotary)).astype(np.float32) if random.random() < 0.8 else None
    norm = random.standard_normal((heads + kv_heads, dim)).astype(np.float32) if random.random() < 0.5 else None
    slots = random.permutation(rows + 3)[:rows]
    cache = exact(np.zeros((slots.max() + 1, row_width), qkv.dtype), True)
    given, weight = exact(qkv, True), None if norm is None else exact(norm)
    layout = HeadLayoutStruct(heads + kv_heads, dim, rotary, query_width, qkv.shape[1], address(weight), 1e-6)
    turned = None if turns is None else exact(turns, True)
    operators.cpp_rotate_write(
        type, address(given), layout, address(turned), address(cache), row_width, address(exact(slots)), rows
    )
    wanted = rotated(widen(qkv), heads + kv_heads, dim, turns, norm, 1e-6)
    assert_near(given, wanted, 2 * TOLERANCE[type], 4)
    np.testing.assert_array_equal(cache[slots], given[:, query_width:])


def greedy_case(operators: Operators, random: np.random.Generator, type: int) -> None:
    rows, width = int(random.choice([1, 2, 9])), int(random.choice([*WIDTHS, 4095, 4096, 4097, 9000]))
    logits = random.standard_normal((rows, width)).astype(np.float32)
    logits[:, random.integers(width)] = logits.max(1) + random.choice([0, 1])
    if random.random() < 0.3:
        logits[0, : width // 2] = -np.inf
    stride = width + int(random.choice([0, 1, 5]))
    ids, (peaks, totals) = exact(np.zeros(rows, np.int64)), exact(np.zeros((2, rows), np.float32), True)
    operators.cpp_greedy(
        address(rows_apart(logits, stride, True)), rows, width, stride, address(ids), address(peaks), address(totals)
    )
    np.testing.assert_array_equal(ids, logits.argmax(1))
    np.testing.assert_array_equal(peaks, logits.max(1))
    assert_near(totals, np.exp(widen(logits) - widen(peaks)[:, None]).sum(1), 1e-5)


CASES = (
    linear_case,
    head_linear_case,
    index_scores_case,
    code_case,
    float8_case,
    norm_case,
    silu_case,
    rotation_case,
    greedy_case,
    attention_case,
    adapter_case,
    stack_case,
    encoder_case,
    short_convolution_case,
    gated_delta_case,
    mamba1_case,
    mamba2_case,
)


def main(library: str, threads: str, rounds: str, seed: str, *runtime: str) -> None:
    operators = Operators(Path(library), int(threads), *map(Path, runtime))
    for round in range(int(rounds)):
        # Where there are tiles: of equal results.
        operators.cpp_set_tile_rows((1, 2, 4, 8)[round % 4])
        operators.cpp_set_tile_cache((0, 768 << 10)[round // 4 % 2])
        for case in CASES:
            for type in (FLOAT, BF16):
                try:
                    case(operators, np.random.default_rng([int(seed), round]), type)
                except AssertionError:
                    sys.stderr.write(f"{case.__name__}, type {type}, round {round}\n")
                    raise


if __name__ == "__main__":
    main(*sys.argv[1:])
