"""What the launch asks of a group of nodes, on node 0 and on the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from launcher.config import LauncherConfig
from launcher.errors import LauncherError
from launcher.other_nodes import Group
from wire.log import console
from wire.node.v1 import node_pb2 as pb

Pause = Callable[[float], None]
"""Waits so many seconds, less when something has happened. Raises what ends the launch."""
WAITING_RECORD_S = 10.0
"""How often the log says for whom this node waits."""
SHOWN = {console.ATTRIBUTE: True}
CommitOf = Callable[[LauncherConfig], str]
"""The commit of a hub model; empty for a directory."""


class NodeGroup(Group):
    """In the order of the launch: `join`, `meet`, then what `Group` has, then `end` after a failure, and `close`."""

    address: str
    """Where this node listens for the others."""

    @abstractmethod
    def join(self, config: LauncherConfig, commit_of: CommitOf, pause: Pause) -> LauncherConfig:
        """Waits until all nodes have joined; the options of this node, with the commit that all serve.

        Raises LauncherError.
        """

    @abstractmethod
    def meet(self, own: pb.Prepared, pause: Pause) -> pb.Start:
        """Waits until the model is on all nodes. Raises LauncherError."""

    @abstractmethod
    def end(self, error: LauncherError) -> LauncherError:
        """All nodes end because of `error`; what this one ends with, which names the first to fail. Takes a second or
        two: the nodes tell each other."""

    @abstractmethod
    def close(self) -> None:
        """No more is said to the others, who may count this node as lost if they were not told that it ends."""
