"""What travels to a GPU machine without a network: all that it lacks, and not more than fits."""

from __future__ import annotations

import importlib.metadata
import zlib

import pytest

from benchmarks.gpu import wheels

# What was missing on the machine when it was first used.
WERE_MISSING = {
    "fastapi", "uvicorn", "llguidance", "fastapi-offline", "httpcore2", "httpx2", "h11", "idna", "truststore",
    "pytest-asyncio",
}  # fmt: skip


def test_all_that_the_machine_lacks_is_carried() -> None:
    found = wheels.pinned()
    assert set(found) >= WERE_MISSING
    assert not set(found) & wheels.PRESENT
    assert all(found.values())
    locked = wheels.LOCK.read_text()
    unlocked = [name for name, version in found.items() if f"\n{name}=={version} " not in locked]
    assert set(unlocked) <= set(wheels.TOOLS), "versions are the GPU image's"


def test_it_fits() -> None:
    """By what is installed here, compressed as lightly as a wheel never is."""
    files = [
        path
        for name in wheels.carried()
        for file in importlib.metadata.files(name) or ()
        if (path := file.locate()).is_file() and path.suffix != ".pyc"
    ]
    size = sum(len(zlib.compress(path.read_bytes(), 1)) for path in files)
    own = sum(path.stat().st_size for path in (wheels.ROOT / "src").rglob("*") if path.is_file())
    wheels.check_size(size + own // 2)
    with pytest.raises(SystemExit, match="more than 64 MiB"):
        wheels.check_size(64 * 2**20)
