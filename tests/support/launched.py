"""What tests of life and death need: streaming clients, and the processes of a launcher taken while all was well."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from support.metrics_text import metrics_of
from support.running_server import RunningServer, running_server

NOTICED_S = 60.0
"""From the death of a child to the launcher's end: 2 s for survivors, 5 s for the router, and slack if all is busy."""
LONG, SHORT = 3000, 300
"""Tokens: more than anybody waits for; and enough to be running when the signal comes."""


class Stream:
    """A client that reads /generate_stream to its end, on a thread of its own."""

    def __init__(self, server: RunningServer, tokens: int = LONG, prompt: str = "Once upon a time") -> None:
        self.status: int | None = None
        self.events: list[dict[str, object]] = []
        self.started = threading.Event()
        self.ended = threading.Event()
        self._port = server.port
        parameters = {"max_new_tokens": tokens, "ignore_eos": True}
        self._body = json.dumps({"inputs": prompt, "parameters": parameters})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        # A cut connection is an end too; what came before it is in `events`.
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection.request("POST", "/generate_stream", self._body, {"content-type": "application/json"})
            response = connection.getresponse()
            self.status = response.status
            for line in response:
                if line.startswith(b"data:"):
                    self.events.append(json.loads(line[5:]))
                    self.started.set()
        connection.close()
        self.ended.set()

    @property
    def is_complete(self) -> bool:
        return bool(self.events) and self.events[-1].get("generated_text") is not None

    @property
    def indices(self) -> list[object]:
        return [event["index"] for event in self.events if "token" in event]


class Unary:
    """A client that waits for the whole answer of /generate, on a thread of its own. `status` is None if none came."""

    def __init__(self, server: RunningServer, tokens: int = LONG) -> None:
        self.status: int | None = None
        self.ended = threading.Event()
        self._port = server.port
        self._body = json.dumps({"inputs": "Once upon", "parameters": {"max_new_tokens": tokens, "ignore_eos": True}})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/generate", self._body, {"content-type": "application/json"})
            self.status = connection.getresponse().status
        connection.close()
        self.ended.set()


def streams(server: RunningServer, count: int, tokens: int = LONG) -> list[Stream]:
    """Streams that have all delivered a token."""
    made = [Stream(server, tokens) for _ in range(count)]
    for stream in made:
        assert stream.started.wait(60), f"no token: {stream.status}\n{server.log()}"
    return made


class Family:
    """All processes below a launcher, taken while all was well."""

    def __init__(self, server: RunningServer) -> None:
        self.members = psutil.Process(server.process.pid).children(recursive=True)
        self.command_lines = {process.pid: process.cmdline() for process in self.members}

    def find(self, *words: str) -> list[psutil.Process]:
        return [p for p in self.members if set(words) <= set(self.command_lines[p.pid])]

    @property
    def router(self) -> psutil.Process:
        return self.find("-m", "router")[0]

    @property
    def shards(self) -> list[psutil.Process]:
        """By rank."""
        found = self.find("-m", "model_server")
        return sorted(found, key=lambda process: int(process.environ()["RANK"]))

    def left(self) -> list[list[str]]:
        """Command lines of those that do not go: the kernel may need some seconds on a busy machine."""
        _, alive = psutil.wait_procs(self.members, timeout=60)
        return [self.command_lines[p.pid] for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def served(*options: str, **environ: str) -> Iterator[tuple[RunningServer, Family]]:
    with running_server("demo", *options, environ=environ) as server:
        yield server, Family(server)


def ended(server: RunningServer, timeout_s: float = NOTICED_S) -> int:
    """The exit status of a launcher that is about to end by itself."""
    return server.process.wait(timeout_s)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def socket_folder(family: Family) -> Path:
    line = family.command_lines[family.shards[0].pid]
    return Path(line[line.index("--uds-path") + 1]).parent


def sabotaged(folder: Path, code: str) -> dict[str, str]:
    """Variables with which every Python child runs `code` as its interpreter starts; shards are those with a RANK."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


AT_IMPORT = """
import os, sys, time
class Saboteur:
    def find_spec(self, name, path=None, target=None):
        if name == "model_server.shard":
            {action}
if os.environ.get("RANK") {condition}:
    sys.meta_path.insert(0, Saboteur())
"""
"""For `sabotaged`: something that a shard does when it begins to import its heavy part."""


def wait_for(server: RunningServer, text: str, count: int = 1, timeout_s: float = 120.0) -> None:
    """Until the log of a launcher that still runs holds `text` so often."""
    deadline = time.monotonic() + timeout_s
    while server.log().count(text) < count:
        assert server.process.poll() is None and time.monotonic() < deadline, server.log()
        time.sleep(0.02)


def wait_for_requests(server: RunningServer, count: int, timeout_s: float = 60.0) -> None:
    """Until so many generations run or wait in the router."""
    deadline = time.monotonic() + timeout_s
    held = 0.0
    while held < count:
        assert time.monotonic() < deadline, f"{held:g} requests are there"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/metrics")
        values = metrics_of(connection.getresponse().read().decode())
        connection.close()
        held = values["tgi_batch_current_size"] + values["tgi_queue_size"]
