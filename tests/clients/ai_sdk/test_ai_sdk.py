"""The AI SDK for JavaScript, with each of its providers: text, streams, objects, tools, a full context."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELLO_BACK = "Hello! 2 plus 3 is 5."


@pytest.mark.parametrize("api", ["compatible", "chat", "responses", "messages"])
def test_all(url: str, api: str) -> None:
    """The SDK knows a full context by the words of the error: those are what a user reads, too."""
    outcomes = _asked(api, url)
    answer = outcomes["text"]
    assert (answer["text"], answer["reason"]) == (HELLO_BACK, "stop") and answer["tokens"] > 5
    stream = outcomes["stream"]
    assert ("".join(stream["parts"]), stream["reason"]) == (HELLO_BACK, "stop") and len(stream["parts"]) > 5
    assert outcomes["object"] == {"name": "Anna", "age": 30}
    # The demo model calls again with each result; the program stops at the second.
    assert outcomes["tools"] == {"places": ["Paris", "Paris"], "reasons": ["tool-calls"] * 2}
    words = "tokens > 4095 maximum" if api == "messages" else "maximum context length is 4095 tokens"
    for kind in ("too long", "too long streamed"):
        refused = outcomes[kind]
        assert words in refused["refused"] and (refused["status"], refused["retryable"]) == (400, False)


def _asked(api: str, url: str) -> dict[str, Any]:
    """What came of each question."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node.js: apt-get install nodejs npm")
    # A script finds the packages in a folder above it, which is the group's environment.
    script = shutil.copy(Path(__file__).with_name("asked.mjs"), sys.prefix)
    done = subprocess.run([node, script, api, url], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes
