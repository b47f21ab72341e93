"""Notifies a rank at once when another rank's process exits, for any reason."""

# A collective does not: NCCL's kernels spin on the device until they are killed, its watchdog checks no earlier than
# the timeout and never a captured graph; and a rank that is still loading has no collective to fail. The ranks of
# a server are processes of one machine, so the kernel is asked: a pidfd becomes readable when its process ends.
#
# Knows nothing of torch. Where the kernel has no pidfds (before Linux 5.3) no rank is watched, and the launcher's own
# watch over its shards remains.

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from wire.exit_status import LOST_PEER

logger = logging.getLogger(__name__)

# A stop ends the ranks one after another: the next one's own signal is on its way.
ORDERLY_S = 0.3
# From the loss to the end of this process, if it cannot end in order: its device may never answer again.
LEAVE_LIMIT_S = 5.0


@dataclass(frozen=True)
class Identity:
    """A process, and the namespace of its number."""

    pid: int
    space: str

    @classmethod
    def own(cls) -> Identity:
        space = ""
        with contextlib.suppress(OSError):
            space = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
        return cls(os.getpid(), space)

    def encode(self) -> str:
        return f"{self.pid} {self.space}"

    @classmethod
    def decode(cls, text: str) -> Identity:
        pid, _, space = text.partition(" ")
        return cls(int(pid), space)


class PeerWatch:
    """Watches the other ranks' processes on a thread, and reports the first loss to `on_lost`.

    By default the process leaves at once; in any case `leave_limit_s` later, unless the watch is closed.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Identity],
        *,
        leave: Callable[[], object] | None = None,
        orderly_s: float = ORDERLY_S,
        leave_limit_s: float = LEAVE_LIMIT_S,
    ) -> None:
        """Take the other ranks; invisible ones (other machines, containers) are left out."""
        self.on_lost: Callable[[str], object] | None = None
        self._rank = rank
        self._leave = leave or (lambda: leave_at_once(LOST_PEER))
        self._orderly_s, self._leave_limit_s = orderly_s, leave_limit_s
        self._ranks: dict[int, int] = {}  # by descriptor
        self._gone: set[int] = set()
        self._closed, self._noticed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe()
        for peer, identity in peers.items():
            self._add(peer, identity)
        self.sees_all = len(self._ranks) + len(self._gone) == len(peers)

    def start(self) -> None:
        if self._ranks or self._gone:
            self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; safe to call twice, and from `on_lost`."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake_write, b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for descriptor in [*self._ranks, self._wake_read, self._wake_write]:
            os.close(descriptor)

    def lost(self, timeout_s: float = 0.0) -> str | None:
        """Name the lost ranks ("rank 1"), if any within `timeout_s`."""
        if self._thread is not None and not self._noticed.wait(timeout_s):
            return None
        return _names(self._gone) if self._gone else None

    def _add(self, peer: int, identity: Identity) -> None:
        if not hasattr(os, "pidfd_open") or identity.space != Identity.own().space:
            return
        try:
            self._ranks[os.pidfd_open(identity.pid)] = peer
        except ProcessLookupError:
            self._gone.add(peer)
        except OSError as error:
            logger.debug("Rank %d is not watched: %s", peer, error)

    def _watch(self) -> None:
        if not self._gone:
            self._wait_for_an_end()
        if self._closed.is_set():
            return
        self._noticed.set()
        if self._closed.wait(self._orderly_s):
            return
        message = f"rank {self._rank} lost {_names(self._gone)}: its process has exited"
        if self.on_lost is None:
            logger.error("%s", message)
            self._leave()
            return
        self.on_lost(message)
        if not self._closed.wait(self._leave_limit_s):
            logger.error("%s; this process did not exit in order within %g s", message, self._leave_limit_s)
            self._leave()

    def _wait_for_an_end(self) -> None:
        poll = select.poll()
        for descriptor in [*self._ranks, self._wake_read]:
            poll.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        self._gone.update(self._ranks[descriptor] for descriptor in ready if descriptor in self._ranks)


def leave_at_once(status: int) -> NoReturn:
    """End the process without cleanup, which may wait for a failing device or a lost rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _names(ranks: set[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks))
