"""`launcher bench` against a real server, as a user runs it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.running_server import RunningServer, free_port

pytestmark = pytest.mark.e2e


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "api", ["auto", *(pytest.param(one, marks=pytest.mark.long) for one in ("openai", "openai-chat"))]
)
def test_every_api_gives_whole_answers(server: RunningServer, tmp_path: Path, api: str) -> None:
    ended = bench("--url", server.url, "--api", api, "--concurrency", "1,3", "--num-requests", "4", "--prompt", "40",
                  "--output", "5", "--out", str(tmp_path))  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "3 clients" in ended.stdout
    cells = json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert [(c["load"], c["num_requests"], c["short_requests"], c["errors"]) for c in cells] == [
        ("1 client", 4, 0, 0),
        ("3 clients", 4, 0, 0),
    ]
    # A chat's template adds to the prompt.
    assert all(36 <= c["prompt_tokens"] <= (44 if api != "openai-chat" else 100) for c in cells)
    assert "demo on tercet " in (tmp_path / "bench.svg").read_text()
    assert ended.stderr == f"Chart: {tmp_path}/bench.svg (table: bench.md, figures: bench.json)\n"
    assert ended.stdout in (tmp_path / "bench.md").read_text()


def test_an_open_loop_and_a_tokenizer(server: RunningServer, tmp_path: Path) -> None:
    from wire import demo_model

    ended = bench("--url", server.url, "--rate", "20", "--num-requests", "6", "--prompt", "33", "--output", "4",
                  "--tokenizer", str(demo_model.path() / "tokenizer.json"), "--out", str(tmp_path))  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [cell] = json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert (cell["load"], cell["num_requests"], cell["errors"]) == ("20 requests/s", 6, 0)
    assert 33 <= cell["prompt_tokens"] <= 34  # one more where the tokenizer puts a token in front


def test_a_server_that_refuses_is_an_error_with_its_words(server: RunningServer, tmp_path: Path) -> None:
    ended = bench("--url", server.url, "--concurrency", "1", "--num-requests", "2", "--prompt", "50000",
                  "--warmup", "0", "--out", str(tmp_path))  # fmt: skip
    assert ended.returncode == 1
    assert "Input validation error" in ended.stderr


def test_nobody_there(tmp_path: Path) -> None:
    ended = bench("--url", f"http://127.0.0.1:{free_port()}", "--out", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: http://127.0.0.1:")
    assert "Traceback" not in ended.stderr


def test_what_is_measured_is_kept_when_the_rest_is_interrupted(server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launcher", "bench", "--url", server.url, "--rate", "50,0.001", "--num-requests",
               "2", "--prompt", "40", "--output", "5", "--out", str(tmp_path)]  # fmt: skip
    # What a shell starts in the background ignores the signal, and so does everything below it. Set in a process of its
    # own: between a fork of this one and the program's start, threads of gRPC may write to the standard error.
    listening = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", listening, *command[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "bench.svg").exists():  # the last that is written of the first cell
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
            said, complaint = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, complaint.splitlines()[0]) == (130, "Interrupted")
    assert "50 requests/s" in said
    [cell] = json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert (cell["load"], cell["num_requests"]) == ("50 requests/s", 2)


def test_a_folder_that_cannot_be_written_is_found_first(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = bench("--url", server.url, "--out", str(tmp_path / "file" / "out"))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: --out {tmp_path}/file/out: Not a directory\n"


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        ended = bench("--url", url, "--timeout", "1", "--out", str(tmp_path))
    assert (ended.returncode, ended.stderr) == (1, f"Error: {url}: no answer in 1 s (--timeout)\n")


def test_a_replay_hits_the_cache_as_its_log_did(server: RunningServer, tmp_path: Path) -> None:
    """A trace of prompts that share a beginning, as a server would have recorded it."""
    prompt = {"tokens": 200, "cached": 192}
    row = {"status": 200, "stream": True, "finish_reasons": ["length"], "tokens_in": 200, "tokens_out": 2,
           "first_token_s": 0.1, "duration_s": 0.2}  # fmt: skip
    rows = [
        row
        | {"time": f"2026-01-02T03:04:0{number}Z", "tokens_cached": 192 if number else 0}
        | {"prompts": [prompt | {"hash_ids": [1, 2, 3, 10 + number]}]}
        for number in range(5)
    ]
    log = tmp_path / "log"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = bench("--url", server.url, "--replay", str(log), "--speed", "4", "--out", str(tmp_path), "--seed", "77")
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    figures = {name: (in_log, replayed) for name, in_log, replayed in report["replayed"]}
    assert figures["requests"] == ("5", "5, 0 failed")
    assert figures["prompt tokens"] == ("1,000", "1,000") and figures["output tokens"] == ("10", "10")
    in_log, replayed = figures["of these in the prefix cache"]
    assert in_log == "76.8%" and abs(float(replayed[:-1]) - 76.8) <= 1
