"""Products and attention by the tile instructions, on a model of them where the CPU has none (tile_model.hpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from operator_codes import Codes, random_numbers
from support.cpp_builds import SOURCES, build, needs_compiler
from support.cpp_operators import BF16, Operators, address, exact, narrow, widen

from model_server.cpp import instruction_sets as sets

# A worker may wait for the compiler of another.
pytestmark = [needs_compiler, pytest.mark.timeout(900), pytest.mark.weekly]
ROWS = (*range(1, 41), 48, 49, 64, 65, 100, 257, 290)
NEVER = 1_000_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    features = ctypes.CDLL(str(build(tmp_path_factory, SOURCES / "cpu_features.cpp", *sets.FEATURES_FLAGS)))
    if not features.cpu_supports(b"avx512_bf16"):
        pytest.skip("the model is compiled for CPUs with avx512_bf16")
    return build(tmp_path_factory, SOURCES / "operators.cpp", *sets.flags("avx512_bf16"), "-DTERCET_TILE_MODEL", "-O1")


@pytest.fixture(params=[1, 3])
def operators(library: Path, request: pytest.FixtureRequest) -> Iterator[Operators]:
    made = Operators(library, request.param)
    yield made
    made.cpp_set_tile_rows(4)
    made.cpp_set_tile_cache(768 << 10)
    assert made.tile_model_is_released()


def product(operators: Operators, panels: np.ndarray, outputs: int, x: np.ndarray) -> np.ndarray:
    rows, inputs = x.shape
    out = exact(np.zeros((rows, outputs), np.float32))
    operators.cpp_linear(
        BF16, address(panels), None, outputs, inputs, address(exact(x)), inputs, rows, address(out), True
    )
    return out


def unusual(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Numbers of very different sizes, among them some that cancel, denormals, infinities, zeros of both signs."""
    values = random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)
    values[:, 1::7] = -values[:, 0 : values.shape[1] - 1 : 7][:, : values[:, 1::7].shape[1]]
    values.flat[random.integers(0, values.size, 20)] = 1e-39
    values.flat[random.integers(0, values.size, 20)] = -0.0
    values[-1, 0] = np.inf
    return narrow(values.astype(np.float32))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (70, 704), (33, 32), (600, 128)])
def test_a_row_has_the_same_bits_in_any_number_of_rows(operators: Operators, outputs: int, inputs: int) -> None:
    random = np.random.default_rng(outputs)
    weight = unusual(random, (outputs, inputs))
    panels = operators.packed(BF16, weight)
    x = unusual(random, (290, inputs))
    before = operators.tile_model_products()
    wanted = product(operators, panels, outputs, x)
    assert operators.tile_model_products() > before
    finite = np.isfinite(wanted)
    assert finite.mean() > 0.9 and not finite.all()
    with np.errstate(invalid="ignore"):
        sums, sizes = widen(x) @ widen(weight).T, np.abs(widen(x)) @ np.abs(widen(weight)).T
        assert (np.abs(wanted - sums) <= 1e-5 * sizes)[finite].all()
    for rows in ROWS:
        for fewest, cache in ((1, 768 << 10), (4, 0), (NEVER, 0)):
            operators.cpp_set_tile_rows(fewest)
            operators.cpp_set_tile_cache(cache)
            got = product(operators, panels, outputs, x[:rows])
            same = (got.view(np.uint32) == wanted[:rows].view(np.uint32)) | np.isnan(got) & np.isnan(wanted[:rows])
            assert same.all(), (rows, fewest, cache)


@pytest.mark.parametrize(
    ("bits", "group", "has_zeros", "has_levels", "offsets"),
    [
        (4, 64, True, False, None),
        (4, 128, False, True, None),
        (4, 128, False, False, None),
        (8, 320, False, False, None),
        (8, 192, True, False, None),
        (4, 32, False, True, None),
        (4, 32, False, False, "steps"),
        (5, 32, False, False, "halves"),
        (6, 64, False, False, "floats"),
        (8, 32, True, False, None),
    ],
)
def test_codes_have_the_same_bits_with_and_without_tiles(
    operators: Operators, bits: int, group: int, has_zeros: bool, has_levels: bool, offsets: str | None
) -> None:
    random = np.random.default_rng(bits + group)
    codes = random.integers(0, 2**bits, (70, 320)).astype(np.uint8)
    groups = 70, -(-320 // group)
    zeros = random.integers(0, 2**bits, groups) if has_zeros else np.full(groups, 2 ** (bits - 1))
    form = Codes(codes, random.random(groups).astype(np.float32), zeros.astype(np.uint8), group, bits, 320, None)
    if has_levels:
        form.levels = exact(random.integers(0, 256, 16).astype(np.uint8))
    if offsets:
        form.zeros[:] = 0
        form.scales, form.offsets = (random_numbers(random, offsets, groups, group) for _ in range(2))
    struct, x = form.pack(operators), narrow(random.standard_normal((100, 320)).astype(np.float32))

    def product(rows: int, fewest: int) -> np.ndarray:
        operators.cpp_set_tile_rows(fewest)
        out = exact(np.zeros((rows, 70), np.float32))
        given = exact(x[:rows])
        operators.cpp_code_linear(BF16, ctypes.byref(struct), address(given), 320, rows, address(out), 1)
        return out

    wanted, before = product(100, NEVER), operators.tile_model_products()
    for rows in (1, 2, 15, 16, 17, 33, 64, 65, 100):
        np.testing.assert_array_equal(product(rows, 1), wanted[:rows])
    assert operators.tile_model_products() > before


def test_few_rows_do_without_tiles(operators: Operators) -> None:
    weight = narrow(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32))
    panels = operators.packed(BF16, weight)
    before = operators.tile_model_products()
    product(operators, panels, 64, weight[:3])
    assert operators.tile_model_products() == before
    product(operators, panels, 64, weight[:4])
    assert operators.tile_model_products() > before


def test_sizes_that_tiles_cannot_take_go_without(operators: Operators) -> None:
    random = np.random.default_rng(2)
    weight, x = (narrow(random.standard_normal((40, 48)).astype(np.float32)) for _ in range(2))
    before = operators.tile_model_products()
    got = product(operators, operators.packed(BF16, weight), 40, x)
    assert operators.tile_model_products() == before
    np.testing.assert_allclose(got, widen(x) @ widen(weight).T, atol=1e-4)
