"""The processes of one model, its shards and its router, from their start to their end.

shards (all at once) ─▶ all healthy ─▶ router ─▶ healthy ─▶ serve ─▶ router drains ─▶ shards ─▶ gone

The end of any of them is the model's, with an error that names the first to fail. Nothing here waits: `load`, `unload`
and `end_after_failure` yield the seconds until they want to look again, so that one thread can run several models.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from launcher.command import Command
from launcher.errors import (
    LauncherError,
    ShardCannotStart,
    ShardFailed,
    WebserverCannotStart,
    WebserverFailed,
)
from launcher.other_nodes import Group
from launcher.processes import stacks, start_times
from launcher.processes.child import Child, Guard, start_child
from launcher.processes.failures import blame_order, cause, exit_of, headline, rank_field, report_crash
from launcher.processes.stopping import SHOWN, Stopping, kill_all
from launcher.processes.timeouts import Timeouts
from launcher.terminal import Terminal
from wire import phases
from wire.exit_status import LOST_PEER, MISSING_PEER, STALLED

logger = logging.getLogger("text_generation_launcher")

_STARTING_POLL_S = 0.02
_MOST_RESTARTS, _RESTARTS_WITHIN_S = 3, 600.0
"""Of replicas; more end the model."""
_SERVING_POLL_S = 1.0
"""While serving, a child's end interrupts the wait; the poll is for the case that this news was lost."""

OnReady = Callable[[str, float], None]


class ModelState(enum.Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class ModelProcesses:
    """Shards and router of one model; may be loaded again once they are gone."""

    def __init__(
        self,
        guard: Guard,
        timeouts: Timeouts,
        *,
        group: Group | None = None,
        terminal: Terminal | None = None,
        own_phases: Sequence[tuple[str, float]] | None = None,
    ) -> None:
        """Take what a start is watched with.

        Args:
            group: The other nodes, if any.
            own_phases: The launcher's own phases in seconds, for a table of the start.
        """
        self.state = ModelState.UNLOADED
        self._group, self._is_alone = group or Group(), group is None
        self._guard, self._timeouts = guard, timeouts
        self._stopping = Stopping(timeouts)
        self._terminal, self._own_phases = terminal, own_phases
        self._shards: list[Child] = []
        self._router: Child | None = None
        self._began_at = self._download_s = 0.0
        self._restarts: list[float] = []

    @property
    def children(self) -> list[Child]:
        """Return all of the last start, whether they run or not."""
        return [*self._shards, *filter(None, [self._router])]

    def load(
        self,
        shards: Sequence[Command],
        router: Command | None,
        *,
        began_at: float,
        download_s: float = 0.0,
        on_started: Callable[[], None],
        on_ready: OnReady,
    ) -> Iterator[float]:
        """Start everything, and watch it for as long as it runs.

        Args:
            router: None on a node without one.
            began_at: When the start began, with its download.
            download_s: What of the time since then does not count.
            on_started: Called when the shards have been started, while they load.
            on_ready: Called with the router's address and the seconds of the start.

        Raises:
            LauncherError: A child or another node ended.
        """
        self.state = ModelState.LOADING
        self._shards, self._router = [], None
        self._began_at, self._download_s = began_at, download_s
        try:
            for command in shards:
                self._shards.append(start_child(command, self._guard, ShardCannotStart))
            on_started()
            for child in self._shards:
                logger.info("Starting shard", extra=rank_field(child))
            yield from self._until_ready(self._shards, ShardCannotStart)
            while not self._group.all_are_ready():
                yield from self._check_alive(ShardFailed)
                yield _SERVING_POLL_S
            if router is None:
                logger.info("Ready: the shards of this node serve the router of node 0", extra=SHOWN)
                self.state = ModelState.READY
                on_ready("", time.monotonic() - self._began_at)
            else:
                logger.info("Starting Webserver")
                self._router = start_child(router, self._guard, WebserverCannotStart)
                yield from self._until_ready([self._router], ShardFailed)
                self.state = ModelState.READY
                on_ready(*self._report_ready(self._router))
            while True:
                yield from self._check_alive(ShardFailed)
                yield _SERVING_POLL_S
        except LauncherError as error:
            self.state = ModelState.FAILED
            self._group.report(error)
            raise

    def read_keys_again(self) -> None:
        """Make the router read its file of API keys."""
        if self._router is not None:
            self._router.read_again()

    def unload(self, why: str, *, remark: str = "") -> Iterator[float]:
        """Let the router answer what it still can, then end the shards.

        Args:
            why: Begins the log's line.
            remark: Ends it.

        Raises:
            LauncherError: A child had failed before.
        """
        self.state = ModelState.UNLOADING
        try:
            yield from self._stopping.in_order(self._shards, self._router, self._group, why=why, remark=remark)
        except LauncherError:
            self.state = ModelState.FAILED
            raise
        self.state = ModelState.UNLOADED

    def end_after_failure(self) -> Iterator[float]:
        """End all at once."""
        yield from self._stopping.after_failure(self._shards, self._router, by_force=not self._is_alone)

    def limit(self, graceful_s: float) -> None:
        """Leave an end that begins now less time."""
        self._timeouts = replace(self._timeouts, graceful_s=min(graceful_s, self._timeouts.graceful_s))
        self._stopping = Stopping(self._timeouts)

    def kill(self) -> None:
        """Kill every process and wait until each is gone."""
        kill_all(self.children)

    # Starting and watching

    def _until_ready(self, children: Sequence[Child], shard_error: type[LauncherError]) -> Iterator[float]:
        record_at = time.monotonic() + self._timeouts.waiting_record_s
        missing = list(children)
        while missing:
            yield from self._check_alive(shard_error)
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
                yield from self._end_late_start(missing)
            if time.monotonic() >= record_at:
                record_at += self._timeouts.waiting_record_s
                for child in missing:
                    said = f"; its last message: {child.logs.last_message}" if child.logs.last_message else ""
                    text = f"phase: {child.logs.progress}{said}"
                    logger.info("Waiting for %s to be ready... (%s)", child.command.name, text, extra=rank_field(child))
            if missing:
                yield _STARTING_POLL_S

    def _end_late_start(self, missing: Sequence[Child]) -> Iterator[float]:
        """Raise for the one that has come the least far, after the stacks of all have been logged."""
        self.state = ModelState.FAILED
        warming = [child for child in self._shards if child.logs.progress.phase == phases.WARM_UP]
        # A router that waits for the warm-up is not the one that is late.
        late = warming or list(missing)
        yield from stacks.show([*late, *(child for child in missing if child not in late)])
        last = min(late, key=lambda child: len(child.logs.progress.began))
        error = WebserverCannotStart if last.command.rank is None else ShardCannotStart
        since = "the start, the download not counted" if self._download_s else "the start"
        raise error(
            f"{last.title} was not ready {self._timeouts.startup_s:g} s after {since} (`--startup-timeout`); "
            f"phase: {last.logs.progress}; its last message: {last.logs.last_message or 'none'}"
        )

    def _is_out_of_time(self) -> bool:
        """Covers only the time that does not depend on the network: a download may take hours."""
        limit = self._timeouts.startup_s
        return limit is not None and time.monotonic() - self._began_at - self._download_s > limit

    def _check_alive(self, shard_error: type[LauncherError]) -> Iterator[float]:
        """Raise for the child that failed first, or for another node."""
        ended = [child for child in self.children if child.poll() is not None]
        if not ended:
            self._group.check()
            for child in self._shards:
                child.is_ready()  # those that have been started again are to be asked
            return
        if self.state is ModelState.READY and self._restart(ended):
            return
        self.state = ModelState.FAILED
        first = min(ended, key=blame_order)
        if exit_of(first).returncode in (STALLED, MISSING_PEER):
            yield from stacks.show([child for child in self._shards if child.poll() is None])
        if first is self._router:
            report_crash(first, headline(first))
            could_not_exec = first.ready_at is None and exit_of(first).returncode == 127
            raise (WebserverCannotStart if could_not_exec else WebserverFailed)(cause(first))
        report_crash(first, headline(first, "failed to start" if shard_error is ShardCannotStart else "crashed"))
        failed = shard_error(cause(first))
        failed.is_consequence = exit_of(first).returncode in (LOST_PEER, MISSING_PEER)
        raise failed

    def _restart(self, ended: Sequence[Child]) -> bool:
        """Start the shards of replicas that have ended again, while another one serves; or return False."""
        failed = {child.command.replica for child in ended}
        # One that starts again itself does not serve yet.
        late = {child.command.replica for child in self._shards if child.poll() is not None or not child.is_ready()}
        others = {child.command.replica for child in self._shards} - failed - late
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < _RESTARTS_WITHIN_S]
        if None in failed or not others or len(self._restarts) + len(failed) > _MOST_RESTARTS:
            return False
        for replica in sorted(number for number in failed if number is not None):
            first = min((child for child in ended if child.command.replica == replica), key=blame_order)
            report_crash(first, headline(first, "crashed"))
            own = [child for child in self._shards if child.command.replica == replica]
            kill_all(own)
            logger.warning("%s: replica %d starts again, others serve", cause(first), replica)
            again = {child: start_child(child.command, self._guard, ShardFailed) for child in own}
            self._shards = [again.get(child, child) for child in self._shards]
            self._restarts.append(now)
        return True

    def _report_ready(self, router: Child) -> tuple[str, float]:
        """Address and seconds."""
        all_s = time.monotonic() - self._began_at
        before_s = min(child.started_at for child in self._shards) - self._began_at
        where = router.command.url or ""
        logger.info("Ready on %s after %.2f s: %s", where, all_s, start_times.one_line(before_s, self._shards, router))
        if self._own_phases is not None:
            logger.info("Start-up\n%s", start_times.table(self._own_phases, self._shards, router, all_s))
        return where, all_s
