"""The server of a chat: started before it, ended after it, however it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from launcher.chat import server
from launcher.chat.client import ChatError
from launcher.chat.server import served

LAUNCHER = """
import http.server, json, os, signal, sys
words = sys.argv[1:]
if "fail" in words:
    sys.exit(words[-1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print('Error: ShardFailed("shard 0: a \\\\"crash\\\\"")', file=sys.stderr, flush=True)
            os._exit(1)
        self.send_response(200)
        self.end_headers()
        variables = [os.environ.get(name) for name in ("API_KEY", "AIP_HTTP_PORT")]
        self.wfile.write(json.dumps(words + variables).encode())
    def log_message(self, *_):
        pass
print('{"level": "INFO", "message": "half way", "target": "x"}', flush=True)
print('{"level": "ERROR", "message": "not for the conversation", "target": "x"}', flush=True)
http.server.HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def fake_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "module_command", lambda module: (sys.executable, "-c", LAUNCHER))


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if LAUNCHER in one.cmdline()]


def nothing(said: str) -> None:
    pass


@pytest.mark.parametrize(
    ("files", "is_refused"),
    [
        ({"tokenizer_config.json": "{}"}, True),
        ({}, True),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, False),
        ({"chat_template.jinja": "x"}, False),
        ({"chat_template.json": '{"chat_template": "x"}'}, False),
        ({"adapter_config.json": "{}"}, False),
    ],
)
def test_a_base_model_is_refused_before_it_starts(tmp_path: Path, files: dict[str, str], is_refused: bool) -> None:
    for name, text in {"tokenizer.json": "{}", **files}.items():
        (tmp_path / name).write_text(text)
    with contextlib.ExitStack() as stack:
        if is_refused:
            stack.enter_context(pytest.raises(ChatError, match=r"has no chat template: take .* launcher serve"))
        stack.enter_context(served(str(tmp_path), [], dict(os.environ), nothing))
    with served(str(tmp_path), [], {**os.environ, "CHAT_TEMPLATE": "x"}, nothing):
        pass
    assert not children()


@pytest.mark.parametrize(
    ("data", "is_refused"),
    [
        (b"GGUF" + bytes(99), True),
        (b"GGUF" + bytes(9) + b"tokenizer.chat_template" + bytes(99), False),
        (b"", False),  # the model server says what it is
    ],
)
def test_a_file_of_a_base_model_is_refused_before_it_starts(tmp_path: Path, data: bytes, is_refused: bool) -> None:
    file = tmp_path / "model.GGUF"
    file.write_bytes(data)
    with contextlib.ExitStack() as stack:
        if is_refused:
            stack.enter_context(pytest.raises(ChatError, match=r"has no chat template: take .* launcher serve"))
        stack.enter_context(served(str(file), [], dict(os.environ), nothing))
    assert not children()


def test_it_runs_as_long_as_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[str] = []
    environ = {**os.environ, "API_KEY": "k", "AIP_HTTP_PORT": "1"}
    with served("some/model", ["--num-shard", "2"], environ, shown.append) as running:
        assert len(children()) == 1
        assert running.failure() is None
        answer = get(running.url)
    assert '["serve", "some/model", "--hostname", "127.0.0.1", "--port", ' in answer
    assert '"--num-shard", "2", "k", null]' in answer
    assert children() == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ChatError("x")])
def test_it_ends_with_the_chat_whatever_ended_that(error: BaseException) -> None:
    with pytest.raises((KeyboardInterrupt, ChatError)), served("m", [], os.environ, nothing):
        raise error
    assert children() == []


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ('Error: ArgumentValidation("`--model-id` \\"x\\": no")', '`--model-id` "x": no'),
        ("error: unexpected argument '--x' found", "unexpected argument '--x' found"),
        ("Segmentation fault", "Segmentation fault"),
        ("", "the server exited with status 1"),
    ],
)
def test_a_start_that_fails(last: str, reason: str) -> None:
    with pytest.raises(ChatError) as caught, served("m", ["fail", last], os.environ, nothing):
        pass
    assert str(caught.value) == reason


def test_one_that_ends_during_the_chat() -> None:
    with served("m", [], os.environ, nothing) as running:
        with pytest.raises(OSError):
            get(running.url + "/end")
        deadline = time.monotonic() + 60
        while running.failure() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert running.failure() == 'shard 0: a "crash"'
