"""What the images install: exact, hashed, and enough for what the project asks for."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
KINDS = ("cpu", "cuda")


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


def test_the_environments_of_make_have_the_versions_of_the_images(tmp_path: Path) -> None:
    (tmp_path / ".torch").touch()  # as after torch was installed
    file = tmp_path / ".locked.txt"
    made = subprocess.run(["make", f"VENV={tmp_path}", str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    versions = {name: version for name, (version, _) in locked("cpu").items() if name != "torch"}
    constraints = [Requirement(line) for line in file.read_text().splitlines()]
    assert {one.name: str(one.specifier) for one in constraints} == {n: f"=={v}" for n, v in versions.items()}
