"""Servers of their own that are interrupted or killed at any moment, and model folders with damaged files.

Either a server serves, or it has ended within the limit: with one cause as its last line, and nobody left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
from hostile.target import Target
from support.launched import Stream
from support.running_server import RunningServer, running_server
from support.tiny_models import tiny_checkpoint

_START_LIMIT_S = 120.0
_END_LIMIT_S = 60.0
_MOST_MEMORY = 4 << 30
"""Of one process, on a model of some kilobytes."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP, signal.SIGSTOP)


async def interrupted_launches(target: Target, source: random.Random, count: int) -> Counter[str]:
    """A signal to some process of a server that starts or serves; then SIGTERM to the launcher."""
    seen: Counter[str] = Counter()
    for _ in range(count):
        seen.update(await asyncio.to_thread(_interrupted, random.Random(source.random())))
    return seen


async def damaged_folders(target: Target, source: random.Random, count: int) -> Counter[str]:
    """One file of a model folder is changed at random."""
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="tercet-hostile-") as folder:
        sound = tiny_checkpoint("llama", Path(folder) / "sound")
        for index in range(count):
            damaged = Path(shutil.copytree(sound, Path(folder) / f"damaged-{index}"))
            what = _damage(damaged, source)
            seen.update(await asyncio.to_thread(_started, damaged, what))
    return seen


def _interrupted(source: random.Random) -> Counter[str]:
    with running_server("demo", wait=False) as server:
        streams = _at_some_moment(server, source)
        family = psutil.Process(server.process.pid).children(recursive=True)
        number = source.choice(_SIGNALS)
        victim = source.choice([psutil.Process(server.process.pid), *family])
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(number)
        with _continued(victim, number):
            server.stop()
        _, alive = psutil.wait_procs(family, timeout=_END_LIMIT_S)
        assert not alive, f"{number.name} leaves {[process.cmdline() for process in alive]}\n{server.log()}"
        for stream in streams:
            assert stream.ended.wait(_END_LIMIT_S), "a client waits for a server that has ended"
        assert "Traceback" not in server.log(), server.log()
    return Counter([number.name])


def _at_some_moment(server: RunningServer, source: random.Random) -> list[Stream]:
    """Either after some seconds of the start, or while it serves."""
    if source.random() < 0.4:
        time.sleep(source.uniform(0, 6))
        return []
    server.wait_healthy()
    return [Stream(server) for _ in range(4)]


@contextlib.contextmanager
def _continued(victim: psutil.Process, number: signal.Signals) -> Iterator[None]:
    """A process that is stopped cannot end others: it goes on after a while."""
    if number is signal.SIGSTOP:
        time.sleep(2)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)
    yield


def _started(folder: Path, what: str) -> Counter[str]:
    with running_server(folder, "--max-total-tokens", "64", wait=False) as server:
        deadline = time.monotonic() + _START_LIMIT_S
        launcher = psutil.Process(server.process.pid)
        while server.process.poll() is None and not server.is_healthy():
            assert time.monotonic() < deadline, f"{what}: neither ready nor ended\n{server.log()}"
            _check_memory(launcher, what)
            time.sleep(0.1)
        if server.process.poll() is None:
            return Counter(served=1)
        last = server.log().rstrip().rpartition("\n")[2]
        assert server.process.returncode == 1 and last.startswith("Error: "), f"{what}: {server.log()}"
    return Counter(refused=1)


def _check_memory(launcher: psutil.Process, what: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                assert process.memory_info().rss < _MOST_MEMORY, f"{what}: {process.cmdline()}"


def _damage(folder: Path, source: random.Random) -> str:
    """Damages one file, and says how."""
    path = source.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    data = bytearray(path.read_bytes())
    kind = source.choice(["bytes", "bytes", "cut", "empty", "gone", "folder", "fifo", "zero"])
    path.unlink()
    if kind == "bytes":
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: source.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    return f"{path.name}: {kind}"
