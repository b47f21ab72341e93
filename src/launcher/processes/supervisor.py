"""Starts, watches and stops the children; the only place that changes their set.

download ─▶ shards (all at once) ─▶ all healthy ─▶ router ─▶ healthy ─▶ serve ─▶ router drains ─▶ shards ─▶ 0

The end of any child ends all, with an error that names the first to fail. A second signal kills.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from launcher.command import Command
from launcher.errors import (
    DownloadError,
    LauncherError,
    ShardCannotStart,
    ShardFailed,
    WebserverCannotStart,
    WebserverFailed,
)
from launcher.other_nodes import Group
from launcher.processes import stacks, start_times
from launcher.processes.child import Child, Guard
from launcher.processes.failures import blame_order, cause, exit_of, headline, rank_field, report_crash
from launcher.processes.signals import Signals
from launcher.processes.stopping import SHOWN, KillRequested, Stopping
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal
from wire import phases
from wire.exit_status import LOST_PEER, MISSING_PEER, STALLED

logger = logging.getLogger("text_generation_launcher")

_STARTING_POLL_S = 0.02
_SERVING_POLL_S = 1.0
"""While serving, a child's end interrupts the wait; the poll is for the case that this news was lost."""
_REAP_S = 5.0

OnReady = Callable[[str, float], None]


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
        self._group, self._is_alone = group or Group(), group is None
        self._terminal = terminal
        self._signals, self._guard, self._timeouts = signals, guard, timeouts
        self._stopping = Stopping(signals, timeouts)
        self._own_phases = own_phases
        self._shards: list[Child] = []
        self._router: Child | None = None
        self._download: Child | None = None
        self._began_at = time.monotonic() - age_s
        self._download_s = 0.0

    def download(self, command: Command) -> int | None:
        """Runs the download step. None: it succeeded; an exit status: a signal ended it. Raises DownloadError."""
        began_at = time.monotonic()
        child = self._download = self._start(command, DownloadError)
        try:
            while child.poll() is None:
                self._group.check()
                self._pause(_SERVING_POLL_S)
        except _StopRequested:
            return self._stop(lambda: self._stopping.end([child], self._timeouts.download_s))
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
        try:
            for command in shards:
                self._shards.append(self._start(command, ShardCannotStart))
            on_started()
            for child in self._shards:
                logger.info("Starting shard", extra={"rank": child.command.rank})
            self._wait_until_ready(self._shards, ShardCannotStart)
            while not self._group.all_are_ready():
                self._check_alive(ShardFailed)
                self._pause(_SERVING_POLL_S)
            if router is None:
                logger.info("Ready: the shards of this node serve the router of node 0", extra=SHOWN)
                on_ready("", time.monotonic() - self._began_at)
            else:
                logger.info("Starting Webserver")
                self._router = self._start(router, WebserverCannotStart)
                self._wait_until_ready([self._router], ShardFailed)
                on_ready(*self._report_ready(self._router))
            while True:
                self._check_alive(ShardFailed)
                self._pause(_SERVING_POLL_S)
                if self._signals.pop_change() and self._router is not None:
                    self._router.read_again()
        except _StopRequested:
            return self._stop(lambda: self._stopping.in_order(self._shards, self._router, self._group))
        except LauncherError as error:
            self._group.report(error)
            force = not self._is_alone
            self._stop(lambda: self._stopping.after_failure(self._shards, self._router, by_force=force))
            raise

    def kill_all(self) -> None:
        """Kills every child that still runs and waits until each is gone."""
        running = self._running()
        for child in running:
            child.kill()
        deadline = time.monotonic() + _REAP_S
        while any(child.poll() is None for child in running) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in running:
            if child.exit is None:
                logger.error("%s (pid %d) does not exit, even after SIGKILL", child.title, child.pid)

    def _start(self, command: Command, error: type[LauncherError]) -> Child:
        logger.debug("Starting %s: %s", command.title, " ".join(command.argv))
        try:
            return Child(command, self._guard)
        except OSError as cause:
            raise error(f"{command.title}: {command.argv[0]}: {cause.strerror}") from cause

    def _running(self) -> list[Child]:
        children = [*self._shards, *filter(None, [self._router, self._download])]
        return [child for child in children if child.poll() is None]

    def _pause(self, timeout_s: float) -> None:
        self._signals.wait(timeout_s)
        if self._signals.pop() or self._group.wants_stop():
            raise _StopRequested

    # Starting and watching

    def _wait_until_ready(self, children: Sequence[Child], shard_error: type[LauncherError]) -> None:
        record_at = time.monotonic() + self._timeouts.waiting_record_s
        missing = list(children)
        while missing:
            self._check_alive(shard_error)
            for child in [child for child in missing if child.is_ready()]:
                missing.remove(child)
                name, took = child.command.name.capitalize(), start_times.total(child)
                logger.info("%s ready in %.2f s", name, took, extra=rank_field(child))
            if missing:
                self._group.show_progress("; ".join(f"{child.title}: {child.logs.progress.phase}" for child in missing))
            if self._terminal is not None:
                self._terminal.show_starting(
                    [(child.title, str(child.logs.progress)) for child in missing], of=len(children)
                )
            if missing and self._is_out_of_time():
                self._end_late_start(missing)
            if time.monotonic() >= record_at:
                record_at += self._timeouts.waiting_record_s
                for child in missing:
                    said = f"; its last message: {child.logs.last_message}" if child.logs.last_message else ""
                    text = f"phase: {child.logs.progress}{said}"
                    logger.info("Waiting for %s to be ready... (%s)", child.command.name, text, extra=rank_field(child))
            if missing:
                self._pause(_STARTING_POLL_S)

    def _end_late_start(self, missing: Sequence[Child]) -> NoReturn:
        """Raises for the one that has come the least far, after the stacks of all have been logged."""
        warming = [child for child in self._shards if child.logs.progress.phase == phases.WARM_UP]
        # A router that waits for the warm-up is not the one that is late.
        late = warming or list(missing)
        self._show_stacks([*late, *(child for child in missing if child not in late)])
        last = min(late, key=lambda child: len(child.logs.progress.began))
        error = WebserverCannotStart if last.command.rank is None else ShardCannotStart
        since = "the start, the download not counted" if self._download_s else "the start"
        raise error(
            f"{last.title} was not ready {self._timeouts.startup_s:g} s after {since} (`--startup-timeout`); "
            f"phase: {last.logs.progress}; its last message: {last.logs.last_message or 'none'}"
        )

    def _show_stacks(self, children: Sequence[Child]) -> None:
        """Raises _StopRequested on a signal that has not been acted on yet."""

        def wait(timeout_s: float) -> None:
            self._signals.wait(timeout_s)
            if self._signals.pop():
                raise _StopRequested

        stacks.show(children, wait)

    def _is_out_of_time(self) -> bool:
        """Covers only the time that does not depend on the network: a download may take hours."""
        limit = self._timeouts.startup_s
        return limit is not None and time.monotonic() - self._began_at - self._download_s > limit

    def _check_alive(self, shard_error: type[LauncherError]) -> None:
        """Raises for the child that failed first, or for another node."""
        ended = [child for child in [*self._shards, self._router] if child is not None and child.poll() is not None]
        if not ended:
            self._group.check()
            return
        first = min(ended, key=blame_order)
        if exit_of(first).returncode in (STALLED, MISSING_PEER):
            self._show_stacks([child for child in self._shards if child.poll() is None])
        if first is self._router:
            report_crash(first, headline(first))
            could_not_exec = first.ready_at is None and exit_of(first).returncode == 127
            raise (WebserverCannotStart if could_not_exec else WebserverFailed)(cause(first))
        report_crash(first, headline(first, "failed to start" if shard_error is ShardCannotStart else "crashed"))
        failed = shard_error(cause(first))
        failed.is_consequence = exit_of(first).returncode in (LOST_PEER, MISSING_PEER)
        raise failed

    def _report_ready(self, router: Child) -> tuple[str, float]:
        """Address and seconds."""
        all_s = time.monotonic() - self._began_at
        before_s = min(child.started_at for child in self._shards) - self._began_at
        where = router.command.url or ""
        logger.info("Ready on %s after %.2f s: %s", where, all_s, start_times.one_line(before_s, self._shards, router))
        if self._own_phases is not None:
            logger.info("Start-up\n%s", start_times.table(self._own_phases, self._shards, router, all_s))
        return where, all_s

    # Stopping

    def _stop(self, how: Callable[[], object]) -> int:
        """Runs a way of stopping; whatever happens in it, nothing is left afterwards. Returns the exit status."""
        try:
            how()
        except KillRequested:
            number = self._signals.received[-1]
            logger.warning("%s: killing everything now", signal.Signals(number).name)
            return 128 + number
        finally:
            self.kill_all()
        return 0
