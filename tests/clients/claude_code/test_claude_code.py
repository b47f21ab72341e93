"""Claude Code, set up by `launcher launch`, reads a file with its own tool through /v1/messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from coding_agents import launched, path_of, program, quiet_home

SECRET = "the secret word is plover"
OPTIONS = ["--tools", "Read", "--output-format", "stream-json", "--verbose"]
LIMIT_S = 200


@pytest.fixture
def environ(agent_url: str, tmp_path: Path) -> dict[str, str]:
    environ = quiet_home(tmp_path / "home")
    launched("claude", agent_url, environ)
    return environ


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text(SECRET + "\n")
    return folder


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.timeout(500)
def test_a_task(environ: Mapping[str, str], work: Path) -> None:
    done = program("claude")(["-p", "What is in notes.txt?", *OPTIONS], work, environ)
    events = events_of(done.stdout)
    [first, *_, last] = events
    assert first["claude_code_version"] and first["tools"] == ["Read"]
    assert last["result"] == "It is done." and last["num_turns"] == 2 and not last["is_error"], done.stdout
    [read] = [event for event in events if event["type"] == "user"]
    assert SECRET in read["message"]["content"][0]["content"]
    assert last["usage"]["cache_read_input_tokens"] > 1000  # the conversation before the answer of the tool


@pytest.mark.timeout(500)
def test_it_knows_that_a_prompt_is_too_long(environ: Mapping[str, str], work: Path) -> None:
    (work / "long.txt").write_text("word and another " * 14_000)
    with (work / "long.txt").open() as text:
        done = subprocess.run(
            [path_of("claude"), "-p", "Summarize", "--tools", "Read"], cwd=work, env=dict(environ), stdin=text,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 1 and done.stdout.startswith("Prompt is too long"), done.stdout + done.stderr


@pytest.mark.timeout(500)
def test_a_task_that_is_given_up_runs_no_more(agent_url: str, environ: Mapping[str, str], work: Path) -> None:
    (work / "long.txt").write_text("word and another " * 6_000)
    before = number_of(agent_url, 'tgi_request_finished{reason="cancelled"}')
    with (work / "long.txt").open() as text:
        running = subprocess.Popen(
            [path_of("claude"), "-p", "Summarize", *OPTIONS], cwd=work, env=dict(environ), stdin=text,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(lambda: number_of(agent_url, "tgi_batch_current_size") > 0)
        finally:
            running.kill()
            running.wait()
    wait_until(lambda: number_of(agent_url, "tgi_batch_current_size") == 0)
    assert number_of(agent_url, 'tgi_request_finished{reason="cancelled"}') > before


def number_of(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.M)
    return 0.0 if found is None else float(found[1])


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_is_told_the_context_of_the_server(environ: Mapping[str, str]) -> None:
    settings = json.loads(Path(environ["HOME"], ".claude", "settings.json").read_text())
    assert settings["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert os.environ["TERCET_AGENT_URL"] == settings["env"]["ANTHROPIC_BASE_URL"]
