"""The installed commands: a module in the place of one of our packages is named and not run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tercet

COMMANDS = ("launcher", "router", "model_server")


def run(command: str, folder: Path, *, paths: str | None = None) -> subprocess.CompletedProcess[str]:
    """`command --version`, as the installed script runs it, in `folder`."""
    program = f"import sys; sys.argv[0] = 'x'; from tercet import {command}; sys.exit({command}())"
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "--version"],
        env={**os.environ, "PYTHONPATH": str(folder) if paths is None else paths},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["launcher", "router", "model_server", "wire"])
@pytest.mark.parametrize("form", ["module", "package"])
def test_an_intruder_is_named_and_not_run(tmp_path: Path, name: str, form: str) -> None:
    intruder = tmp_path / (f"{name}.py" if form == "module" else f"{name}/__init__.py")
    intruder.parent.mkdir(exist_ok=True)
    intruder.write_text("raise SystemExit('it was run')\n")
    for command in ("launcher", "router"):
        done = run(command, tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"Error: '{intruder}' would be imported instead of Tercet's own '{name}': rename it, or take its folder "
            "off the import path (PYTHONPATH, *.pth files)\n"
        )
        assert run(command, tmp_path, paths="").returncode == 0  # it merely lies in the working folder


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_in_the_way_is_no_intruder(tmp_path: Path, command: str) -> None:
    (tmp_path / "router").mkdir()  # Python prefers a package with an __init__.py, wherever that is
    (tmp_path / "router" / "notes.txt").touch()
    behind = os.pathsep.join([str(Path(tercet.__file__).parents[1]), str(tmp_path)])
    (tmp_path / "wire.py").write_text("raise SystemExit('it was run')\n")
    done = run(command, tmp_path, paths=behind)
    assert (done.returncode, done.stderr) == (0, "")


def test_python_m_in_a_folder_with_a_module_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "router.py").write_text("raise SystemExit('it was run')\n")
    done = subprocess.run([sys.executable, "-m", "launcher", "--version"], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0  # its router is started without this folder


def test_the_same_folder_by_a_link_is_no_intruder(tmp_path: Path) -> None:
    """`python -m launcher` in the folder of our packages finds them there, its children by the import path."""
    home = Path(tercet.__file__).parents[1]
    (tmp_path / "link").symlink_to(home)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "link")}
    command = [sys.executable, "-m", "launcher", "--version"]
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_installed_command_is_one_of_these() -> None:
    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts.values()) == {f"tercet:{name}" for name in COMMANDS}


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert tercet.launcher() == 130
