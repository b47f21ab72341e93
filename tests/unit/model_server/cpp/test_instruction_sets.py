"""Which library of C++ operators is used: the best that was built, that the CPU has and that agrees."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.cpp import instruction_sets as sets
from model_server.cpp.instruction_sets import SETS, candidates, flags, module, path, survey

NAMES = list(SETS)


@given(
    built=st.sets(st.sampled_from(NAMES)),
    supported=st.sets(st.sampled_from(NAMES)),
    cap=st.none() | st.sampled_from(NAMES),
)
def test_the_best_that_was_built_and_is_supported(built: set[str], supported: set[str], cap: str | None) -> None:
    found = candidates(built, supported, cap)
    assert set(found) == {name for name in built & supported if cap is None or NAMES.index(name) >= NAMES.index(cap)}
    assert found == sorted(found, key=NAMES.index)


class Machine:
    """Libraries in a folder, made up: `supported` by the CPU; those in `refused` must not run, the others say that they
    were built from the sources that lie there, unless they are in `stale`."""

    def __init__(self, folder: Path) -> None:
        (folder / "setup.py").touch()
        self.folder = folder = folder / "src" / "model_server" / "cpp"
        self.supported, self.refused, self.stale, self.broken = set(NAMES), set[str](), set[str](), set[str]()
        (folder / "source").mkdir(parents=True)
        (folder / "source" / "operators.cpp").write_text("// one\n")
        for library in (sets.FEATURES, *map(module, NAMES)):
            path(library, folder).touch()

    def load(self, library: str) -> object:
        name = next((name for name in NAMES if path(module(name), self.folder) == Path(library)), None)
        if (name or sets.FEATURES) in self.broken:
            raise OSError("GLIBC_9.0 not found")
        return Loaded(self, name)


class Loaded:
    def __init__(self, machine: Machine, name: str | None) -> None:
        def constant(value: int) -> Callable[[], int]:
            return lambda: value

        if name is None:
            self.cpu_supports = lambda asked: asked.decode() in machine.supported
            return
        (built_from,) = [flag for flag in flags(name, machine.folder) if "TERCET_SOURCES" in flag]
        sources = int(built_from.partition("=")[2].removesuffix("L"))
        self.cpp_sources = constant(sources + (name in machine.stale))
        self.cpp_prepare = constant(int(name in machine.refused))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", made.load)
    monkeypatch.setattr(sets, "is_served", lambda: True)
    return made


def test_the_best_is_taken_and_no_more_said(machine: Machine) -> None:
    found = survey(folder=machine.folder)
    assert (found.chosen, found.faults, found.lack()) == ("amx", (), None)
    assert survey("avx512", machine.folder).chosen == "avx512"
    machine.supported = {"avx2"}
    assert survey(folder=machine.folder).chosen == "avx2"
    assert survey("amx", machine.folder).chosen == "avx2"


def test_a_set_that_may_not_run_falls_back_to_the_next(machine: Machine) -> None:
    """As where the kernel does not hand out the tile registers."""
    machine.refused = {"amx"}
    found = survey(folder=machine.folder)
    assert found.chosen == "avx512_bf16" and found.lack() is None
    assert found.faults == ("the kernel does not let this process use amx",)


def test_a_library_that_cannot_be_loaded_falls_back_to_the_next(machine: Machine) -> None:
    machine.broken = {"amx", "avx512_bf16"}
    found = survey(folder=machine.folder)
    assert found.chosen == "avx512"
    assert found.faults[0] == "amx cannot be loaded (GLIBC_9.0 not found)"


def test_what_was_built_from_other_sources_is_not_used(machine: Machine) -> None:
    machine.stale = {"amx", "avx512_bf16"}
    found = survey(folder=machine.folder)
    assert found.chosen == "avx512"
    assert found.faults == ("built from other sources than those beside them: amx, avx512_bf16; run `make operators`",)
    machine.stale = set(NAMES)
    found = survey("avx2", machine.folder)
    assert found.chosen is None
    assert found.lack() == "built from other sources than those beside them: avx2; run `make operators`"


def test_an_installed_package_is_not_compared_with_its_sources(machine: Machine, tmp_path: Path) -> None:
    """A wheel may hold a source too many, left in the build folder by an earlier version."""
    machine.stale = set(NAMES)
    (tmp_path / "setup.py").unlink()
    assert survey(folder=machine.folder).chosen == "amx"


def test_a_change_of_sources_or_flags_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "one.hpp"
    source.write_text("// one\n")
    seen = {flags("avx2", tmp_path)[-1]}
    source.write_text("// two\n")
    seen.add(flags("avx2", tmp_path)[-1])
    source.rename(tmp_path / "source" / "two.hpp")
    seen.add(flags("avx2", tmp_path)[-1])
    monkeypatch.setattr(sets, "_FLAGS", ("-O1",))
    seen.add(flags("avx2", tmp_path)[-1])
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("gone", "supported", "cap", "lack"),
    [
        (NAMES, NAMES, None, "none were built: install g++"),
        ([], [], None, "this CPU has none of amx, avx512_bf16, avx512, avx2"),
        (["avx2"], ["avx2"], None, "built for amx, avx512_bf16, avx512, usable here are avx2: install Tercet again"),
    ],
)
def test_what_is_missing_is_said(machine: Machine, gone: list[str], supported: list[str], cap: None, lack: str) -> None:
    for name in gone:
        path(module(name), machine.folder).unlink()
    machine.supported = set(supported)
    found = survey(cap, machine.folder)
    assert found.chosen is None and (found.lack() or "").startswith(lack)


def test_a_cpu_that_cannot_be_asked(machine: Machine) -> None:
    machine.broken = {sets.FEATURES}
    found = survey(folder=machine.folder)
    assert (found.chosen, found.supported) == (None, ())
    assert found.lack() == "the CPU's features cannot be read (GLIBC_9.0 not found)"
