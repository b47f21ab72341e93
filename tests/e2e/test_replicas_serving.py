"""Two replicas of the demo model: one is killed under load, no request is lost, and it comes back."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo", "--num-replica", "2", "--max-total-tokens", "2048") as running:
        yield running


def replicas(url: str) -> dict[str, int]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = (line.split('"') for line in lines if line.startswith("tgi_replicas{"))
    return {parts[1]: int(parts[2].removeprefix("} ")) for parts in found}


def shards_of(server: RunningServer) -> list[int]:
    rows = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout.split("\n")
    found = (row.split(None, 2) for row in rows[1:] if "model_server serve" in row)
    return [int(pid) for pid, parent, _ in found if int(parent) == server.process.pid]


def ask(url: str, number: int) -> str:
    """A stream of one prompt, at its end."""
    body = {"prompt": f"Question {number}:", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text
    assert text.count('"text"') == 60
    return text


def test_a_replica_is_killed_under_load(server: RunningServer) -> None:
    assert replicas(server.url) == {"ready": 2, "failed": 0}
    first, other = shards_of(server)
    for victim in (first, other):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, server.url, number) for number in range(40)]
            concurrent.futures.wait(asked[:8], return_when=concurrent.futures.FIRST_COMPLETED)
            os.kill(victim, signal.SIGKILL)
            for one in asked:
                one.result(timeout=120)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        deadline = time.monotonic() + 120
        while replicas(server.url) != {"ready": 2, "failed": 0}:
            assert time.monotonic() < deadline, replicas(server.url)
            time.sleep(0.2)
    assert len(shards_of(server)) == 2 and not {first, other} & set(shards_of(server))


def test_turns_of_a_conversation_stay_together(server: RunningServer) -> None:
    prompt, cached = "word " * 200, []
    for turn in range(5):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        prompt += answer["choices"][0]["text"] + f" and {turn} more"
    assert all(count >= 190 for count in cached[1:])
