"""What images, CI and `make` install: exact, of images hashed, the same everywhere, and enough for what the project
asks for."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
KINDS = ("cpu", "cuda")
OF_TESTS = ("bench", "convert", "lint", "trace")
"""The extras within the extra `test`."""


def locked(kind: str) -> dict[str, tuple[Version, list[str]]]:
    """Version and hashes of each package. Fails on a line of any other kind."""
    text = (ROOT / "docker" / f"requirements-{kind}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line)
        assert match, f"not one package with version and hashes: {line}"
        found[match[1]] = (Version(match[2]), match[3].split())
    return found


@pytest.fixture(params=KINDS)
def lock(request: pytest.FixtureRequest) -> dict[str, tuple[Version, list[str]]]:
    return locked(request.param)


def made_by_make() -> dict[str, str]:
    """Version of each package but torch."""
    lines = (ROOT / "environment" / "locked.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def project() -> list[Requirement]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        about = tomllib.load(file)["project"]
    return [Requirement(text) for text in about["dependencies"] + about["optional-dependencies"]["trace"]]


def test_every_dependency_is_there_in_an_allowed_version(lock: dict[str, tuple[Version, list[str]]]) -> None:
    for wanted in project():
        version, _ = lock[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}, locked {version}: run `make locks`"


def test_torch_is_the_one_that_is_tested(lock: dict[str, tuple[Version, list[str]]]) -> None:
    pin = Requirement((ROOT / "constraints.txt").read_text().strip())
    assert pin.specifier.contains(lock[pin.name][0])


def test_the_cpu_image_has_no_cuda() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    assert cpu["torch"][0].local == "cpu" and cuda["torch"][0].local is None
    assert not [name for name in cpu if name.startswith(("nvidia-", "triton", "cuda-"))]
    assert "triton" in cuda and "nvidia-nccl-cu13" in cuda


def test_both_images_have_the_same_versions() -> None:
    cpu, cuda = locked("cpu"), locked("cuda")
    different = {name for name in cpu if cuda[name][0].public != cpu[name][0].public}
    assert not different


def test_the_lock_of_make_is_that_of_the_images_and_has_what_tests_need() -> None:
    images = {name: version.public for name, (version, _) in locked("cpu").items() if name != "torch"}
    made = made_by_make()
    assert images.items() <= made.items()
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for wanted in map(Requirement, (line for extra in ("test", *OF_TESTS) for line in extras[extra])):
        name = canonicalize_name(wanted.name)
        assert name == "tercet" or made[name] in wanted.specifier, f"{wanted}: run `make locks`"


@pytest.mark.parametrize("target", [".installed", ".installed-test"])
def test_make_installs_by_the_lock(target: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", f"VENV={tmp_path}", str(tmp_path / target)]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    (install,) = (line for line in asked.splitlines() if "--editable" in line)
    assert "-c constraints.txt -c environment/locked.txt" in install


def test_what_is_installed_here_is_what_is_locked() -> None:
    """Of an environment that `make` made. Fails where packages were installed past the lock, or the lock was raised
    after the environment was made."""
    here = {canonicalize_name(one.metadata["Name"]): one.version for one in distributions()}
    wanted = made_by_make() | {"torch": locked("cpu")["torch"][0].public}
    different = {name: here[name] for name, version in wanted.items() if Version(here[name]).public != version}
    assert not different, "make the environment again: `rm -r .venv` and `make test`"
