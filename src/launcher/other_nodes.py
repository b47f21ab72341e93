"""The other nodes of a group, as seen by the code that runs one node's processes."""

from __future__ import annotations

from launcher.errors import LauncherError


class Group:
    """A node alone: there are no others. Only the main thread calls these methods; none of them waits."""

    def check(self) -> None:
        """Raises NodeLost once another node has failed or is lost."""

    def wants_stop(self) -> bool:
        """Whether another node was asked to stop in order, so that all nodes do."""
        return False

    def show_progress(self, text: str) -> None:
        """What this node is doing until it serves."""

    def all_are_ready(self) -> bool:
        """Called once the shards of this node are ready: whether those of all nodes are."""
        return True

    def report(self, error: LauncherError) -> None:
        """This node ends because of `error`: all nodes do. Later reports change nothing."""

    def may_stop_shards(self) -> bool:
        """Called while this node stops in order: whether no request needs its shards any more."""
        return True
