"""A supervisor with small real children, and what it logs."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unit.launcher.fake_children import router, shard

from launcher.command import Command
from launcher.processes.child import Child, Guard
from launcher.processes.signals import Signals
from launcher.processes.supervisor import Supervisor
from launcher.processes.timeouts import Timeouts


class Story(logging.Handler):
    """What the supervisor logs; an action can be tied to the first record that contains a text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._actions: list[tuple[str, Callable[[], None]]] = []

    def at(self, text: str, action: Callable[[], None]) -> None:
        self._actions.append((text, action))

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.lines.append(line)
        for pair in list(self._actions):
            if pair[0] in line:
                self._actions.remove(pair)
                pair[1]()

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


class Launch:
    """A supervisor with its signals, its folder and its story."""

    def __init__(self, folder: Path, signals: Signals, guard: Guard, story: Story) -> None:
        self.folder, self.signals, self.guard, self.story = folder, signals, guard, story
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.on_started: Callable[[], None] = lambda: None
        self.ready: list[str] = []
        """The address of each router that answered."""
        self.supervisor: Supervisor | None = None

    def supervise(self, *, own_phases: Sequence[tuple[str, float]] | None = None, **patience: float) -> Supervisor:
        values: dict[str, float] = {"graceful_s": 20.0, **patience}
        self.supervisor = Supervisor(self.signals, self.guard, Timeouts(**values), own_phases=own_phases)
        return self.supervisor

    def serve(
        self,
        shards: Sequence[Command] | None = None,
        router_command: Command | None = None,
        *,
        own_phases: Sequence[tuple[str, float]] | None = None,
        **patience: float,
    ) -> int:
        shards = [shard(self.folder)] if shards is None else shards
        command = router(self.folder, self.port) if router_command is None else router_command
        supervisor = self.supervise(own_phases=own_phases, **patience)
        return supervisor.serve(
            shards, command, on_started=self.on_started, on_ready=lambda url, _: self.ready.append(url)
        )

    def running(self) -> list[Child]:
        """Return the processes that have not ended."""
        assert self.supervisor is not None
        return [child for child in self.supervisor.model.children if child.poll() is None]

    def stop_at(self, text: str, number: int = signal.SIGTERM) -> None:
        self.story.at(text, lambda: self.signals.notify(number))

    def kill_at(self, text: str, name: str, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        def kill() -> None:
            for child in self.running():
                if (child.command.name, child.command.rank) == (name, rank):
                    os.kill(child.pid, number)

        self.story.at(text, kill)

    def hurry_at(self, text: str, seconds: float) -> None:
        """From then on everything must be ready in this many seconds: a time-out that no slow machine can bring on."""

        def hurry() -> None:
            supervisor = self.supervisor
            assert supervisor is not None
            model = supervisor.model
            limit = time.monotonic() - model._began_at + seconds
            model._timeouts = dataclasses.replace(model._timeouts, startup_s=limit)

        self.story.at(text, hurry)
