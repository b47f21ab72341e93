"""The ahead-of-time compiler against kernels made for it: what it reports, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.interpreter  # needs no card

HERE = Path(__file__).parent

GOOD = """
import triton
import triton.language as tl

from aot.variant import Variant


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr, ADDED: tl.constexpr = 1):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + ADDED, mask=at < n)


def launch(x):
    add_one[(1,)](x, x.shape[0], BLOCK=128)


def variant(name, signature=None, **options):
    signature = signature or {"x": "*fp32", "n": "i32"}
    return Variant(
        name=name, kernel=add_one, signature=signature, constants={"BLOCK": 128}, divisible=("x",), **options
    )


def variants():
    return [variant("good"), variant("not on the oldest", excluded=frozenset({80}))]
"""

BAD = """
import os

import triton
import triton.language as tl

from good import add_one, variant
from aot.variant import Variant


@triton.jit
def forgotten(x):
    tl.store(x, 1)


@triton.jit
def hungry(a, b, c, n):
    r = tl.arange(0, 64)
    total = tl.zeros((64, 64), tl.float32)
    for step in range(0, n, 64):
        left = tl.load(a + r[:, None] * n + step + r[None, :])
        total = tl.dot(left, tl.load(b + (step + r[:, None]) * 64 + r), total)
    tl.store(c + r[:, None] * 64 + r, total)


def launch(x):
    forgotten[(1,)](x)


def variants():
    matrices = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "n": "i32"}
    return [
        variant("argument missing", {"x": "*fp32"}),
        variant("argument unknown", {"x": "*fp32", "n": "i32", "m": "i32"}),
        variant("does not compile", {"x": "fp32", "n": "i32"}),
        Variant(name="large", kernel=hungry, signature=matrices, constants={}, divisible=("n", *"abc"), num_stages=20),
    ]
"""


def run(folder: Path, files: dict[str, str]) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, table and rows for a package of `files`, in a process where the interpreter is off."""
    package = folder / "some_kernels"
    package.mkdir()
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text.replace("from good", "from some_kernels.good"))
    path = os.pathsep.join(map(str, (folder, HERE, HERE.parents[1] / "src")))
    command = [
        sys.executable,
        "-m",
        "aot",
        "--package",
        "some_kernels",
        "--variants",
        "some_kernels",
        "--jobs",
        "1",
        "--targets",
        "80",
        "90",
    ]
    done = subprocess.run(
        [*command, "--out", str(folder / "aot.json"), "--cache", str(folder / "cache")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout, json.loads((folder / "aot.json").read_text())["kernels"]


def test_facts_of_a_good_kernel(tmp_path: Path) -> None:
    status, printed, rows = run(tmp_path, {"good": GOOD})
    assert status == 0, printed
    assert [(row["variant"], row["target"]) for row in rows] == [("good", 80), ("good", 90), ("not on the oldest", 90)]
    for row in rows:
        assert row["fault"] is None
        assert 0 < row["registers"] <= 255
        assert (row["spill_stores"], row["spill_loads"], row["shared"]) == (0, 0, 0)
    assert "3 compiled, 0 failed" in printed


def test_faults_are_named(tmp_path: Path) -> None:
    status, printed, rows = run(tmp_path, {"good": GOOD, "wrong": BAD})
    assert status == 1
    faults = {row["variant"]: row["fault"] for row in rows if row["file"] == "wrong" and row["target"] == 80}
    assert faults["argument missing"] == "ValueError: arguments not given: n"
    assert faults["argument unknown"] == "ValueError: arguments unknown to the kernel: m"
    assert faults["does not compile"]
    assert "sm_80 has 166912" in faults["large"]
    assert "FAILED some_kernels.wrong.forgotten is launched, but no variant compiles it" in printed


def test_packages_inside_the_package_are_compiled_too() -> None:
    from aot.__main__ import PACKAGE, _modules

    assert {f"{PACKAGE}.matmul", f"{PACKAGE}.attention.prefill", f"{PACKAGE}.sampling.filtered"} <= set(
        _modules(PACKAGE)
    )
