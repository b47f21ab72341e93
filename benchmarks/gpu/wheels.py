"""`python -m benchmarks.gpu.wheels`: fetches into `.whl` what a GPU machine without a network lacks, and this package.

The machine has Python 3.12 and what is in `PRESENT`. The versions are those of the GPU image's lock. Wheels and the
committed files travel together, and are refused above `MOST_BYTES`.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".whl"
LOCK = ROOT / "docker" / "requirements-cuda.txt"
PYTHON = "3.12"
MOST_BYTES = 64 * 2**20
# Newest first: the first that a project has wheels for is taken.
GLIBC = (35, 34, 31, 28, 27, 24, 17)

# On the machine already, some of it in other versions.
PRESENT = {
    "accelerate", "anyio", "click", "filelock", "fsspec", "hf-xet", "huggingface-hub", "jinja2", "markdown-it-py",
    "markupsafe", "mdurl", "mpmath", "networkx", "numpy", "packaging", "pillow", "psutil", "pygments", "pytest",
    "pyyaml", "regex", "safetensors", "setuptools", "shellingham", "sympy", "tokenizers", "torch", "tqdm",
    "transformers", "triton", "typer", "uvloop",
}  # fmt: skip
# What the package itself does not ask for, and its tests and the hub's client there do.
TOOLS = ("httpx2", "pytest-asyncio")


def normal(name: str) -> str:
    """A project's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def carried() -> list[str]:
    """Names of the projects: what the package depends on, directly or not, and the tools, without `PRESENT`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    waiting = [Requirement(text).name for text in project["dependencies"]] + list(TOOLS)
    while waiting:
        name = normal(waiting.pop())
        if name in PRESENT or name in found:
            continue
        found.add(name)
        waiting += _required_by(name)
    return sorted(found)


def _required_by(name: str) -> Iterator[str]:
    """By what this environment has of it."""
    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement.name


def pinned() -> dict[str, str]:
    """Versions by name, for all that is carried: the lock's, of tools this environment's."""
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", LOCK.read_text(), re.MULTILINE))
    locked = {normal(name): version for name, version in locked.items()}
    return {name: locked.get(name) or importlib.metadata.version(name) for name in carried()}


def tree_bytes() -> int:
    """Of the committed files, which travel too."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def check_size(num_bytes: int) -> None:
    """Raises SystemExit for more wheels than travel beside the tree."""
    tree = tree_bytes()
    text = f"wheels {num_bytes / 2**20:.1f} MiB, committed files {tree / 2**20:.1f} MiB"
    if num_bytes + tree > MOST_BYTES:
        raise SystemExit(f"{text}: together more than {MOST_BYTES / 2**20:.0f} MiB, which is what travels")
    print(text)


def fetch() -> None:
    """Download the wheels, and build this package's own: the launcher asks for its installed version."""
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    tags = [word for platform in platforms for word in ("--platform", platform)]
    wanted = [f"{name}=={version}" for name, version in pinned().items()]
    binary = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *tags]
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    subprocess.run([*pip, "download", "--quiet", *binary, "-d", str(FOLDER), *wanted], check=True)
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "-w", str(FOLDER), str(ROOT)], check=True)
    check_size(sum(path.stat().st_size for path in FOLDER.glob("*.whl")))


if __name__ == "__main__":
    fetch()
