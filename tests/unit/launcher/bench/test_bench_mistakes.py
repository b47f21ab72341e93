"""The table of `launcher bench` in docs/troubleshooting.md, row by row."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.documents import bare, read, rows, section

from launcher import cli
from launcher.bench.results import summarise

ROWS = rows(section(read("docs/troubleshooting.md"), "Usual mistakes with `launcher bench`"))
INFO = {"model_id": "m", "max_concurrent_requests": 128}
# What the server answers instead of TGI's /info, or to prompts if it is overloaded.
REFUSALS = {
    "a server with an API key": (401, "invalid or missing API key"),
    "TGI's API, which the server does not have": (404, "Not Found"),
    "more requests than the server accepts": (429, "Model is overloaded"),
}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    status, words = 200, ""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.status in (200, 429):
            self._send(200, INFO)
        else:
            self._refuse()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/tokenize" and self.server.status == 429:
            self._send(200, [{"id": number} for number in range(256)])
        else:
            self._refuse()

    def _refuse(self) -> None:
        self._send(self.server.status, {"error": self.server.words})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of the page are given."""
    for name, load in (("a", "1 client"), ("b", "8 clients")):
        cells = [summarise(load, [], [], 1.0, 1).as_json()]
        options = {"url": "http://h", "prompt": 1, "output": 1}
        (tmp_path / f"{name}.json").write_text(json.dumps({"options": options, "cells": cells}))
    (tmp_path / "other.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOSTNAME", "")
    monkeypatch.delenv("API_KEY", raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_row(
    row: list[str], server: _Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    title, command, message, status = (row[0], *map(bare, row[1:]))
    server.status, server.words = REFUSALS.get(bare(title), (200, ""))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        ports = {"8080": str(server.server_port), "3000": str(unused.getsockname()[1])}
        given, expected = (re.sub("8080|3000", lambda found: ports[found[0]], text) for text in (command, message))
        monkeypatch.setattr(sys, "argv", shlex.split(given))
        assert cli.main() == int(status)
    written = capsys.readouterr()
    assert without_reason(written.err.splitlines()[-1]) == without_reason(expected)
    assert "Traceback" not in written.out + written.err


def without_reason(text: str) -> str:
    """Resolvers say in their own words that a name is unknown."""
    return re.sub(r"(no-host\.invalid.*no server answers) \([^)]*\)", r"\1", text)
