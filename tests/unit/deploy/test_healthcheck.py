"""The images' health check against a server of one status, and where it looks for it."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "docker" / "healthcheck.py"
_spec = importlib.util.spec_from_file_location("image_healthcheck", SCRIPT)
assert _spec is not None and _spec.loader is not None
healthcheck = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(healthcheck)


@contextmanager
def server(status: int) -> Iterator[tuple[int, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http.server_port, asked
        http.shutdown()
        thread.join()


@pytest.fixture
def first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(healthcheck, "FIRST_PROCESS", tmp_path / "cmdline")
    (tmp_path / "cmdline").write_bytes(b"launcher\0--model-id\0demo\0")
    return tmp_path / "cmdline"


@pytest.mark.parametrize(("status", "outcome"), [(200, 0), (503, 1), (404, 1)])
def test_only_200_is_healthy(
    first_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, outcome: int
) -> None:
    with server(status) as (port, asked):
        monkeypatch.setenv("PORT", str(port))
        assert healthcheck.main() == outcome
    assert asked == ["/health"]
    assert (f"status {status}" in capsys.readouterr().err) == bool(outcome)


def test_nobody_listens(
    first_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setenv("PORT", str(held.getsockname()[1]))
    assert healthcheck.main() == 1
    assert "no answer" in capsys.readouterr().err


def test_a_port_that_is_no_number(
    first_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", "tcp://10.0.0.1:80")
    assert healthcheck.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_launchers_flag_is_read_from_the_first_process(
    first_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(200) as (port, _):
        first_process.write_bytes(f"python\0launcher\0--port\0{port}\0".encode())
        monkeypatch.setenv("PORT", "1")
        assert healthcheck.main() == 0


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, ("127.0.0.1", 3000)),
        ([], {"PORT": "80"}, ("127.0.0.1", 80)),
        ([], {"PORT": ""}, ("127.0.0.1", 3000)),
        (["launcher", "--port", "8080"], {"PORT": "80"}, ("127.0.0.1", 8080)),
        (["launcher", "--port=8080"], {"PORT": "80"}, ("127.0.0.1", 8080)),
        (["launcher", "-p", "8081"], {"PORT": "80"}, ("127.0.0.1", 8081)),
        (["launcher", "--port", "8080"], {"AIP_HTTP_PORT": "9090"}, ("127.0.0.1", 9090)),
        (["launcher", "--aip-http-port", "9091"], {"AIP_HTTP_PORT": "9090"}, ("127.0.0.1", 9091)),
        (["launcher", "--hostname", "::"], {}, ("::1", 3000)),
        (["launcher", "--hostname", "10.1.2.3"], {"HOSTNAME": "container"}, ("10.1.2.3", 3000)),
    ],
)
def test_where_the_server_listens(argv: list[str], environ: dict[str, str], expected: tuple[str, int]) -> None:
    assert healthcheck.address(argv, environ) == expected


def test_a_flag_without_its_value() -> None:
    assert healthcheck.flag(["launcher", "--port"], "--port") is None
