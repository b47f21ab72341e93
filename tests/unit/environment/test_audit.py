"""`make audit`: the locked versions, what has an advisory, and a database that does not answer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILE = Path(__file__).parents[3] / "environment" / "audit.py"


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(audit: ModuleType, monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> tuple[int, list[str]]:
    """With what pip-audit prints; the status, and the versions that it was asked about."""
    asked: list[str] = []

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        asked.extend(Path(command[command.index("--requirement") + 1]).read_text().split())
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", answer)
    return audit.main(), asked


def test_each_locked_version_is_asked_about_once(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"dependencies": [{"name": "rich", "version": "15.0.0", "vulns": []}]}
    status, asked = run(audit, monkeypatch, json.dumps(found))
    assert status == 0
    names = [line.split("==")[0] for line in asked]
    assert {"starlette", "torch", "triton", "pytest"} <= set(names) and len(set(names)) == len(names)


def test_an_advisory_is_named(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advisory = {"id": "PYSEC-2025-1", "fix_versions": ["0.49.1"], "aliases": [], "description": "slow"}
    found = {"dependencies": [{"name": "starlette", "version": "0.40.0", "vulns": [advisory]}]}
    status, _ = run(audit, monkeypatch, json.dumps(found))
    assert status == 1 and "starlette 0.40.0: PYSEC-2025-1, fixed in 0.49.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stdout, stderr",
    [
        (json.dumps({"dependencies": [{"name": "rich", "skip_reason": "Dependency not found on PyPI"}]}), ""),
        ("", "Traceback\nrequests.exceptions.ConnectionError: pypi.org\n"),
    ],
)
def test_a_database_that_does_not_answer_is_an_error_of_its_own(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdout: str, stderr: str
) -> None:
    status, _ = run(audit, monkeypatch, stdout, stderr)
    told = capsys.readouterr().err
    assert status == audit.UNANSWERED and "has to" in told and "https://pypi.org/pypi/" in told
