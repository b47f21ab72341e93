"""Every library as it was installed, on random shapes: what a machine with fewer instructions would run, too."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from operator_codes import Codes, random_numbers
from support import effort
from support.cpp_operators import AS, BF16, FLOAT, Operators, address, exact

from model_server.cpp.instruction_sets import SETS, module, path, survey
from model_server.quantization.forms.codes import E2M1

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("threads", "rounds"),
    [pytest.param(1, effort.examples(3, 60), marks=pytest.mark.long), (3, effort.examples(3, 10))],
)
@pytest.mark.parametrize("name", SETS)
def test_it_computes_what_numpy_does(name: str, threads: int, rounds: int) -> None:
    found = survey()
    if name not in found.built or name not in found.supported:
        pytest.skip(f"{name} was not built, or this CPU does not have it")
    folders = ROOT / "src", ROOT / "tests", HERE
    # test_sanitized.py tries the same operators with the seed 1.
    command = HERE / "operator_cases.py", path(module(name)), threads, rounds, 1 + threads
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def _any_codes() -> Codes:
    return Codes.random(np.random.default_rng(0), 100, 300)


def _levels() -> Codes:
    form = _any_codes()
    return replace(form, codes=form.codes & 15, bits=4, levels=exact(np.array(E2M1, np.uint8)))


def _small_groups() -> Codes:
    """As in GGUF files."""
    random, groups = np.random.default_rng(0), (100, 20)
    scales, offsets = (random_numbers(random, "steps", groups, 32) for _ in range(2))
    codes = random.integers(0, 16, (100, 640)).astype(np.uint8)
    return Codes(codes, scales, np.zeros(groups, np.uint8), 32, 4, 640, None, offsets=offsets)


@pytest.mark.parametrize("form", [_any_codes(), _levels(), _small_groups()], ids=["numbers", "levels", "small groups"])
def test_products_with_codes_have_the_same_bits_on_every_instruction_set(form: Codes) -> None:
    found = survey()
    names = [name for name in found.built if name in found.supported]
    if len(names) < 2:
        pytest.skip("only one instruction set was built that this CPU has")
    for type in (FLOAT, BF16):
        products = [_code_products(Operators(path(module(name)), 1), type, form) for name in names]
        for other in products[1:]:
            np.testing.assert_array_equal(other, products[0])


def _code_products(operators: Operators, type: int, form: Codes) -> np.ndarray:
    x = exact(AS[type](np.random.default_rng(0).standard_normal((20, form.inputs))))
    struct, out = form.pack(operators), exact(np.empty((20, 100), np.float32))
    operators.cpp_code_linear(type, ctypes.byref(struct), address(x), form.inputs, 20, address(out), 1)
    return out
