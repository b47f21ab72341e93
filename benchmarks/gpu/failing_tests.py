"""A plugin of pytest that writes each failed test down at once: what a run has found stays if it is cut off.

For `-p benchmarks.gpu.failing_tests`; the files are named in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.gpu.record import Line

# A line of a report for each failure; and a line for each test that has passed or failed.
LINES, DONE = "FAILING_TESTS_LINES", "FAILING_TESTS_DONE"
MOST_CHARACTERS = 1500


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for each phase of each test."""
    if report.failed:
        detail = report.longreprtext[-MOST_CHARACTERS:]
        _append(LINES, Line("check", report.nodeid, passed=False, detail=detail).to_text())
    if report.failed or (report.when == "call" and report.passed):
        _append(DONE, f"{report.outcome} {report.nodeid}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported fails, too."""
    if report.failed:
        detail = str(report.longrepr)[-MOST_CHARACTERS:]
        _append(LINES, Line("check", report.nodeid, passed=False, detail=detail).to_text())


def _append(name: str, text: str) -> None:
    with Path(os.environ[name]).open("a") as file:
        file.write(text + "\n")
