"""The curl commands of the documents, run as they stand against a server with the demo model."""

from __future__ import annotations

import re
import subprocess

import pytest
from support import documents
from support.running_server import RunningServer

pytestmark = pytest.mark.e2e

DOCUMENTS = ("README.md", "docs/migrating-from-tgi.md", "docs/migrating-from-vllm.md")
EXAMPLES = [
    pytest.param(command, pattern, id=f"{name}-{index}")
    for name in DOCUMENTS
    for index, (command, pattern) in enumerate(documents.examples(name))
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_curl_command_is_an_example(name: str) -> None:
    examples = documents.examples(name)
    assert len(examples) == documents.read(name).count("\ncurl ")
    assert len(examples) >= 4


@pytest.mark.parametrize(("command", "pattern"), EXAMPLES)
def test_the_example_answers_what_it_says(server: RunningServer, command: str, pattern: str) -> None:
    command = command.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(pattern, answer.stdout, re.DOTALL), f"{command}\n{answer.stdout}"
