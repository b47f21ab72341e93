"""Python children: what they import from, wherever they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wire.processes.python_child import child_environment, module_command, script_command


@pytest.fixture
def hostile_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; each module in it leaves a file `ran` when it is imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("types", "json", "child", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    "paths", [None, "", os.pathsep, f"{os.pathsep}/no/such/folder", f"/no/such/folder{os.pathsep}"]
)
def test_nothing_comes_from_the_working_folder(hostile_folder: Path, paths: str | None) -> None:
    environ = dict(os.environ) if paths is None else {**os.environ, "PYTHONPATH": paths}
    code = (
        "import subprocess, sys, json, types; subprocess.run([sys.executable, '-c', 'import json, types'], check=True)"
    )
    (hostile_folder.parent / "script.py").write_text(code)
    (hostile_folder.parent / "installed").mkdir()
    (hostile_folder.parent / "installed" / "child.py").write_text(code)
    for command in (module_command("child"), script_command(hostile_folder.parent / "script.py")):
        env = child_environment(environ)
        env["PYTHONPATH"] = os.pathsep.join(
            [*filter(None, [env.get("PYTHONPATH")]), str(hostile_folder.parent / "installed")]
        )
        subprocess.run(command, env=env, check=True, timeout=60)
    assert not (hostile_folder / "ran").exists()


def test_import_paths_of_the_users_stay_the_same_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "child.py").write_text("print('mine')")
    env = child_environment({**os.environ, "PYTHONPATH": f"{os.pathsep}mine"})
    done = subprocess.run(module_command("child"), env=env, cwd="/", check=True, timeout=60, capture_output=True)
    assert done.stdout == b"mine\n"


def test_the_environment_is_this_process_own_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME_OF_A_TEST", "yes")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert child_environment()["NAME_OF_A_TEST"] == "yes"
    assert child_environment({"A": "b"}) == {"A": "b", "PYTHONSAFEPATH": "1"}
    assert module_command("m")[0] == sys.executable
