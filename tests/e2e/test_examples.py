"""The programs in examples/, run as they are against a server with the demo model."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.documents import ROOT, read, readers_environment
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

WRITES = {
    "chat.py": r"What is my name\?\nModel: .*Clara",
    "json_schema.py": r"^Anna is 30 years old\.$",
    "many_requests.py": r"What is 2 plus 2\? .*4(.*\n){15}.*What is 5 plus 5\? .*10",
    "token_probabilities.py": r"' Paris' +\d+%   of ' Paris'",
    "tools.py": r"get_weather {'location': 'Paris'} -> .*\nModel: .*sunny",
}


def test_every_example_has_a_row_and_is_run() -> None:
    programs = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert programs == set(WRITES) == set(re.findall(r"^\| \[(\w+\.py)\]", read("examples/README.md"), re.M))


@pytest.mark.parametrize("name", WRITES)
def test_the_example_runs(server: RunningServer, name: str) -> None:
    command = [sys.executable, f"examples/{name}", f"http://127.0.0.1:{server.port}"]
    done = subprocess.run(
        command, cwd=ROOT, env=readers_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(WRITES[name], done.stdout, re.M), done.stdout
