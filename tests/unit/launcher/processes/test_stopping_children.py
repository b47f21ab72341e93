"""The verdict on children that have ended before they were asked to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.errors import ShardFailed, WebserverFailed
from launcher.other_nodes import Group
from launcher.processes.child import Child, Exit
from launcher.processes.stopping import Stopping
from launcher.processes.timeouts import Timeouts


def stop(shards: Sequence[Child], router: Child | None) -> None:
    for _ in Stopping(Timeouts(graceful_s=1.0)).in_order(shards, router, Group(), why="SIGTERM", remark="again kills"):
        pass


@pytest.fixture
def httpserver() -> Iterator[Callable[[str], str]]:
    """Starts a server of one text; returns its address."""
    servers = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ended(returncode: int, rank: int | None = None) -> Child:
    logs = SimpleNamespace(last_error="", errors=SimpleNamespace(last="", chunks=list))
    name = "router" if rank is None else f"shard {rank}"
    command = SimpleNamespace(rank=rank, name=name, model="")
    child: Any = SimpleNamespace(command=command, title=name, logs=logs, exit=Exit(returncode))
    child.poll = lambda: child.exit
    return cast(Child, child)


def test_a_start_in_which_everybody_was_signalled_is_an_orderly_stop() -> None:
    stop([ended(-signal.SIGTERM, 0)], None)


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ("tgi_queue_size 0\ntgi_batch_current_size 0\n", "SIGTERM: stopping, no request runs"),
        ("tgi_queue_size 2\ntgi_batch_current_size 1\n", "SIGTERM: 3 requests run; stopping, at most 1 s; again kills"),
        ("tgi_batch_current_size 1\n", "SIGTERM: 1 request runs; stopping, at most 1 s; again kills"),
        ("", "SIGTERM: stopping, at most 1 s; again kills"),
    ],
)  # fmt: skip
def test_what_a_signal_says(
    metrics: str, said: str, caplog: pytest.LogCaptureFixture, httpserver: Callable[[str], str]
) -> None:
    router = ended(0)
    router.exit, router.ready_at = None, 1.0
    router.terminate = lambda: setattr(router, "exit", Exit(0))  # type: ignore[method-assign]
    router.command.url = httpserver(metrics)  # type: ignore[misc]
    with caplog.at_level("INFO"):
        stop([], router)
    assert said in caplog.text


def test_what_a_signal_says_during_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        stop([ended(-signal.SIGTERM, 0)], None)
    assert "SIGTERM: stopping; again kills" in caplog.text


def test_shards_that_were_taken_from_under_a_router_are_named() -> None:
    with pytest.raises(ShardFailed, match="shard 0 was stopped before the last requests were answered"):
        stop([ended(-signal.SIGTERM, 0)], ended(1))


def test_a_shard_that_failed_is_named_before_the_router() -> None:
    with pytest.raises(ShardFailed, match="shard 1"):
        stop([ended(0, 0), ended(3, 1)], ended(1))


def test_a_router_that_failed_alone_is_named() -> None:
    with pytest.raises(WebserverFailed, match="router"):
        stop([], ended(1))
