"""Group: the processes of one of several models, which end and come back without the launcher's end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.command import Command
from launcher.errors import LauncherError
from launcher.groups.models_file import ModelEntry
from launcher.model_launch import ModelLaunch
from launcher.planning import commands, preflight
from launcher.planning.plan import Endpoints, LaunchPlan, NodePart
from launcher.processes.child import Child, Guard
from launcher.processes.model_processes import ModelProcesses, ModelState
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal
from wire.cli.batch_options import UNFINISHED
from wire.pooling.task import Task

logger = logging.getLogger("text_generation_launcher")

_FOREVER_S = 3600.0
LIMITS_SOCKET = "limits"
"""Name of the front's socket for the limits of API keys, in the folder of all sockets."""


class Group:
    """One model's processes, as the pool starts and stops them."""

    def __init__(
        self,
        entry: ModelEntry,
        model: ModelLaunch,
        task: Task,
        guard: Guard,
        environ: Mapping[str, str],
        sockets: Path,
        *,
        terminal: Terminal | None = None,
    ) -> None:
        """Take a model whose files are there.

        Args:
            sockets: Begins the names of its sockets.
            terminal: Shows a start instead of the log.
        """
        config = entry.config
        timeouts = Timeouts(graceful_s=config.graceful_termination_timeout, startup_s=config.startup_timeout)
        self.entry, self.model, self.task = entry, model, task
        self.uds = sockets.with_name(f"{sockets.name}-http")
        self.state = ModelState.UNLOADED
        self.error = ""
        self._environ, self._sockets, self._terminal = environ, sockets, terminal
        self._processes = ModelProcesses(guard, timeouts, terminal=terminal)
        self._life: Iterator[float] = iter(())
        self._is_stopping = False

    @property
    def children(self) -> list[Child]:
        """Return the processes of the last start, whether they run or not."""
        return self._processes.children

    @property
    def has_batches(self) -> bool:
        """Whether a batch of it has not ended."""
        folder = self.entry.config.batch_dir
        return folder is not None and (folder / UNFINISHED).exists()

    def start(self) -> None:
        """Start shards and router."""
        self.state, self.error, self._is_stopping = ModelState.LOADING, "", False
        logger.info("Loading %s", self.entry.name)
        self._life = self._run()

    def stop(self, why: str) -> None:
        """Let the router answer what it still can, then end all; once."""
        if self._is_stopping or self.state not in (ModelState.LOADING, ModelState.READY):
            return
        self._is_stopping = True
        self.state = ModelState.UNLOADING
        self._life = self._unload(why)

    def read_keys_again(self) -> None:
        """Make the router read its file of API keys."""
        if self.state is ModelState.READY:
            self._processes.read_keys_again()

    def kill(self) -> None:
        """Kill every process and wait until each is gone."""
        self._processes.kill()

    def step(self) -> float:
        """Continue, and return the seconds until it wants to look again; earlier calls do no harm."""
        return next(self._life, _FOREVER_S)

    @property
    def is_running(self) -> bool:
        """Whether a process may be there."""
        return self.state not in (ModelState.UNLOADED, ModelState.FAILED)

    def limit(self, graceful_s: float) -> None:
        """Leave an end that begins now less time."""
        self._processes.limit(graceful_s)

    def plan(self) -> LaunchPlan:
        """Plan the processes. Raises LauncherError."""
        return self.model.plan(self._meet)

    def _meet(
        self, directory: Path | None, adapters: Mapping[str, Path | None], num_shard: int
    ) -> tuple[NodePart | None, Endpoints]:
        port = preflight.rendezvous_port(self.entry.config, num_shard)
        address = preflight.LOOPBACK
        return None, Endpoints(
            hostname=address,
            port=0,
            uds_prefix=str(self._sockets),
            master_port=port,
            uds=self.uds,
            front_uds=self._sockets.with_name(LIMITS_SOCKET),
        )

    def _run(self) -> Iterator[float]:
        try:
            plan = self.plan()
            shards = [self._named(command) for command in commands.shards(plan, self._environ)]
            router = self._named(commands.router(plan, self._environ, logs_requests=self._terminal is not None))
            yield from self._processes.load(
                shards, router, began_at=time.monotonic(), on_started=lambda: None, on_ready=self._on_ready
            )
        except LauncherError as error:
            self.error = str(error)
            self.state = ModelState.UNLOADING
            logger.error("%s has failed: %s", self.entry.name, error)
            yield from self._processes.end_after_failure()
            self._end(ModelState.FAILED)

    def _named(self, command: Command) -> Command:
        return replace(command, model=self.entry.name)

    def _on_ready(self, url: str, seconds: float) -> None:
        self.state = ModelState.READY

    def _unload(self, why: str) -> Iterator[float]:
        try:
            yield from self._processes.unload(why)
        except LauncherError as error:
            logger.warning("%s: %s", self.entry.name, error)
        self._end(ModelState.UNLOADED)

    def _end(self, state: ModelState) -> None:
        self._processes.kill()
        if self._terminal is not None:
            self._terminal.show_starting([], of=0)
        self.state = state
