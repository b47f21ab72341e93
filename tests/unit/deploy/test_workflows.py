"""The hosted checks run what every submission runs, and the tests on every Python that the package supports."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.documents import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*"))


def _steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_targets_that_workflows_run_are_there() -> None:
    asked = [step.get("run", "") for path in WORKFLOWS for step in _steps(path)]
    words = [word for command in asked if command.startswith("make ") for word in shlex.split(command)[1:]]
    named = {word for word in words if "=" not in word}
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    assert {"audit", "fake-card", "test-clients", "test", "test-lowest", "wheel"} <= named <= targets


def test_one_workflow_runs_the_checks_of_a_submission() -> None:
    assert [path.name for path in WORKFLOWS if any(step.get("run") == "bash .ci/run" for step in _steps(path))]
    assert (ROOT / ".ci" / "run").is_file()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_can_only_read(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}


def test_the_tests_run_on_every_python_of_the_classifiers() -> None:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    tested = {version for job in jobs if "strategy" in job for version in job["strategy"]["matrix"]["python"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    stated = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project["classifiers"]]
    assert {match[1] for match in stated if match} <= {oldest, *tested}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_other_jobs_use_the_oldest_python(workflow: Path) -> None:
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    asked = [step["with"]["python-version"] for step in _steps(workflow) if "setup-python" in step.get("uses", "")]
    runs = {versions.splitlines()[-1].strip() for versions in asked}  # of several the last is `python3`
    assert runs - {"${{ matrix.python }}"} == {oldest.removeprefix(">=")}
