"""The benchmarks are run by hand and now and then: what they import of the packages must still be there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Of a peer's own environment.
FOREIGN = {"benchmarks.peers.openvino_server"}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "out" not in path.parts
)


@pytest.mark.parametrize("name", [m for m in MODULES if m not in FOREIGN])
def test_a_benchmark_can_be_imported(name: str) -> None:
    importlib.import_module(name)
