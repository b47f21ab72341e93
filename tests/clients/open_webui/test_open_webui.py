"""Open WebUI with the variables of `launcher launch`: its first user lists models, chats and names the chat."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coding_agents import quiet_home

START_LIMIT_S = 400
LIMIT_S = 100
USER = {"name": "A User", "email": "user@example.org", "password": "Plover 1 and 2!"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}

pytestmark = pytest.mark.timeout(START_LIMIT_S + LIMIT_S)


class WebUI:
    """Its own HTTP API, as its page uses it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.token = ""

    def call(self, path: str, body: Any = None) -> str:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def webui(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """It has no network but the server's, and its first user has signed up."""
    folder = tmp_path_factory.mktemp("webui")
    environ = quiet_home(folder / "home") | variables_of(url)
    environ |= {
        "DATA_DIR": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.prefix, "bin", "open-webui")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=log, stderr=log)
    try:
        found = WebUI(f"http://127.0.0.1:{port}")
        wait_until_healthy(found, process, folder / "log")
        found.token = json.loads(found.call("/api/v1/auths/signup", USER))["token"]
        yield found
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def variables_of(url: str) -> dict[str, str]:
    """What `launcher launch` prints for a shell."""
    words = [os.environ["TERCET_PYTHON"], "-m", "launcher", "launch", "open-webui", "--url", url]
    lines = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    exports = [shlex.split(line) for line in lines]
    assert all(export == "export" for export, _ in exports)
    return dict(assignment.split("=", 1) for _, assignment in exports)


def wait_until_healthy(webui: WebUI, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            assert json.loads(webui.call("/health")) == {"status": True}
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.5)


def test_it_lists_the_model(webui: WebUI) -> None:
    assert [model["id"] for model in json.loads(webui.call("/api/models"))["data"]] == ["demo"]


def test_a_streamed_chat_and_its_title(webui: WebUI) -> None:
    body = {"model": "demo", "messages": [QUESTION], "temperature": 0}
    whole = json.loads(webui.call("/api/chat/completions", body | {"stream": False}))
    answer = whole["choices"][0]["message"]["content"]
    assert "Paris" in answer
    lines = webui.call("/api/chat/completions", body | {"stream": True}).splitlines()
    *events, last = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert last == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(deltas) == answer and len(deltas) > 3
    chat = [QUESTION, {"role": "assistant", "content": answer}]
    for task in ("title", "tags", "follow_up"):
        made = json.loads(webui.call(f"/api/v1/tasks/{task}/completions", {"model": "demo", "messages": chat}))
        assert made["object"] == "chat.completion" and made["choices"][0]["message"]["content"]


def test_it_shows_why_a_chat_is_refused(webui: WebUI) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "word and " * 9000}], "stream": True}
    with pytest.raises(urllib.error.HTTPError) as refused:
        webui.call("/api/chat/completions", body)
    assert refused.value.code == 400
    error = json.loads(refused.value.read())["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length is" in error["message"]
