"""pyproject.toml names what `src` imports, nothing else; uvicorn, whose classes are extended, within tested bounds."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OWN = {path.name for path in (ROOT / "src").iterdir()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = {canonicalize_name(one.name): one for one in map(Requirement, PROJECT["dependencies"])}
UNIMPORTED = {
    "accelerate": "transformers imports it",
    "fastapi-offline": "its files are served",
}
TESTS_OF_EXTENDED_CLASSES = ("tests/unit/router/api/http", "tests/unit/router/server")
RUN_LIMIT_S = 280


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Top-level module → distributions that have it. Reads the files of all of them."""
    return packages_distributions()


@functools.cache
def imported() -> set[str]:
    """Top-level modules of others that `src` imports."""
    names: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add("google.protobuf" if node.module.startswith("google.protobuf") else node.module)
    tops = {name if name.startswith("google") else name.partition(".")[0] for name in names}
    return tops - OWN - set(sys.stdlib_module_names)


def distributions(module: str) -> set[str]:
    if module.startswith("google."):
        return {"protobuf"}
    return {canonicalize_name(name) for name in installed().get(module, [module])}


def test_every_requirement_is_imported() -> None:
    used = {name for module in imported() for name in distributions(module)}
    assert set(NEEDED) - used == set(UNIMPORTED)


def test_every_import_is_required() -> None:
    extras = {
        canonicalize_name(Requirement(text).name)
        for listed in PROJECT["optional-dependencies"].values()
        for text in listed
    }
    # Triton comes with a torch for CUDA, setuptools builds, the others come with what is named.
    known = set(NEEDED) | extras | {"triton", "setuptools", "opentelemetry-api", "pydantic-core"}
    missing = {module for module in imported() if not distributions(module) & known}
    assert not missing


def test_the_installed_uvicorn_is_within_the_bounds() -> None:
    bounds = NEEDED["uvicorn"].specifier
    assert version("uvicorn") in bounds
    assert {one.operator for one in bounds} == {">=", "<"}


@pytest.mark.long
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_the_extended_classes_with_both_ends_of_the_bounds(end: str, tmp_path: Path) -> None:
    bounds = NEEDED["uvicorn"].specifier
    oldest = next(one.version for one in bounds if one.operator == ">=")
    wanted = f"uvicorn=={oldest}.*" if end == "oldest" else f"uvicorn{bounds}"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), wanted]
    done = subprocess.run(install, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{wanted} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=RUN_LIMIT_S)

    origin = run("-c", "import uvicorn; print(uvicorn.__file__)").stdout
    assert origin.startswith(str(tmp_path))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS_OF_EXTENDED_CLASSES)
    assert done.returncode == 0, done.stdout[-4000:]
