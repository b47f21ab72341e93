"""The commands and programs of the documents, run as they are written against a server with the demo model."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import documents
from support.documents import Example
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

DOCUMENTS = (
    "README.md",
    "docs/first-ten-minutes.md",
    "docs/migrating-from-tgi.md",
    "docs/migrating-from-vllm.md",
    "docs/structured-outputs.md",
    "docs/tools-and-reasoning.md",
)
EXAMPLES = [
    pytest.param(example, id=f"{name}-{index}")
    for name in DOCUMENTS
    for index, example in enumerate(documents.examples(name))
]
_SHELLS = {"bash": ["bash", "-c"], "python": [sys.executable, "-c"]}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_is_an_example(name: str) -> None:
    examples = documents.examples(name)
    text = documents.read(name)
    assert len(examples) == text.count("\ncurl ") + text.count("\n```python\n")
    assert examples


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_answers_what_it_says(server: RunningServer, example: Example) -> None:
    command = example.command.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    answer = subprocess.run(
        [*_SHELLS[example.language], command],
        env=documents.readers_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert re.search(example.pattern, answer.stdout, re.DOTALL), f"{command}\n{answer.stdout}"
