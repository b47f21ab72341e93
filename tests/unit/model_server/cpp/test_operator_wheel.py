"""A wheel holds the C++ operators for every instruction set, and runs where it was not built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from model_server.cpp.instruction_sets import FEATURES, SETS, flags, is_served, module, path, survey

ROOT = Path(__file__).parents[4]
DRIVER = ROOT / "tests" / "support" / "operators_alone.py"
COMPILER, EMULATOR, SETARCH = map(shutil.which, ("g++", "qemu-x86_64", "setarch"))
PATIENCE_S = 800.0
LIBRARIES = {path(library).name for library in (FEATURES, *map(module, SETS))}

pytestmark = [
    pytest.mark.skipif(not is_served(), reason="the operators are for Linux on x86-64"),
    pytest.mark.timeout(1800),  # several builds
]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
needs_emulator = pytest.mark.skipif(EMULATOR is None, reason="needs qemu-x86_64 (Debian: qemu-user)")


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CXXFLAGS")} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def copy_sources(tree: Path) -> None:
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)


def build(folder: Path, *before: str, platform: str = "linux_x86_64", **env: str) -> Path:
    """A wheel of this tree, as pip makes it, unpacked in a folder of its own. Nothing is fetched.

    before: what pip is run by. platform: what the wheel is for.
    """
    tree = folder / "tree"
    copy_sources(tree)
    pip = (
        *before,
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        "..",
        ".",
    )
    done = run(*pip, cwd=tree, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "unpacked")
    shutil.rmtree(tree)
    return folder / "unpacked"


def libraries(unpacked: Path) -> set[str]:
    return {library.name for library in unpacked.rglob("*.so")}


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def emulated(cpu: str, unpacked: Path, tmp_path: Path) -> list[str]:
    """What the driver prints on a CPU with fewer features."""
    assert EMULATOR is not None
    return lines(run(EMULATOR, "-cpu", cpu, os.path.realpath(sys.executable), str(DRIVER), str(unpacked), cwd=tmp_path))


@pytest.mark.weekly
def test_without_a_compiler_a_wheel_is_built_and_says_what_it_lacks(tmp_path: Path) -> None:
    unpacked = build(tmp_path, CXX="/no/such/compiler", CC="/no/such/compiler")
    assert libraries(unpacked) == set()
    done = run(sys.executable, "-m", "model_server.cpp", cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "No C++ operators, torch's are used: none were built: install g++ (11 or newer) and then Tercet again "
        "(in a checkout: make operators)",
    ]


@pytest.mark.weekly
@pytest.mark.skipif(SETARCH is None, reason="needs setarch (Debian: util-linux)")
def test_on_another_architecture_a_wheel_is_plain_python(tmp_path: Path) -> None:
    """What the kernel calls the machine is all that the build knows of it."""
    assert SETARCH is not None
    if subprocess.run([SETARCH, "i686", "true"], timeout=PATIENCE_S).returncode:
        pytest.skip("this kernel does not change what it calls the machine")
    unpacked = build(tmp_path, SETARCH, "i686", platform="any")
    assert libraries(unpacked) == set()
    done = run(SETARCH, "i686", sys.executable, "-m", "model_server.cpp", cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert done.stdout == ("No C++ operators, torch's are used: they are for Linux on x86-64, this is linux on i686\n")


@pytest.mark.weekly
def test_a_compiler_that_lacks_a_set_loses_that_set_alone(tmp_path: Path) -> None:
    compiler = tmp_path / "old-g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-mamx-tile*) echo unknown option >&2; exit 1;; esac\n'
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    compiler.chmod(0o700)
    unpacked = build(tmp_path, CXX=str(compiler))
    assert libraries(unpacked) == LIBRARIES - {path(module("amx")).name}


@pytest.mark.long
@needs_compiler
@pytest.mark.skipif(not survey().supported, reason="needs a CPU with AVX2")
def test_a_checkout_builds_what_its_cpu_has(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    supported = survey().supported
    compiler = tmp_path / "quick-g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *operators.cpp*) ;; *) exec g++ "$@";; esac\n'
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    compiler.chmod(0o700)

    def built(**env: str) -> set[str]:
        command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
        done = run(*command, cwd=tmp_path, CXX=str(compiler), **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return libraries(tmp_path / "src")

    features = path(FEATURES).name
    assert built(OPERATOR_SETS="all") == LIBRARIES
    assert built() == {features, path(module(supported[0])).name}
    assert built(OPERATOR_SETS="supported") == {features, *(path(module(name)).name for name in supported)}
    (tmp_path / "src" / "model_server" / "cpp" / "source" / "cpu_features.cpp").write_text(
        'extern "C" int cpu_supports(const char*) { return 1; }\n'
    )
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mamx-tile*) exit 1;; esac\n{compiler.read_text()}')
    assert built() == {features, path(module("avx512_bf16")).name}
    done = run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=tmp_path, OPERATOR_SETS="most")
    assert done.returncode == 1 and "OPERATOR_SETS is 'most': it may be all, supported, best" in done.stderr


@pytest.mark.skipif(survey("avx2").chosen is None, reason="needs the C++ operators")
@needs_emulator
def test_fewer_features_choose_another_set_with_the_same_bits(tmp_path: Path) -> None:
    """The libraries of this checkout, where the CPU has AVX2 alone and where only that may be used."""
    source = ROOT / "src"
    capped = run(sys.executable, str(DRIVER), str(source), cwd=tmp_path, TERCET_INSTRUCTION_SET="avx2")
    masked = emulated("Haswell", source, tmp_path)
    assert masked[0] == "avx2" and masked == lines(capped)
    assert emulated("Nehalem", source, tmp_path) == ["None"]


@pytest.mark.weekly
@needs_compiler
@needs_emulator
def test_a_wheel_runs_on_a_cpu_with_avx2_alone_as_that_machines_own_build(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    assert libraries(wheel) == LIBRARIES
    folder = wheel / "model_server" / "cpp"
    assert {source.name for source in (folder / "source").iterdir()} == {
        source.name for source in (ROOT / "src" / "model_server" / "cpp" / "source").iterdir()
    }
    masked = emulated("Haswell", wheel, tmp_path)
    assert masked[0] == "avx2"
    # What -march=native means there.
    assert COMPILER is not None
    own = [flag for flag in flags("avx2", folder) if not flag.startswith("-march")] + ["-march=haswell"]
    done = run(COMPILER, *own, "source/operators.cpp", "-o", str(path(module("avx2"), folder)), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert emulated("Haswell", wheel, tmp_path) == masked
