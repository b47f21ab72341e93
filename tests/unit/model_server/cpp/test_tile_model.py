"""The model of the tile instructions, against their arithmetic in exact fractions and the faults of Intel's manual."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.cpp_builds import SOURCES, build, needs_compiler

from model_server.cpp.instruction_sets import FEATURES_FLAGS, SETS

# A worker may wait for the compiler of another.
pytestmark = [needs_compiler, pytest.mark.timeout(900)]
DRIVER = Path(__file__).with_name("tile_driver.cpp")
KINDS = "normal", "tiny", "cancelling", "special"
FLAGS = "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"
SMALLEST = Fraction(2) ** -126  # of the normal floats
A, B, C = 4, 6, 0


def configuration(rows: int, pairs: int, columns: int, **changes: int) -> bytearray:
    """For tile C [rows, columns] += tile A [rows, pairs of bfloat16] * tile B [pairs, columns pairs]."""
    config = bytearray(64)
    config[0] = 1
    for tile, height, width in ((C, rows, 4 * columns), (A, rows, 4 * pairs), (B, pairs, 4 * columns)):
        config[16 + 2 * tile] = width
        config[48 + tile] = height
    for name, value in changes.items():
        config[int(name.removeprefix("byte_"))] = value
    return config


@pytest.fixture(scope="module")
def driver_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, DRIVER, *FLAGS, "-march=native", "-DTERCET_TILE_MODEL")


@pytest.fixture
def driver(driver_path: Path) -> ctypes.CDLL:
    loaded = loaded_driver(driver_path)
    loaded.release()  # what another test may have left
    return loaded


def loaded_driver(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name in ("load", "stream_load", "store"):
        getattr(loaded, name).argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_long)
    return loaded


def configure(driver: ctypes.CDLL, config: bytearray) -> None:
    driver.configure((ctypes.c_char * 64).from_buffer(config))


def product(driver: ctypes.CDLL, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a: [rows, pairs, 2] upper halves of floats, b: [pairs, columns, 2], c: [rows, columns] float32."""
    out = c.copy()
    configure(driver, configuration(a.shape[0], a.shape[1], b.shape[1]))
    driver.load(C, out.ctypes.data, out.strides[0])
    driver.load(A, a.ctypes.data, a.strides[0])
    driver.stream_load(B, b.ctypes.data, b.strides[0])
    driver.multiply(A)
    driver.store(C, out.ctypes.data, out.strides[0])
    driver.release()
    return out


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < SMALLEST else x


def rounded(x: Fraction) -> float:
    """To 24 bits, ties to even; what is then below the normal floats becomes 0, with its sign."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length() - 24
    magnitude = abs(x) / Fraction(2) ** exponent  # from 2^23 to 2^25
    if magnitude >= 2**24:
        magnitude, exponent = magnitude / 2, exponent + 1
    magnitude = Fraction(round(magnitude)) * Fraction(2) ** exponent
    out = math.inf if magnitude >= 2**128 else float(magnitude) if magnitude >= SMALLEST else 0.0
    return -out if x < 0 else out


def fused(x: float, y: float, total: float) -> float:
    """x * y + total with one rounding."""
    x, y, total = flushed(x), flushed(y), flushed(total)
    if math.isfinite(x) and math.isfinite(y) and math.isfinite(total):
        exact = Fraction(x) * Fraction(y) + Fraction(total)
        return rounded(exact) if exact else math.copysign(0.0, x) * math.copysign(1.0, y) + total
    with np.errstate(invalid="ignore"):
        return float(np.float64(x) * np.float64(y) + np.float64(total))


def expected(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    x, y = widened(a), widened(b)
    out = np.empty_like(c)
    for row, column in np.ndindex(*c.shape):
        chains = []
        for half in (0, 1):
            total = 0.0
            for k in range(a.shape[1]):
                total = fused(float(x[row, k, half]), float(y[k, column, half]), total)
            chains.append(total)
        out[row, column] = fused(1.0, fused(1.0, chains[0], chains[1]), float(c[row, column]))
    return out


def widened(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def halves(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def numbers(kind: str, seed: int, rows: int, pairs: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((rows, pairs, 2)), random.standard_normal((pairs, columns, 2))
    c = random.standard_normal((rows, columns))
    if kind == "tiny":  # products, sums and operands around the smallest normal float
        a, b, c = a * 2.0**-63, b * 2.0**-63, c * 2.0**-126
        a[:, 0], b[0, 0] = 2.0**-130, 2.0**120
    if kind == "cancelling":
        a[:, 1::2] = -a[:, 0::2][:, : pairs // 2] * (1 + 2.0**-7)
        b[1::2] = b[0::2][: pairs // 2]
        c = c * 2.0**-12
    if kind == "special":
        a[0, 0, 0], a[1, 1, 1], b[2, 0, 0] = math.inf, math.nan, -math.inf
        a[2, 0, 0], b[0, -1, 0] = 2.0**100, 2.0**100
        b[:, 1], c[:, 1], c[3, -1] = -0.0, -0.0, math.inf
    return halves(a), halves(b), c.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "pairs", "columns"), [(16, 16, 16), (5, 16, 2), (16, 3, 8), (4, 7, 9)])
def test_a_product_is_two_chains_of_fused_sums(
    driver: ctypes.CDLL, kind: str, rows: int, pairs: int, columns: int
) -> None:
    a, b, c = numbers(kind, 1, rows, pairs, columns)
    out, wanted = product(driver, a, b, c), expected(a, b, c)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    numeric = ~np.isnan(wanted)
    np.testing.assert_array_equal(out.view(np.uint32)[numeric], wanted.view(np.uint32)[numeric])


def product_of_bytes(driver: ctypes.CDLL, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a: [rows, groups, 4] int8, b: [groups, columns, 4] uint8, c: [rows, columns] int32."""
    out = c.copy()
    configure(driver, configuration(a.shape[0], a.shape[1], b.shape[1]))
    driver.load(C, out.ctypes.data, out.strides[0])
    driver.load(A, a.ctypes.data, a.strides[0])
    driver.load(B, b.ctypes.data, b.strides[0])
    driver.multiply_bytes()
    driver.store(C, out.ctypes.data, out.strides[0])
    driver.release()
    return out


def bytes_and_sums(rows: int, groups: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(rows)
    a, b = random.integers(-128, 128, (rows, groups, 4)), random.integers(0, 256, (groups, columns, 4))
    return a.astype(np.int8), b.astype(np.uint8), random.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)


@pytest.mark.parametrize(("rows", "groups", "columns"), [(16, 16, 16), (5, 16, 2), (4, 7, 9)])
def test_a_product_of_bytes_is_exact_and_wraps_around(
    driver: ctypes.CDLL, rows: int, groups: int, columns: int
) -> None:
    a, b, c = bytes_and_sums(rows, groups, columns)
    wanted = c + np.einsum("mki,kni->mn", a.astype(np.int64), b.astype(np.int64))
    np.testing.assert_array_equal(product_of_bytes(driver, a, b, c), wanted.astype(np.int32))


def test_a_processor_that_has_the_instructions_computes_the_same(
    driver: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory
) -> None:
    features = ctypes.CDLL(str(build(tmp_path_factory, SOURCES / "cpu_features.cpp", *FEATURES_FLAGS)))
    if not features.cpu_supports(b"amx"):
        pytest.skip("this CPU has no AMX")
    own = loaded_driver(build(tmp_path_factory, DRIVER, *FLAGS, *SETS["amx"]))
    if own.permit() != 0:
        pytest.skip("the kernel does not let this process use AMX")
    for kind in KINDS:
        operands = numbers(kind, 3, 16, 16, 16)
        np.testing.assert_array_equal(product(own, *operands), product(driver, *operands), kind)
    operands = bytes_and_sums(16, 16, 16)
    np.testing.assert_array_equal(product_of_bytes(own, *operands), product_of_bytes(driver, *operands))


def test_what_rounds_up_to_the_smallest_normal_float_is_flushed_before() -> None:
    """Of the reference: tininess is what x86 finds after rounding, with any exponent."""
    assert rounded(SMALLEST * (1 - Fraction(2) ** -25)) == float(SMALLEST)
    assert rounded(SMALLEST * (1 - Fraction(2) ** -24)) == 0.0


def test_the_border_of_what_is_flushed(driver: ctypes.CDLL) -> None:
    # 2^-126 * (1 - 2^-24) as a sum of two products: the float below 1 does not fit a bfloat16.
    a, b = (
        halves(np.array([[[2.0**-63, 0.0], [-(2.0**-75), 0.0]]])),
        halves(np.array([[[2.0**-63, 0]], [[2.0**-75, 0]]])),
    )
    assert product(driver, a, b, np.zeros((1, 1), np.float32)).item() == 0.0
    b[1] = halves(np.array([[2.0**-76, 0]]))
    assert product(driver, a, b, np.zeros((1, 1), np.float32)).item() == float(SMALLEST)


def test_the_threads_own_rounding_is_neither_read_nor_changed(driver: ctypes.CDLL) -> None:
    a, b, c = numbers("tiny", 2, 16, 16, 16)
    wanted = product(driver, a, b, c)
    towards_zero = 0x7F80  # denormals are kept
    before = driver.set_rounding(towards_zero)
    out = product(driver, a, b, c)
    left = driver.set_rounding(before)
    assert left & 0xFFC0 == towards_zero
    np.testing.assert_array_equal(out, wanted)


def test_loads_fill_up_with_zeros_and_stores_touch_no_more_than_the_tile(driver: ctypes.CDLL) -> None:
    data = np.arange(1, 32 * 32 + 1, dtype=np.float32).reshape(32, 32)
    configure(driver, configuration(16, 16, 16))
    driver.load(C, data.ctypes.data, data.strides[0])
    driver.load(A, data.ctypes.data, data.strides[0])
    configure(driver, configuration(3, 16, 5))  # clears all tiles
    out = np.full((32, 32), -1, np.float32)
    driver.store(C, out.ctypes.data, out.strides[0])
    assert (out[:3, :5] == 0).all()
    driver.load(C, data.ctypes.data, data.strides[0])
    driver.store(C, out.ctypes.data, out.strides[0])
    np.testing.assert_array_equal(out[:3, :5], data[:3, :5])
    out[:3, :5] = -1
    assert (out == -1).all()
    driver.zero(C)
    driver.store(C, out.ctypes.data, out.strides[0])
    assert (out[:3, :5] == 0).all()


def test_each_thread_has_tiles_of_its_own(driver: ctypes.CDLL) -> None:
    config, read = configuration(2, 4, 6), bytearray(64)
    assert driver.tile_model_is_released() and driver.tile_model_configured_threads() == 0
    configure(driver, config)
    assert not driver.tile_model_is_released()
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(driver.tile_model_is_released()))
    thread.start()
    thread.join()
    assert elsewhere == [1] and driver.tile_model_configured_threads() == 1
    driver.read_configuration((ctypes.c_char * 64).from_buffer(read))
    assert read == config
    before = driver.tile_model_products()
    driver.multiply(A)
    assert driver.tile_model_products() == before + 1
    driver.release()
    driver.release()
    assert driver.tile_model_is_released() and driver.tile_model_configured_threads() == 0
    driver.read_configuration((ctypes.c_char * 64).from_buffer(read))
    assert read == bytes(64)


def test_the_same_source_is_compiled_to_the_instructions(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = build(tmp_path_factory, DRIVER, *FLAGS, *SETS["amx"])
    listed = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True, check=True).stdout
    instructions = (
        "ldtilecfg",
        "sttilecfg",
        "tilerelease",
        "tilezero",
        "tileloadd",
        "tileloaddt1",
        "tilestored",
        "tdpbf16ps",
    )
    assert [name for name in instructions if name not in listed] == []
    assert "tile_model" not in listed


CHILD = """
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
if sys.argv[2]:
    driver.configure(bytes.fromhex(sys.argv[2]))
getattr(driver, sys.argv[3])(int(sys.argv[4]))
"""
WHOLE = configuration(16, 16, 16)


@pytest.mark.parametrize(
    ("config", "call", "tile", "line"),
    [
        (None, "zero", 0, "TILEZERO without a configuration"),
        (None, "multiply", 4, "TDPBF16PS without a configuration"),
        (WHOLE, "zero", 3, "TILEZERO of tile 3, which the configuration leaves out"),
        (WHOLE, "multiply", 6, "TDPBF16PS: tile 0 (16 rows of 64 bytes) += tile 6 (16 rows of 64 bytes) * tile 6"),
        (configuration(16, 8, 16, byte_54=16), "multiply", 4, "tile 4 (16 rows of 32 bytes) * tile 6 (16 rows of 64"),
        (configuration(16, 16, 16, byte_48=8), "multiply", 4, "TDPBF16PS: tile 0 (8 rows of 64 bytes) += tile 4"),
        (configuration(16, 16, 16, byte_16=32), "multiply", 4, "TDPBF16PS: tile 0 (16 rows of 32 bytes) +="),
        (configuration(16, 16, 16, byte_16=63, byte_28=63), "multiply", 4, "TDPBF16PS: tile 0 (16 rows of 63 bytes)"),
        (configuration(16, 16, 16, byte_0=2), "zero", 0, "LDTILECFG: palette 2"),
        (configuration(16, 16, 16, byte_1=1), "zero", 0, "LDTILECFG: it would begin at row 1"),
        (configuration(16, 16, 16, byte_5=1), "zero", 0, "LDTILECFG: reserved bytes are not 0"),
        (configuration(16, 16, 16, byte_33=1), "zero", 0, "LDTILECFG: reserved bytes are not 0"),
        (configuration(16, 16, 16, byte_60=1), "zero", 0, "LDTILECFG: reserved bytes are not 0"),
        (configuration(17, 16, 16), "zero", 0, "LDTILECFG: tile 0 has 17 rows of 64 bytes"),
        (configuration(16, 16, 17), "zero", 0, "LDTILECFG: tile 0 has 16 rows of 68 bytes"),
        (configuration(16, 16, 16, byte_49=4), "zero", 0, "LDTILECFG: tile 1 has 4 rows of 0 bytes"),
        (configuration(16, 16, 16, byte_0=0), "zero", 0, "TILEZERO without a configuration"),
    ],
)
def test_a_fault_ends_the_process_with_a_line(
    driver_path: Path, config: bytearray | None, call: str, tile: int, line: str
) -> None:
    command = [sys.executable, "-S", "-c", CHILD, str(driver_path), (config or b"").hex(), call, str(tile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -6
    assert done.stderr.startswith("tile model: ") and line in done.stderr and done.stderr.count("\n") == 1
