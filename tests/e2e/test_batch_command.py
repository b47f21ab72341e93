"""`launcher batch` against a real server: killed at any moment, it goes on and ends with every line once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.running_server import RunningServer

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_a_batch_that_is_killed_goes_on(server: RunningServer, tmp_path: Path) -> None:
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"The {number}", "max_tokens": 40, "temperature": 0} for number in range(60)]
    with requests.open("w") as file:
        for number, body in enumerate(bodies):
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "launcher", "batch", str(requests), str(answers), "--url", server.url]
    chosen = random.Random(3)
    for _ in range(2):
        running = subprocess.Popen([*command, "--concurrency", "2"], stderr=subprocess.DEVNULL)
        before = answers.stat().st_size if answers.exists() else 0
        while running.poll() is None and not (answers.exists() and answers.stat().st_size > before + 4000):
            time.sleep(0.001)
        time.sleep(chosen.random() / 50)
        running.kill()
        running.wait()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(60))
    assert {row["response"]["status_code"] for row in rows} == {200}
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0 and "60 of them answered already" in again.stderr
