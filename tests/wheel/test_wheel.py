"""The wheel of `make wheel`: its tags, its files, and an answer of what is installed from it alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest
from support.running_server import running_server

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("WHEEL_PYTHONS", sys.executable).split()
"""With which it is tried; each is a command."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


def test_one_wheel_for_every_python_and_most_linuxes(wheel: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"tercet-{version}-py3-none-{os.environ['WHEEL_PLATFORM']}.whl"
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel)], check=True)


def test_it_has_all_of_src_and_the_operators(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = {name.removeprefix("src/") for name in listed.splitlines()}
    libraries = ("cpu_features", *(f"operators_{name}" for name in ("amx", "avx2", "avx512", "avx512_bf16")))
    wanted |= {f"model_server/cpp/{name}.so" for name in libraries}
    names = zipfile.ZipFile(wheel).namelist()
    found = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    assert found == wanted


@pytest.mark.parametrize("python", PYTHONS)
def test_it_serves_the_demo_model(wheel: Path, python: str, tmp_path: Path) -> None:
    """Installed as docs/install.md says, so beside the newest versions of all but torch."""
    subprocess.run([python, "-m", "venv", str(tmp_path / "env")], check=True)
    installed = tmp_path / "env" / "bin"
    torch = [str(ROOT / "environment" / "install_torch.py"), "--build", "cpu"]
    subprocess.run([str(installed / "python"), *torch], check=True)
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([str(installed / "pip"), "install", "--quiet", *constraints, str(wheel)], check=True)
    environ = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    told = subprocess.run(
        [str(installed / "python"), "-P", "-m", "model_server.cpp"],
        cwd=tmp_path, env=os.environ | environ, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "Built for: amx, avx512_bf16, avx512, avx2\n" in told.stdout
    with running_server("demo", command=[str(installed / "launcher")], cwd=tmp_path, environ=environ) as server:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
