"""opencode, set up by `launcher launch`, does a task with a tool of its own through /v1/chat/completions."""

from __future__ import annotations

from pathlib import Path

import pytest
from coding_agents import launched, program, quiet_home


@pytest.mark.timeout(500)
def test_a_task(agent_url: str, tmp_path: Path) -> None:
    opencode = program("opencode")
    environ = quiet_home(tmp_path / "home") | {"OPENCODE_DISABLE_AUTOUPDATE": "1"}
    launched("opencode", agent_url, environ)
    work = tmp_path / "work"
    work.mkdir()
    done = opencode(["run", "Make a file made.txt"], work, environ)
    assert done.stdout.strip() == "It is done.", done.stderr
    assert (work / "made.txt").read_text() == "made by a tool\n"
