"""Life and death of the three real processes, with the demo model: nothing hangs, nothing is left behind."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.launched import (
    NOTICED_S,
    SHORT,
    Stream,
    Unary,
    ended,
    port_is_free,
    sabotaged,
    served,
    socket_folder,
    streams,
    wait_for_requests,
)  # fmt: skip
from support.running_server import RunningServer, free_port, running_server

from wire import demo_model

pytestmark = pytest.mark.e2e


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
        assert family.left() == []
        assert port_is_free(server.port)
        assert not folder.exists()


@pytest.mark.long
def test_a_draining_server_refuses_new_requests_and_a_second_signal_ends_it() -> None:
    with served() as (server, family):
        running = streams(server, 2)
        server.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + NOTICED_S
        while server.is_healthy():
            assert time.monotonic() < deadline, "still healthy while it drains"
            time.sleep(0.05)
        late = Stream(server, SHORT)
        assert late.ended.wait(NOTICED_S)
        assert late.status == 503 and not late.events
        assert server.health_status() == 503
        assert server.process.poll() is None and not running[0].ended.is_set()
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 128 + signal.SIGTERM
        assert all(stream.ended.wait(NOTICED_S) for stream in running)
        assert family.left() == []


@pytest.mark.long
def test_the_deadline_ends_what_does_not_finish() -> None:
    with served("--graceful-termination-timeout", "2") as (server, family):
        running = streams(server, 2)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 2 + NOTICED_S) == 0, server.log()
        assert all(stream.ended.wait(NOTICED_S) for stream in running)
        assert not any(stream.is_complete for stream in running)
        assert family.left() == []


@pytest.mark.long
def test_a_shard_killed_while_idle_ends_everything() -> None:
    with served() as (server, family):
        family.shards[0].send_signal(signal.SIGKILL)
        died = time.monotonic()
        while server.is_healthy():
            assert time.monotonic() - died < NOTICED_S, "healthy without a shard"
            time.sleep(0.02)
        assert ended(server) == 1
        assert family.left() == []
        assert (
            server.log()
            .rstrip()
            .splitlines()[-1]
            .startswith('Error: ShardFailed("shard 0 was killed by signal 9 (SIGKILL)')
        )


def test_a_killed_shard_ends_everything() -> None:
    with served() as (server, family):
        running = streams(server, 4)
        unary = [Unary(server) for _ in range(4)]
        wait_for_requests(server, 8)
        queued = [Stream(server) for _ in range(8)]  # More than the KV cache holds at once.
        family.shards[0].send_signal(signal.SIGKILL)
        # The clients first: each stream ends, with an error and not with a hang.
        for stream in running + queued:
            assert stream.ended.wait(NOTICED_S), "a stream hangs"
            assert not stream.is_complete
            # 200 with an error event; or, if it came too late, an error status or no connection at all.
            assert "error" in stream.events[-1] if stream.status == 200 else stream.status in (None, 424, 429, 503)
        assert all(stream.status == 200 for stream in running)
        for one in unary:
            assert one.ended.wait(NOTICED_S), "a request hangs"
            assert one.status in (None, 424, 429, 503), one.status
        assert any(one.status == 424 for one in unary)
        assert ended(server) == 1
        assert family.left() == []
        log = server.log()
        assert 'Error: ShardFailed("shard 0 was killed by signal 9 (SIGKILL)' in log
        assert "Shard 0 crashed" in log


@pytest.mark.long
def test_a_killed_router_ends_everything() -> None:
    with served() as (server, family):
        running = streams(server, 2)
        family.router.send_signal(signal.SIGKILL)
        assert all(stream.ended.wait(NOTICED_S) for stream in running)
        assert ended(server) == 1
        assert family.left() == []
        assert 'Error: WebserverFailed("router was killed by signal 9 (SIGKILL)' in server.log()


@pytest.mark.long
def test_a_killed_launcher_leaves_no_orphans() -> None:
    with served() as (server, family):
        folder = socket_folder(family)
        running = streams(server, 2)
        server.process.send_signal(signal.SIGKILL)
        assert family.left() == []
        assert all(stream.ended.wait(NOTICED_S) for stream in running)
        assert port_is_free(server.port)
        deadline = time.monotonic() + NOTICED_S
        while folder.exists():
            assert time.monotonic() < deadline, "the socket folder is left"
            time.sleep(0.02)


@pytest.mark.long
def test_a_shard_that_is_stopped_is_killed_with_the_rest() -> None:
    """SIGSTOP and then a stop: what cannot hear SIGTERM does not keep the launcher from ending."""
    with served("--graceful-termination-timeout", "3", "--json-output") as (server, family):
        family.shards[0].send_signal(signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, 3 + NOTICED_S) == 0, server.log()
        assert family.left() == []
        records = [json.loads(line) for line in server.log().splitlines()]
        assert {"text_generation_launcher", "model_server.cli", "router.server.server"} <= {
            each["target"] for each in records
        }


@pytest.mark.long
def test_a_shard_that_makes_no_progress_ends_everything() -> None:
    with served(MAX_STEP_SECONDS="2") as (server, family):
        running = streams(server, 2)
        family.shards[0].send_signal(signal.SIGSTOP)
        for stream in running:
            assert stream.ended.wait(NOTICED_S), "a stream hangs"
            assert "error" in stream.events[-1]
        assert not server.is_healthy()
        assert ended(server) == 1
        assert family.left() == []
        log = server.log()
        assert "no step finished for 2 s" in log.splitlines()[-1]
        assert "No stacks of shard 0 (ready for " in log and "its state is T (stopped)" in log


_DEADLOCK = """
import os, sys, threading
if os.environ.get("RANK"):
    from model_server.engine.engine import Engine
    def endless_kernel(*arguments, **options):
        threading.Event().wait()
    class Decode:
        def __get__(self, engine, kind):
            return endless_kernel if os.path.exists({flag!r}) else real.__get__(engine, kind)
    real, Engine.submit_decode = Engine.submit_decode, Decode()
"""


@pytest.mark.long
def test_what_a_stuck_shard_is_doing_is_shown_before_it_is_killed(tmp_path: Path) -> None:
    flag = tmp_path / "stuck"
    with served(MAX_STEP_SECONDS="2", **sabotaged(tmp_path, _DEADLOCK.format(flag=str(flag)))) as (server, family):
        running = streams(server, 2)
        flag.touch()
        assert all(stream.ended.wait(NOTICED_S) for stream in running), "a stream hangs"
        assert ended(server) == 1
        assert family.left() == []
        log = server.log()
        assert "Stacks of shard 0 (ready for " in log and "in endless_kernel" in log
        assert "Error: WebserverFailed(" in log and "no step finished for 2 s" in log.splitlines()[-1]


@pytest.mark.long
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


@pytest.mark.long
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
    shutil.copy(demo_model.path() / "tokenizer.json", tmp_path)
    with running_server(tmp_path, wait=False) as server:
        assert ended(server) == 1
        log = server.log()
    last = log.rstrip().splitlines()[-1]
    assert last.startswith('Error: ShardCannotStart("shard 0 exited with status 1: '), log
    assert not psutil.pid_exists(server.process.pid)
