"""`make run` and `make test` refuse a Python that is too old with one line, before they make anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def fake_python(path: Path, version: str) -> Path:
    """Says that it is of this version; as `-m venv FOLDER` it writes the folder's name to `made` beside itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.parent / "made"
    path.write_text(f'#!/bin/sh\ncase "$1 $2" in -c*) echo {version};; "-m venv") echo "$3" >> {log};; esac\n')
    path.chmod(0o755)
    return path


def make(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With `tmp_path/bin` first on PATH, and the environment below tmp_path."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
    command = ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)


def create(tmp_path: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "environment" / "create.sh"), str(python), str(tmp_path / "venv"), "make run"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("target", ["run", "test"])
def test_an_old_python_is_named_with_what_is_needed_and_how_to_choose(tmp_path: Path, target: str) -> None:
    fake_python(tmp_path / "bin" / "python3", "3.9.2")
    answer = make(tmp_path, target)
    assert answer.returncode == 2 and answer.stdout == ""
    said, makes_own = answer.stderr.splitlines()
    assert said == (
        "error: python3 is Python 3.9.2; Python 3.11 or newer is needed, "
        f"choose another: make {target} PYTHON=python3.12"
    )
    assert makes_own.startswith("make: ***")
    assert not (tmp_path / "bin" / "made").exists() and not (tmp_path / "venv").exists()


def test_without_a_target_the_command_is_make_run(tmp_path: Path) -> None:
    answer = make(tmp_path, "PYTHON=no-such-python")
    assert answer.stderr.startswith("error: no-such-python does not run; Python 3.11 or newer is needed")
    assert "make run PYTHON=python3.12" in answer.stderr


@pytest.mark.parametrize(
    ("version", "is_new_enough"),
    [("2.7.18", False), ("3.6.15", False), ("3.10.13", False), ("3.11.0", True), ("3.11.0rc2", True), ("3.14.1", True)],
)
def test_versions_are_compared_as_numbers(tmp_path: Path, version: str, is_new_enough: bool) -> None:
    answer = create(tmp_path, fake_python(tmp_path / "bin" / "python", version))
    assert (answer.returncode == 0) == is_new_enough, answer.stderr
    assert (tmp_path / "bin" / "made").exists() == is_new_enough


def test_an_environment_of_another_python_is_not_taken_for_the_one_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    python = fake_python(tmp_path / "bin" / "python", "3.12.1")
    fake_python(tmp_path / "venv" / "bin" / "python", "3.11.7")
    answer = create(tmp_path, python)
    assert answer.returncode == 1
    folder = tmp_path / "venv"
    assert answer.stderr == (
        f"error: {folder} was made by Python 3.11.7, {python} is 3.12.1; remove it first: rm -r {folder}\n"
    )
    fake_python(tmp_path / "venv" / "bin" / "python", "3.12.9")
    assert create(tmp_path, python).returncode == 0


def test_an_environment_whose_python_is_gone_is_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    answer = create(tmp_path, fake_python(tmp_path / "bin" / "python", "3.12.1"))
    assert "was made by a Python that no longer runs" in answer.stderr and "rm -r" in answer.stderr
