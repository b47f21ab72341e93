"""Which build of torch `make` installs from which index, and what it says before."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from environment import install_torch
from environment.install_torch import CPU_INDEX, Choice, builds, choose, has_gpu, main, names_an_index

RELEASE = install_torch.pinned_release()
CPU, CUDA = f"torch==={RELEASE}+cpu", f"torch==={RELEASE}"
PYPI = f"torch (9.9.9)\nAvailable versions: 9.9.9, {RELEASE}, 2.6.0\n  LATEST:    9.9.9\n"
MIRROR = f"torch (9.9.9)\nAvailable versions: 9.9.9, {RELEASE}+cpu, {RELEASE}\n"
PYTORCH = f"torch (9.9.9+cpu)\nAvailable versions: 9.9.9+cpu, {RELEASE}+cpu\n"
UNREACHABLE = ""


class Pip:
    """Stands for pip: what its configuration is, and what it finds on the indexes it names and on PyTorch's."""

    def __init__(self, finds: str, *, on_pytorchs: str = UNREACHABLE, configuration: str = "") -> None:
        self.finds, self.on_pytorchs, self.configuration = finds, on_pytorchs, configuration
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> str:
        self.asked.append(arguments)
        if arguments == ("config", "list"):
            return self.configuration
        assert arguments[:3] == ("index", "versions", "torch")
        return self.on_pytorchs if CPU_INDEX in arguments else self.finds

    @property
    def asked_pytorchs(self) -> bool:
        return any(CPU_INDEX in words for words in self.asked)


def chosen(monkeypatch: pytest.MonkeyPatch, pip: Pip, wanted: str, index: str | None = None) -> Choice:
    monkeypatch.setattr(install_torch, "pip", pip)
    return choose(wanted, index)


def test_without_a_gpu_and_a_configuration_the_build_for_cpus_comes_from_pytorchs_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = chosen(monkeypatch, Pip(PYPI, on_pytorchs=PYTORCH), "cpu")
    assert (choice.build, choice.requirement, choice.index) == ("cpu", CPU, CPU_INDEX)
    assert choice.line == (
        f"Installing torch {RELEASE}+cpu for CPUs: about 200 MB to download; TORCH=cuda chooses the other build"
    )


def test_what_pip_is_configured_to_find_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(MIRROR, on_pytorchs=PYTORCH)
    choice = chosen(monkeypatch, pip, "cpu")
    assert (choice.requirement, choice.index) == (CPU, None) and not pip.asked_pytorchs


@pytest.mark.parametrize("option", ["index-url", "extra-index-url", "no-index"])
def test_no_index_is_added_to_those_that_somebody_chose(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    pip = Pip(PYPI, on_pytorchs=PYTORCH, configuration=f"global.cert='x'\nglobal.{option}='https://mirror/simple'\n")
    choice = chosen(monkeypatch, pip, "cpu")
    assert (choice.build, choice.requirement, choice.index) == ("cuda", CUDA, None) and not pip.asked_pytorchs
    assert "up to 2.7 GB" in choice.line and f"TORCH_INDEX=URL names an index that has one ({CPU_INDEX})" in choice.line


def test_pytorchs_index_out_of_reach_leaves_what_pip_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(monkeypatch, Pip(PYPI), "cpu")
    assert (choice.build, choice.requirement, choice.index) == ("cuda", CUDA, None)


def test_where_pip_finds_nothing_it_is_left_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("cpu", "cuda"):
        choice = chosen(monkeypatch, Pip(UNREACHABLE), wanted)
        assert (choice.build, choice.requirement, choice.index) == (wanted, "torch", None)


def test_a_gpu_gets_the_build_with_cuda_though_the_one_for_cpus_counts_as_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pip = Pip(MIRROR, on_pytorchs=PYTORCH)
    choice = chosen(monkeypatch, pip, "cuda")
    assert (choice.build, choice.requirement, choice.index) == ("cuda", CUDA, None) and not pip.asked_pytorchs
    only_cpu = chosen(monkeypatch, Pip(PYTORCH), "cuda")
    assert (only_cpu.build, only_cpu.requirement) == ("cpu", CPU) and "no GPU is used" in only_cpu.line


def test_an_index_that_is_given_is_asked_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(f"Available versions: {RELEASE}+cu126, {RELEASE}\n", configuration="global.index-url='https://mirror'")
    choice = chosen(monkeypatch, pip, "cuda", "https://else/whl")
    assert (choice.requirement, choice.index) == (f"torch==={RELEASE}+cu126", "https://else/whl")
    assert [words[-2:] for words in pip.asked] == [("--extra-index-url", "https://else/whl")]


def test_builds_are_told_apart_by_their_suffix() -> None:
    versions = ["3.0", "2.13.0+xpu", "2.13.0+rocm7.1", "2.13.0+cu130", "2.13.0+cu126", "2.13.0+cpu", "2.13.0", "2.12.1"]
    assert builds(versions, "2.13.0") == {"cpu": "2.13.0+cpu", "cuda": "2.13.0+cu130"}
    assert builds(versions, "2.12.1") == {"cpu": "", "cuda": "2.12.1"}
    assert builds(versions, "2.1") == {"cpu": "", "cuda": ""}


def test_indexes_in_pips_configuration() -> None:
    assert names_an_index(":env:.index-url='https://mirror/simple'")
    assert names_an_index("install.no-index='1'")
    assert not names_an_index("global.cert='/c.crt'\n:env:.find-links='/opt/wheels'\nglobal.trusted-host='index-url='")


def test_what_is_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(install_torch, "pip", Pip(PYPI, on_pytorchs=PYTORCH))
    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--build", "cpu"]) == 3, "make must see that pip failed"
    constraints = str(install_torch.CONSTRAINTS)
    words = ["install", "--quiet", "--constraint", constraints, CPU, "--extra-index-url", CPU_INDEX]
    assert commands[0][2:] == ["pip", *words]
    assert capfd.readouterr().out.startswith(f"Installing torch {RELEASE}+cpu for CPUs")


def test_a_gpu_is_found_by_the_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-1, NVIDIA H100, 81559, 9.0'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.path", ["kept"])
    assert has_gpu()
