"""Runs the download step, then a model's processes, until a signal or the first failure. A second signal kills."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from launcher.command import Command
from launcher.errors import DownloadError, LauncherError
from launcher.other_nodes import Group
from launcher.processes.child import Child, Guard, start_child
from launcher.processes.failures import cause, report_crash
from launcher.processes.model_processes import ModelProcesses, ModelState, OnReady
from launcher.processes.signals import Signals
from launcher.processes.stopping import KillRequested, end_all, kill_all
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal

logger = logging.getLogger("text_generation_launcher")

_DOWNLOAD_POLL_S = 1.0
"""The child's end interrupts the wait; the poll is for the case that this news was lost."""


class _StopRequested(Exception):
    """A first signal."""


class Supervisor:
    def __init__(
        self,
        signals: Signals,
        guard: Guard,
        timeouts: Timeouts,
        *,
        age_s: float = 0.0,
        own_phases: Sequence[tuple[str, float]] | None = None,
        terminal: Terminal | None = None,
        group: Group | None = None,
    ) -> None:
        """Take what a launch is watched with.

        Args:
            age_s: How long the launch has been running.
            own_phases: The launcher's own phases in seconds, for a table of the start.
            group: The other nodes, if any.
        """
        self._signals, self._guard, self._timeouts = signals, guard, timeouts
        self._group = group or Group()
        self.model = ModelProcesses(guard, timeouts, group=group, terminal=terminal, own_phases=own_phases)
        self._own_phases = own_phases
        self._download: Child | None = None
        self._began_at = time.monotonic() - age_s
        self._download_s = 0.0

    def download(self, command: Command) -> int | None:
        """Runs the download step. None: it succeeded; an exit status: a signal ended it. Raises DownloadError."""
        began_at = time.monotonic()
        child = self._download = start_child(command, self._guard, DownloadError)
        try:
            while child.poll() is None:
                self._group.check()
                self._pause(_DOWNLOAD_POLL_S)
        except _StopRequested:
            return self._stop(end_all([child], self._timeouts.download_s, self._timeouts))
        if child.exit is not None and child.exit.returncode != 0:
            report_crash(child, "Download process failed")
            raise DownloadError(cause(child))
        self._download_s = time.monotonic() - began_at
        return None

    def serve(
        self, shards: Sequence[Command], router: Command | None, *, on_started: Callable[[], None], on_ready: OnReady
    ) -> int:
        """Run everything until a signal, and return the exit status.

        Args:
            router: None on a node without one.
            on_started: Called when the shards have been started, while they load.
            on_ready: Called with the router's address and the seconds of the start.

        Raises:
            LauncherError: A child or another node ended before.
        """
        model = self.model
        life = model.load(
            shards,
            router,
            began_at=self._began_at,
            download_s=self._download_s,
            on_started=on_started,
            on_ready=on_ready,
        )
        try:
            while True:
                self._pause(next(life))
                if model.state is ModelState.READY and self._signals.pop_change():
                    model.read_keys_again()
        except _StopRequested:
            return self._stop(model.unload(self._why(), remark=self._signals.remark))
        except LauncherError:
            self._stop(model.end_after_failure())
            raise

    def kill_all(self) -> None:
        """Kills every child that still runs and waits until each is gone."""
        kill_all([*self.model.children, *filter(None, [self._download])])

    def _pause(self, timeout_s: float) -> None:
        self._signals.wait(timeout_s)
        # While it says why it failed it is not stopped in order any more.
        has_failed = self.model.state is ModelState.FAILED
        if self._signals.pop() or (not has_failed and self._group.wants_stop()):
            raise _StopRequested

    def _why(self) -> str:
        received = self._signals.received
        return signal.Signals(received[0]).name if received else "The group of nodes ends"

    def _stop(self, way: Iterator[float]) -> int:
        """Go a way of stopping; whatever happens in it, nothing is left afterwards. Returns the exit status."""
        try:
            for pause_s in way:
                self._signals.wait(pause_s)
                if self._signals.pop():
                    raise KillRequested
        except KillRequested:
            number = self._signals.received[-1]
            logger.warning("%s: killing everything now", signal.Signals(number).name)
            return 128 + number
        finally:
            self.kill_all()
        return 0
