"""Codex, set up by `launcher launch`, does a task with a tool of its own through /v1/responses."""

from __future__ import annotations

from pathlib import Path

import pytest
from coding_agents import launched, program, quiet_home

TASK = "Make a file made.txt"


# Codex gives names that it knows all tools in an item of the conversation, and one that runs programs.
@pytest.mark.timeout(500)
@pytest.mark.parametrize("model", [None, "gpt-6-sol"])
def test_a_task(agent_url: str, tmp_path: Path, model: str | None) -> None:
    codex = program("codex")
    environ = quiet_home(tmp_path / "home")
    launched("codex", agent_url, environ)
    named = [] if model is None else ["-m", model]
    work = tmp_path / "work"
    work.mkdir()
    options = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    done = codex(["exec", *named, *options, TASK], work, environ)
    assert done.stdout.strip() == "It is done.", done.stderr
    assert (work / "made.txt").read_text() == "made by a tool\n"
    assert "error" not in done.stderr.lower(), done.stderr
