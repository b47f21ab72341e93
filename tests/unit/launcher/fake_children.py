"""Child programs for the tests of the launcher: small, real processes with the true interfaces."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil

from launcher.command import Command
from launcher.processes.child import HEALTH_METHOD
from wire.exit_status import LOST_PEER

_SHARD = f"""
import signal, sys
from concurrent import futures
import grpc
path, journal, on_term = sys.argv[1:4]
class Health(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method == {HEALTH_METHOD!r}:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
def stop(*_):
    open(journal, "a").write("shard stops\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if on_term == "ignore" else stop)
signal.signal(signal.SIGUSR2, lambda *_: sys.exit({LOST_PEER}))
server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(Health(),))
server.add_insecure_port("unix:" + path)
print('{{"level": "INFO", "message": "shard is up", "target": "model_server"}}', flush=True)
server.start()
while True:
    signal.pause()
"""

_ROUTER = """
import http.server, os, signal, sys, time
port, journal, on_term = int(sys.argv[1]), sys.argv[2], sys.argv[3]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
def stop(*_):
    open(journal, "a").write("router stops\\n")
    if on_term in ("drain", "fail"):
        time.sleep(0.5)  # Another signal in the meantime begins this anew.
    if on_term == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    os._exit(3 if on_term == "fail" else 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if on_term == "ignore" else stop)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program, *arguments)


def shard(folder: Path, rank: int = 0, *, on_term: str = "stop", program: str = _SHARD) -> Command:
    path = str(folder / f"s-{rank}")
    argv = python(program, path, str(folder / "journal"), on_term)
    return Command(name="shard", rank=rank, argv=argv, env=dict(os.environ), socket=path)


def router(folder: Path, port: int, *, on_term: str = "stop", program: str = _ROUTER) -> Command:
    argv = python(program, str(port), str(folder / "journal"), on_term)
    return Command(name="router", argv=argv, env=dict(os.environ), url=f"http://127.0.0.1:{port}")


def plain(program: str, *arguments: str, name: str = "download", rank: int | None = None) -> Command:
    return Command(name=name, rank=rank, argv=python(program, *arguments), env=dict(os.environ))


def journal(folder: Path) -> list[str]:
    path = folder / "journal"
    return path.read_text().splitlines() if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those that are still there after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = pids
    while (left := [pid for pid in left if not is_gone(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
