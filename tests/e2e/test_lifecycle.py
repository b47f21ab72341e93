"""Life and death of the three real processes, with the demo model: nothing hangs, nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.running_server import RunningServer, free_port, running_server

pytestmark = pytest.mark.e2e

NOTICED_S = 15.0
"""From a child's death to the launcher's end: 2 s for the survivors, 5 s for the router, and slack."""
LONG, SHORT = 3000, 300
"""Tokens: more than anybody waits for; and enough to be running when the signal comes."""


class Stream:
    """A client that reads /generate_stream to its end, on a thread of its own."""

    def __init__(self, server: RunningServer, tokens: int = LONG) -> None:
        self.status: int | None = None
        self.events: list[dict[str, object]] = []
        self.started = threading.Event()
        self.ended = threading.Event()
        self._port = server.port
        parameters = {"max_new_tokens": tokens, "ignore_eos": True}
        self._body = json.dumps({"inputs": "Once upon a time", "parameters": parameters})
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

    def left_after(self, timeout_s: float) -> list[list[str]]:
        """Command lines of those that are still there."""
        _, alive = psutil.wait_procs(self.members, timeout=timeout_s)
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


def test_sigterm_lets_running_streams_finish() -> None:
    with served() as (server, family):
        folder = socket_folder(family)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "shard-0")]
        assert modes == [0o700, 0o600]
        running = streams(server, 4, SHORT)
        server.process.send_signal(signal.SIGTERM)
        assert all(stream.ended.wait(60) for stream in running)
        assert ended(server) == 0, server.log()
        for stream in running:
            assert stream.is_complete, stream.events[-1]
            assert stream.indices == list(range(1, SHORT + 1)), "a token was lost or doubled"
        assert server.log().count(f"Ready on http://127.0.0.1:{server.port} after ") == 1
        assert family.left_after(2.0) == []
        assert port_is_free(server.port)
        assert not folder.exists()


def test_a_draining_server_refuses_new_requests_and_a_second_signal_ends_it() -> None:
    with served() as (server, family):
        running = streams(server, 2)
        server.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while server.is_healthy():
            assert time.monotonic() < deadline, "still healthy while it drains"
            time.sleep(0.05)
        late = Stream(server, SHORT)
        assert late.ended.wait(30)
        assert late.status in (None, 503) and not late.events
        assert server.process.poll() is None and not running[0].ended.is_set()
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 10.0) == 128 + signal.SIGTERM
        assert all(stream.ended.wait(10) for stream in running)
        assert family.left_after(2.0) == []


def test_the_deadline_ends_what_does_not_finish() -> None:
    with served("--graceful-termination-timeout", "3") as (server, family):
        running = streams(server, 2)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 3 + NOTICED_S) == 0, server.log()
        assert all(stream.ended.wait(10) for stream in running)
        assert not any(stream.is_complete for stream in running)
        assert family.left_after(2.0) == []


def test_a_killed_shard_ends_everything() -> None:
    with served() as (server, family):
        running = streams(server, 4)
        queued = [Stream(server) for _ in range(8)]  # More than the KV cache holds at once.
        family.shards[0].send_signal(signal.SIGKILL)
        # The clients first: each stream ends, with an error and not with a hang.
        for stream in running + queued:
            assert stream.ended.wait(NOTICED_S), "a stream hangs"
            assert not stream.is_complete
            # 200 with an error event; or, if it came too late, an error status or no connection at all.
            assert "error" in stream.events[-1] if stream.status == 200 else stream.status in (None, 424, 429, 503)
        assert all(stream.status == 200 for stream in running)
        assert ended(server) == 1
        assert family.left_after(2.0) == []
        log = server.log()
        assert 'Error: ShardFailed("shard 0 was killed by signal 9 (SIGKILL)' in log
        assert "Shard 0 crashed" in log


def test_a_killed_router_ends_everything() -> None:
    with served() as (server, family):
        running = streams(server, 2)
        family.router.send_signal(signal.SIGKILL)
        assert all(stream.ended.wait(NOTICED_S) for stream in running)
        assert ended(server) == 1
        assert family.left_after(2.0) == []
        assert 'Error: WebserverFailed("router was killed by signal 9 (SIGKILL)' in server.log()


def test_a_killed_launcher_leaves_no_orphans() -> None:
    with served() as (server, family):
        folder = socket_folder(family)
        running = streams(server, 2)
        server.process.send_signal(signal.SIGKILL)
        assert family.left_after(2.0) == []
        assert all(stream.ended.wait(10) for stream in running)
        assert port_is_free(server.port)
        deadline = time.monotonic() + 5
        while folder.exists():
            assert time.monotonic() < deadline, "the socket folder is left"
            time.sleep(0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_dies_in_a_step(rank: int) -> None:
    with served("--num-shard", "2") as (server, family):
        assert len(family.shards) == 2
        running = streams(server, 2)
        family.shards[rank].send_signal(signal.SIGKILL)
        for stream in running:
            assert stream.ended.wait(NOTICED_S), "a stream hangs"
            assert not stream.is_complete
        assert ended(server) == 1
        assert family.left_after(2.0) == []
        assert f'Error: ShardFailed("shard {rank} was killed by signal 9' in server.log()


def test_a_shard_that_is_stopped_is_killed_with_the_rest() -> None:
    """SIGSTOP and then a stop: what cannot hear SIGTERM does not keep the launcher from ending."""
    with served("--graceful-termination-timeout", "3", "--json-output") as (server, family):
        family.shards[0].send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 3 + NOTICED_S) == 0, server.log()
        assert family.left_after(2.0) == []
        records = [json.loads(line) for line in server.log().splitlines()]
        assert {"text_generation_launcher", "model_server.cli", "router.serving"} <= {
            each["target"] for each in records
        }


def test_a_shard_that_makes_no_progress_ends_everything() -> None:
    with served(MAX_STEP_SECONDS="2") as (server, family):
        running = streams(server, 2)
        family.shards[0].send_signal(signal.SIGSTOP)
        for stream in running:
            assert stream.ended.wait(NOTICED_S), "a stream hangs"
            assert "error" in stream.events[-1]
        assert not server.is_healthy()
        assert ended(server) == 1
        assert family.left_after(2.0) == []
        assert "no step finished for 2 s" in server.log().splitlines()[-1]


def test_a_launcher_whose_output_nobody_reads_goes_on() -> None:
    port = free_port()
    argv = [sys.executable, "-m", "launcher", "--model-id", "demo", "--hostname", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        server = RunningServer(process, port, Path("/dev/null"))
        try:
            server.wait_healthy()
        finally:
            assert server.stop() == 0


def test_two_launches_do_not_disturb_each_other(tmp_path: Path) -> None:
    prefix = str(tmp_path / "shard")
    with served("--shard-uds-path", prefix) as (first, _):
        with running_server("demo", "--shard-uds-path", prefix, wait=False) as second:
            assert ended(second) == 1
            assert 'Error: ArgumentValidation("`--shard-uds-path`' in second.log()
            assert str(first.process.pid) in second.log()
        with running_server("demo", environ={"PORT": "1"}, wait=False) as other:
            other.wait_healthy()
            assert first.is_healthy()
            assert other.stop() == 0
        with running_server("demo", "--port", str(first.port), wait=False) as third:
            # `--port` twice is a usage error; the variable is how to ask for a taken port here.
            assert ended(third) == 2
        assert first.is_healthy()


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    began = time.monotonic()
    with running_server(tmp_path, wait=False) as server:
        assert ended(server, 60) == 1
        log = server.log()
    assert time.monotonic() - began < 60
    last = log.rstrip().splitlines()[-1]
    assert last.startswith('Error: ShardCannotStart("shard 0 exited with status 1: '), log
    assert not psutil.pid_exists(server.process.pid)
