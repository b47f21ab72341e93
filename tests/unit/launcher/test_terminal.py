"""What a terminal shows of a launch, and the one line of an error."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher import terminal
from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, ShardFailed
from launcher.planning.hardware import Hardware, has_compiled_kernels
from launcher.planning.plan import Endpoints, make_plan
from launcher.planning.shown_plan import served_rows
from launcher.terminal import Terminal, how_to_ask, info_of
from wire.log.console import Console, ConsoleFilter
from wire.log.progress_bars import StatusLines

URL = "http://127.0.0.1:1"
INFO = {
    "model_dtype": "torch.bfloat16", "kv_cache_dtype": "torch.float8_e4m3fn", "max_input_tokens": 4095,
    "max_total_tokens": 4096, "max_batch_total_tokens": 16000,
}  # fmt: skip


class Screen(StatusLines):
    """Remembers its lines instead of drawing them."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.live: dict[object, str] = {}
        self.said: list[str] = []

    def write(self, text: str, /) -> object:
        self.said += text.splitlines()
        return len(text)

    def show(self, key: object, text: str) -> None:
        self.live[key] = text

    def remove(self, key: object) -> None:
        self.live.pop(key, None)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setattr(terminal, "_REDRAW_S", 0.0)
    return Screen()


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_live_and_lasting_lines_stay_few(screen: Screen, num_ranks: int) -> None:
    shown = Terminal(Console(screen, ConsoleFilter()))
    names = [(f"shard {rank}", "loading 1/2 layers for 3 s") for rank in range(num_ranks)]
    for missing in range(num_ranks, 0, -1):
        shown.show_starting(names[-missing:], of=num_ranks)
        assert len(screen.live) <= 7 + num_ranks // 2
        assert len(screen.live) == missing or any("more that are not ready" in line for line in screen.live.values())
    plan = make_plan(
        LauncherConfig(model_id="demo"), Hardware(cores=4), None,
        Endpoints(hostname="127.0.0.1", port=1, uds_prefix="/x", master_port=2),
    )  # fmt: skip
    shown.show_serving(served_rows(plan, INFO) + how_to_ask(URL, has_page=True, needs_key=False))
    assert not screen.live
    assert len(screen.said) <= 8
    text = "\n".join(screen.said)
    for number in (
        "bfloat16, KV cache in float8_e4m3fn",
        "4095 tokens in a prompt",
        "4096 with",
        "16000 in all",
        "128 req",
    ):
        assert number in text
    assert "torch." not in text


def test_without_an_answer_of_info_the_plan_is_shown(screen: Screen) -> None:
    config = LauncherConfig(model_id="demo", max_total_tokens=7, dtype="float32")
    ends = Endpoints(hostname="127.0.0.1", port=1, uds_prefix="/x", master_port=2)
    rows = dict(served_rows(make_plan(config, Hardware(cores=4), None, ends), {}))
    assert rows["types"].startswith("float32") and "7 with its answer, ? in all" in rows["limits"]


@pytest.mark.parametrize(
    ("has_page", "needs_key", "address", "key"),
    [
        (True, False, f"{URL} (in a browser: a page to try the model)", "not required (--api-key sets one)"),
        (False, True, URL, "required: that of --api-key, or one of --keys-file"),
    ],
)
def test_how_to_ask(has_page: bool, needs_key: bool, address: str, key: str) -> None:
    on_socket = dict(how_to_ask("unix:/run/x.sock", has_page=has_page, needs_key=needs_key))
    assert on_socket["address"] == "/run/x.sock"
    assert on_socket["try"].startswith("curl --unix-socket /run/x.sock http://localhost/generate ")
    of_vectors = dict(how_to_ask(URL, has_page=has_page, needs_key=needs_key, task="embed"))
    assert f"{URL}/embed " in of_vectors["try"] and "page" not in of_vectors["address"]
    of_several = dict(how_to_ask(URL, has_page=has_page, needs_key=needs_key, model="org/a"))
    assert of_several["try"].startswith(f"curl {URL}/models/org/a/generate ")
    rows = dict(how_to_ask(URL, has_page=has_page, needs_key=needs_key))
    assert (rows["address"], rows["key"]) == (address, key)
    assert rows["try"].startswith(f"curl {URL}/generate ")
    assert ("authorization: Bearer" in rows["try"]) == needs_key


@pytest.fixture
def answers() -> Iterator[tuple[str, list[bytes]]]:
    """A server's address, and what it answers."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bodies[0])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("body", "found"), [(b'{"a": 1}', {"a": 1}), (b"[]", {}), (b"x", {})])
def test_info(answers: tuple[str, list[bytes]], body: bytes, found: dict[str, int]) -> None:
    url, bodies = answers
    bodies.append(body)
    assert info_of(url) == found


def test_info_of_nobody() -> None:
    assert info_of(URL) == {}


def test_one_line_of_an_error() -> None:
    busy = ArgumentValidation("`--port` 8080 is in use by another process; choose another")
    assert busy.for_terminal(is_short=True) == "error: --port 8080 is in use by another process; choose another"
    failed = ShardFailed("shard 1 exited with status 1:\nwhy")
    assert failed.for_terminal(is_short=True) == "error: shard 1 exited with status 1:\\nwhy; --verbose shows more"
    assert failed.for_terminal(is_short=False).endswith("why")


def test_compiled_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    environ = {"TRITON_CACHE_DIR": str(folder)}
    assert not has_compiled_kernels(environ)
    folder.mkdir()
    assert not has_compiled_kernels(environ)
    (folder / "kernel").touch()
    assert has_compiled_kernels(environ)
