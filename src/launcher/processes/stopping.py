"""The ways of stopping the children: in order after a signal, at once after a failure.

Each yields the seconds until it wants to look again, and returns early if a child ends before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Sequence

from launcher.errors import ShardFailed, WebserverFailed
from launcher.other_nodes import Group
from launcher.processes.child import Child
from launcher.processes.failures import blame_order, cause, exit_of, headline, is_orderly, report_crash
from launcher.processes.timeouts import Timeouts
from launcher.terminal import unfinished_requests
from wire.log import console
from wire.text.counting import counted

logger = logging.getLogger("text_generation_launcher")

SHOWN = {console.ATTRIBUTE: True}
_POLL_S = 1.0
"""A child's end interrupts the wait; the poll is for the case that this news was lost."""
_REAP_S = 5.0


class KillRequested(Exception):
    """A signal while stopping."""


def announced(num_requests: int | None, graceful_s: float, remark: str) -> str:
    """Say how a server stops; None: it is not known how many requests run."""
    if num_requests == 0:
        return "stopping, no request runs"
    runs = (
        "" if num_requests is None else f"{counted(num_requests, 'request')} {'runs' if num_requests == 1 else 'run'}; "
    )
    return f"{runs}stopping, at most {graceful_s:g} s" + (f"; {remark}" if remark else "")


class Stopping:
    """The children of one model."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts

    def in_order(
        self, shards: Sequence[Child], router: Child | None, group: Group, *, why: str, remark: str
    ) -> Iterator[float]:
        """The router first, which answers what it still can. Raises LauncherError if a child had failed before."""
        logger.info("%s: %s", why, self._announced(router, remark), extra=SHOWN)
        deadline = time.monotonic() + self._timeouts.graceful_s
        routers = [router] if router is not None else []
        if not (yield from self._end(routers, self._timeouts.graceful_s)):
            routers = []  # Killed by us because its time was over, it has not failed.
        yield from self._wait_for_others(shards, group, deadline)
        ended = [*routers, *(child for child in shards if child.poll() is not None)]
        failed = [child for child in ended if not is_orderly(exit_of(child))]
        # The requests that were still running have been lost: this was no orderly stop. A shard's end is why the
        # router gave up, so that it is named first.
        first = min(failed, key=lambda child: (child is router, blame_order(child)), default=None)
        router_failed = first is not None and first is router
        # The router may not have failed: a service manager that signals every process stops the shards that it uses.
        stopped = [child for child in ended if child is not router] if router_failed else []
        if first is not None and not stopped:
            report_crash(first, headline(first))
        logger.info("Shutting down shards")
        yield from self._end(shards, min(self._timeouts.shards_s, max(1.0, deadline - time.monotonic())))
        if stopped:
            raise ShardFailed(
                f"{stopped[0].title} was stopped before the last requests were answered; "
                "only the launcher should be signalled (systemd: KillMode=mixed)"
            )
        if first is not None:
            raise (WebserverFailed if router_failed else ShardFailed)(cause(first))

    def _announced(self, router: Child | None, remark: str) -> str:
        """What happens now."""
        if router is None or router.poll() is not None or router.ready_at is None:
            return f"stopping; {remark}" if remark else "stopping"
        return announced(unfinished_requests(router.command.url or ""), self._timeouts.graceful_s, remark)

    def _wait_for_others(self, shards: Sequence[Child], group: Group, deadline: float) -> Iterator[float]:
        """Until no request of the group needs these shards."""
        while not group.may_stop_shards() and time.monotonic() < deadline:
            if any(child.poll() is not None for child in shards):
                return
            yield _POLL_S

    def after_failure(
        self, shards: Sequence[Child], router: Child | None, *, by_force: bool = False
    ) -> Iterator[float]:
        """All at once: nothing more can be answered. by_force: shards are killed, as they wait for another node."""
        logger.info("Shutting down shards")
        for child in shards if by_force else ():
            child.kill()
        routers = [router] if router is not None else []
        for child in routers:
            child.terminate()
        # The survivors' end fails the calls that the router still waits for.
        yield from self._end(shards, self._timeouts.survivors_s)
        yield from self._end(routers, self._timeouts.failing_router_s)

    def _end(self, children: Iterable[Child], timeout_s: float) -> Generator[float, None, bool]:
        return end_all(children, timeout_s, self._timeouts)


def end_all(children: Iterable[Child], timeout_s: float, timeouts: Timeouts) -> Generator[float, None, bool]:
    """Ask each child to end, kill the rest after `timeout_s`, and return whether none was killed."""
    running = [child for child in children if child.poll() is None]
    began = time.monotonic()
    record_at = began + timeouts.draining_record_s
    for child in running:
        child.terminate()
    while running := [child for child in running if child.poll() is None]:
        now = time.monotonic()
        left_s = began + timeout_s - now
        if left_s <= 0:
            logger.warning("%s did not stop in %g s: killed", " and ".join(c.title for c in running), timeout_s)
            for child in running:
                child.kill()
            return False
        if now >= record_at:
            record_at += timeouts.draining_record_s
            logger.info("Waiting for %s to finish, %.0f s left", " and ".join(c.title for c in running), left_s)
        yield min(left_s, record_at - now, _POLL_S)
    return True


def kill_all(children: Iterable[Child]) -> None:
    """Kill every child that still runs and wait until each is gone."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.kill()
    deadline = time.monotonic() + _REAP_S
    while any(child.poll() is None for child in running) and time.monotonic() < deadline:
        time.sleep(0.01)
    for child in running:
        if child.exit is None:
            logger.error("%s (pid %d) does not exit, even after SIGKILL", child.title, child.pid)
