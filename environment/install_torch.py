"""Installs the torch of constraints.txt into the environment whose Python runs this: the build for CPUs where there is
no NVIDIA GPU, else the one with CUDA. Packages come from where pip's configuration says; `make` runs this."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SIZES = {"cpu": "about 200 MB", "cuda": "up to 2.7 GB"}
"""Of torch 2.13.0 and all that it requires, for x86-64; with CUDA less where a package index has builds of its own."""
OTHER = {"cpu": "cuda", "cuda": "cpu"}
_PIP = (sys.executable, "-m", "pip")
_QUICK = ("--retries", "1", "--timeout", "10")
"""So that an index that cannot be reached costs seconds only."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    build: str
    """`cpu` or `cuda`: what is installed, which may differ from what was wanted."""
    requirement: str
    index: str | None
    """A package index beside those of pip's configuration."""
    line: str
    """What is downloaded, how much, and how to choose otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="install_torch.py", description=__doc__)
    parser.add_argument("--build", choices=tuple(SIZES), help="instead of the one that fits the machine")
    parser.add_argument("--index", metavar="URL", help="a package index beside those of pip's configuration")
    asked = parser.parse_args(arguments)
    choice = choose(asked.build or ("cuda" if has_gpu() else "cpu"), asked.index)
    sys.stdout.write(choice.line + "\n")
    sys.stdout.flush()
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    extra = ["--extra-index-url", choice.index] if choice.index else []
    command = [*_PIP, "install", *quiet, "--constraint", str(CONSTRAINTS), choice.requirement, *extra]
    return subprocess.run(command).returncode


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU, even if CUDA_VISIBLE_DEVICES hides it."""
    sys.path.insert(0, str(ROOT / "src"))
    from launcher.planning.hardware import detect

    hardware = detect({})
    return bool(hardware.gpus or hardware.unused_gpus)


def choose(wanted: str, index: str | None) -> Choice:
    """The wanted build if pip finds one, else the other. PyTorch's own index of builds for CPUs is asked only where
    pip's configuration leaves open where packages come from."""
    release = pinned_release()
    offered = builds(offered_versions(["--extra-index-url", index] if index else []), release)
    if wanted == "cpu" and not offered["cpu"] and not index and not names_an_index(pip("config", "list")):
        offered["cpu"] = builds(offered_versions(["--index-url", CPU_INDEX]), release)["cpu"]
        index = CPU_INDEX if offered["cpu"] else None
    build = wanted if offered[wanted] or not offered[OTHER[wanted]] else OTHER[wanted]
    version = offered[build]
    # `===` compares the text: `==2.13.0` takes 2.13.0+cpu too, and prefers it. Where pip finds no torch at all, it is
    # to say so itself.
    requirement = f"torch==={version}" if version else "torch"
    return Choice(build=build, requirement=requirement, index=index, line=line(version or release, wanted, build))


def pinned_release() -> str:
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found, f"{CONSTRAINTS} pins torch"
    return found[1]


def offered_versions(options: Sequence[str]) -> list[str]:
    """The versions of torch that pip finds for this Python, newest first; none if it reaches no index."""
    found = re.search(r"^Available versions: (.*)$", pip("index", "versions", "torch", *_QUICK, *options), re.MULTILINE)
    return found[1].split(", ") if found else []


def pip(*arguments: str) -> str:
    """What pip prints, empty if it fails."""
    answer = subprocess.run([*_PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return answer.stdout if answer.returncode == 0 else ""


def builds(versions: Sequence[str], release: str) -> dict[str, str]:
    """The newest version of each build of a release, empty if there is none. PyPI's, without a suffix, has CUDA."""
    suffixes = {version: version.partition("+")[2] for version in versions if version.partition("+")[0] == release}
    return {
        "cpu": next((version for version, suffix in suffixes.items() if suffix == "cpu"), ""),
        "cuda": next((version for version, suffix in suffixes.items() if re.fullmatch(r"(cu\d+)?", suffix)), ""),
    }


def names_an_index(configuration: str) -> bool:
    """Whether `pip config list` shows package indexes that the user chose: a mirror, others beside PyPI, or none."""
    return bool(re.search(r"^\S*\.(index-url|extra-index-url|no-index)=", configuration, re.MULTILINE))


def line(version: str, wanted: str, build: str) -> str:
    what = f"Installing torch {version} {'for CPUs' if build == 'cpu' else 'with CUDA'}: {SIZES[build]} to download"
    if build == wanted:
        return f"{what}; TORCH={OTHER[build]} chooses the other build"
    if wanted == "cpu":
        return f"{what}, since pip finds no build for CPUs; TORCH_INDEX=URL names an index that has one ({CPU_INDEX})"
    return f"{what}; no GPU is used, since pip finds no build with CUDA; TORCH_INDEX=URL names an index that has one"


if __name__ == "__main__":
    sys.exit(main())
