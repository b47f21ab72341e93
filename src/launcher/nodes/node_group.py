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
    """The calls of a launch, in order: `join`, `meet`, those of `Group`, `end` after a failure, `close`."""

    address: str
    """Where this node listens for the others."""

    @abstractmethod
    def join(self, config: LauncherConfig, commit_of: CommitOf, pause: Pause) -> LauncherConfig:
        """Wait until all nodes have joined; return this node's options with the common commit."""

    @abstractmethod
    def meet(self, own: pb.Prepared, pause: Pause) -> pb.Start:
        """Waits until the model is on all nodes. Raises LauncherError."""

    @abstractmethod
    def end(self, error: LauncherError) -> LauncherError:
        """End all nodes because of `error`, and return the error of this one, which names the first to fail."""

    @abstractmethod
    def close(self) -> None:
        """Stop the channel; the others count this node as lost unless they know that it ends."""
