"""The README's curl commands, run as they stand against a server with the demo model."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

README = Path(__file__).parents[2] / "README.md"
EXAMPLE = re.compile(r"<!-- expects: (?P<pattern>.+?) -->\n```bash\n(?P<command>.+?)\n```", re.DOTALL)
EXAMPLES = [(m["command"], m["pattern"]) for m in EXAMPLE.finditer(README.read_text())]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo") as running:
        yield running


def test_every_curl_command_of_the_readme_is_an_example() -> None:
    assert len(EXAMPLES) == README.read_text().count("\ncurl ")
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(("command", "pattern"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_the_example_answers_what_it_says(server: RunningServer, command: str, pattern: str) -> None:
    command = command.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(pattern, answer.stdout, re.DOTALL), f"{command}\n{answer.stdout}"
