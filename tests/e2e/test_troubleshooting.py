"""The table of starts in docs/troubleshooting.md, row by row: the command, its message, its exit status."""

from __future__ import annotations

import http.server
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SECTION = PAGE.read_text().partition("\n## Usual mistakes at the start\n")[2].partition("\n## ")[0]
ROW = re.compile(r"^\| (?P<title>[^|]+) \| `(?P<command>[^|]+?)` \| ``(?P<message>.+?)`` \| (?P<status>\d+) \|$", re.M)
START_LIMIT_S = 120
HUB_ROWS = ("the hub has no such model", "the repository has no revision")


class Row(NamedTuple):
    title: str
    command: str
    message: str
    status: int


ROWS = [
    Row(m["title"], m["command"], m["message"].replace("\\|", "|"), int(m["status"])) for m in ROW.finditer(SECTION)
]


class _EmptyHub(http.server.BaseHTTPRequestHandler):
    """A hub that knows the repository `org/model`, at no revision but main, and nothing else."""

    def do_GET(self) -> None:
        code = "RevisionNotFound" if "/org/model/" in self.path else "RepoNotFound"
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _EmptyHub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands of the page are given."""
    (tmp_path / "empty").mkdir()
    for name in ("no-weights", "pickled", "adapter", "pointers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    (tmp_path / "adapter" / "config.json").rename(tmp_path / "adapter" / "adapter_config.json")
    (tmp_path / "pointers" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    (tmp_path / "page.gguf").write_text("<!DOCTYPE html>\n<html></html>")
    for name, text in {
        "name": "prot: 8080",
        "type": "port: eighty",
        "list": "port: [80, 81]",
        "broken": "port: [80",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    return tmp_path


def run(row: Row, folder: Path, environ: dict[str, str], port: int) -> subprocess.CompletedProcess[str]:
    words = shlex.split(row.command.replace("8080", str(port)))
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    module = {"launcher": "launcher", "model-server": "model_server", "router": "router"}[words.pop(0)]
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LANG") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", module, *words], cwd=folder, env=inherited | environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
    )  # fmt: skip


# Every fourth one in `make test`: each starts a command.
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.long if n % 4 else (), id=row.title) for n, row in enumerate(ROWS)],
)
def test_row(row: Row, folder: Path, hub: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hub")}
    # A name that no resolver knows stands for the hub on a machine without a network.
    is_answered = any(words in row.message for words in HUB_ROWS)
    environ["HF_ENDPOINT"] = hub if is_answered else "https://hub.invalid"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        if "in use" not in row.title:
            other.close()
        done = run(row, folder, environ, port)
    *before, last = done.stderr.rstrip("\n").splitlines() or done.stdout.rstrip("\n").splitlines()[-1:]
    expected = row.message.replace("8080", str(port)).replace("huggingface.co has", "hub.invalid has")
    assert done.returncode == row.status, done.stdout + done.stderr
    assert without_reason(last).endswith(without_reason(expected)), done.stdout + done.stderr
    # One message: a usage error only says before it where to read more.
    if row.status == 2:
        pointer, empty = before
        assert re.fullmatch(rf"For more information, try '{command_of(row)}( [a-z]+)? --help'\.", pointer)
        assert empty == ""
    else:
        assert before == []
    assert "Traceback" not in done.stdout + done.stderr


def command_of(row: Row) -> str:
    return next(word for word in row.command.split() if not re.match(r"[A-Z_]+=", word))


def without_reason(text: str) -> str:
    """Resolvers say in their own words that a name is unknown."""
    return re.sub(r"(hub\.invalid has no address here) \([^)]*\)", r"\1", text)


def test_the_page_has_a_row_for_every_usual_mistake() -> None:
    assert len(ROWS) == SECTION.count("\n| ") - 1
    assert len(ROWS) >= 20
    for command in ("MODEL_ID= launcher", "--revision", "--num-shard", "--port", "--model_id"):
        assert any(command in row.command for row in ROWS), command
