"""Children that read strangers' files: what they inherit, and what is said of their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_server.errors import StartupError
from model_server.weights.conversion import clean_process


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child` that the process finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child.py"


def run(tmp_path: Path, *passed_on: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    clean_process.run(
        "child", source, target, subject="the file", passed_on=passed_on, environment={"ADDED": "yes"}
    )  # fmt: skip


def test_secrets_stay_here(module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HOME", "/home/someone")
    module.write_text("import os, sys, pathlib\npathlib.Path(sys.argv[2]).write_text(' '.join(sorted(os.environ)))\n")
    run(tmp_path)
    names = (tmp_path / "target").read_text().split()
    assert {"ADDED", "PYTHONPATH"} <= set(names) and not {"HF_TOKEN", "HOME"} & set(names)
    run(tmp_path, "HOME")
    assert "HOME" in (tmp_path / "target").read_text().split()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('one'); print('cannot be read'); raise SystemExit(1)", "cannot be read"),
        ("raise SystemExit('only here')", "only here"),
        ("raise SystemExit(1)", "the file: the conversion failed"),
        ("import os; os.kill(os.getpid(), 9)", "the file: the conversion was ended by signal 9 (out of memory?)"),
        ("print('x' * 600); raise SystemExit(1)", "x" * 500),
    ],
    ids=["stdout", "stderr", "silent", "killed", "long"],
)
def test_the_end_is_told_in_one_line(module: Path, tmp_path: Path, code: str, message: str) -> None:
    module.write_text(code)
    with pytest.raises(StartupError) as refused:
        run(tmp_path)
    assert str(refused.value) == message
