"""`python -m benchmarks.peers` that is asked to end leaves no server running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.running_server import free_port

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
LIMIT_S = 120

# A server that is healthy, writes its process id when it is asked to generate, and never answers.
MUTE_SERVER = """
import http.server, os, pathlib, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        partial = pathlib.Path(sys.argv[2] + ".part")
        partial.write_text(str(os.getpid()))
        partial.rename(sys.argv[2])
        time.sleep(3600)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# The program with that server in Tercet's place, no checkpoint, and a machine that has not been measured.
PROGRAM = """
import dataclasses, pathlib, sys
from benchmarks.peers import __main__ as program, servers

folder, server, port = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
program.limits = lambda: {}
program.checkpoint = lambda shape: folder
program.offsets_of = lambda path: lambda text: [(0, len(text))] * 128
servers.FOLDER = folder / "models"
servers.PEERS["tercet"] = dataclasses.replace(
    servers.PEERS["tercet"],
    prepare=lambda shape, precision: folder,
    command=lambda model, precision, port: [sys.executable, "-c", server, str(port), str(folder / "pid")],
)
sys.argv[1:] = ["--peers", "tercet", "--port", port, "--out", str(folder / "peers.json")]
program.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_the_server_ends_with_the_program(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), MUTE_SERVER, str(free_port())]
    running = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    server: psutil.Process | None = None
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "pid").exists():
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        server = psutil.Process(int((tmp_path / "pid").read_text()))
        running.send_signal(number)
        assert running.wait(LIMIT_S) == 128 + number
        assert not server.is_running()
    finally:
        running.kill()
        running.wait()
        if server is not None and server.is_running():
            server.kill()
