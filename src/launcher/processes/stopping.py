"""The ways of stopping the children: in order after a signal, at once after a failure."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Sequence

from launcher.errors import ShardFailed, WebserverFailed
from launcher.other_nodes import Group
from launcher.processes.child import Child
from launcher.processes.failures import blame_order, cause, exit_of, headline, is_orderly, report_crash
from launcher.processes.signals import Signals
from launcher.processes.timeouts import Timeouts
from launcher.terminal import unfinished_requests
from wire.log import console
from wire.text.counting import counted

logger = logging.getLogger("text_generation_launcher")

SHOWN = {console.ATTRIBUTE: True}
_POLL_S = 1.0
"""A child's end interrupts the wait; the poll is for the case that this news was lost."""


class KillRequested(Exception):
    """A signal while stopping."""


class Stopping:
    """Each method raises KillRequested on a further signal."""

    def __init__(self, signals: Signals, timeouts: Timeouts) -> None:
        self._signals, self._timeouts = signals, timeouts

    def in_order(self, shards: Sequence[Child], router: Child | None, group: Group) -> None:
        """The router first, which answers what it still can. Raises LauncherError if a child had failed before."""
        received = self._signals.received
        why = signal.Signals(received[0]).name if received else "The group of nodes ends"
        logger.info("%s: %s", why, self._announced(router), extra=SHOWN)
        deadline = time.monotonic() + self._timeouts.graceful_s
        routers = [router] if router is not None else []
        if not self.end(routers, self._timeouts.graceful_s):
            routers = []  # Killed by us because its time was over, it has not failed.
        self._wait_for_others(shards, group, deadline)
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
        self.end(shards, min(self._timeouts.shards_s, max(1.0, deadline - time.monotonic())))
        if stopped:
            raise ShardFailed(
                f"{stopped[0].title} was stopped before the last requests were answered; "
                "only the launcher should be signalled (systemd: KillMode=mixed)"
            )
        if first is not None:
            raise (WebserverFailed if router_failed else ShardFailed)(cause(first))

    def _announced(self, router: Child | None) -> str:
        """What happens now."""
        again = "Ctrl-C" if signal.SIGINT in self._signals.received else "signal"
        now = f"a second {again} ends everything now"
        if router is None or router.poll() is not None or router.ready_at is None:
            return f"stopping; {now}"
        num = unfinished_requests(router.command.url or "")
        if num == 0:
            return "stopping, no request runs"
        runs = "" if num is None else f"{counted(num, 'request')} {'runs' if num == 1 else 'run'}; "
        return f"{runs}stopping, at most {self._timeouts.graceful_s:g} s; {now}"

    def _wait_for_others(self, shards: Sequence[Child], group: Group, deadline: float) -> None:
        """Until no request of the group needs these shards."""
        while not group.may_stop_shards() and time.monotonic() < deadline:
            if self._signals.pop():
                raise KillRequested
            if any(child.poll() is not None for child in shards):
                return
            self._signals.wait(_POLL_S)

    def after_failure(self, shards: Sequence[Child], router: Child | None, *, by_force: bool = False) -> None:
        """All at once: nothing more can be answered. by_force: shards are killed, as they wait for another node."""
        logger.info("Shutting down shards")
        for child in shards if by_force else ():
            child.kill()
        routers = [router] if router is not None else []
        for child in routers:
            child.terminate()
        # The survivors' end fails the calls that the router still waits for.
        self.end(shards, self._timeouts.survivors_s)
        self.end(routers, self._timeouts.failing_router_s)

    def end(self, children: Iterable[Child], timeout_s: float) -> bool:
        """Ask each child to end, kill the rest after `timeout_s`, and return whether none was killed.

        Raises:
            KillRequested: A signal came.
        """
        running = [child for child in children if child.poll() is None]
        began = time.monotonic()
        record_at = began + self._timeouts.draining_record_s
        for child in running:
            child.terminate()
        while running := [child for child in running if child.poll() is None]:
            if self._signals.pop():
                raise KillRequested
            now = time.monotonic()
            left_s = began + timeout_s - now
            if left_s <= 0:
                logger.warning("%s did not stop in %g s: killed", " and ".join(c.title for c in running), timeout_s)
                for child in running:
                    child.kill()
                return False
            if now >= record_at:
                record_at += self._timeouts.draining_record_s
                logger.info("Waiting for %s to finish, %.0f s left", " and ".join(c.title for c in running), left_s)
            self._signals.wait(min(left_s, record_at - now, _POLL_S))
        return True
