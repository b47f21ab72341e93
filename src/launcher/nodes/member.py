"""Another node, as node 0 sees it."""

from __future__ import annotations

from launcher.nodes import group_end
from launcher.nodes.channel import Stream
from launcher.nodes.group_end import Failure
from wire.node.v1 import node_pb2 as pb


class Member(Stream[pb.LeaderSays]):
    """A node that has joined. Written by the thread that reads its messages."""

    def __init__(self, hello: pb.Hello, lease_s: float) -> None:
        super().__init__(pb.LeaderSays, lease_s)
        self.hello = hello
        self.name = group_end.title(hello.node_rank, hello.address)
        self.prepared: pb.Prepared | None = None
        self.failure: Failure | None = None
        self.is_serving = self.asks_for_stop = False
        self.progress = "joined"

    def loss(self) -> Failure | None:
        """What ends the group because of this node; None while it is there."""
        if self.failure is not None:
            return self.failure
        if self.is_closed.is_set():
            return Failure(node_rank=self.hello.node_rank, text=group_end.gone(self.name))
        if self.is_lost:
            return Failure(node_rank=self.hello.node_rank, text=group_end.silent(self.name, self.lease_s))
        return None

    def on_message(self, message: pb.NodeSays) -> None:
        what = message.WhichOneof("what")
        if what == "prepared":
            self.prepared = message.prepared
        elif what == "serving":
            self.is_serving = True
        elif what == "stop_asked":
            self.asks_for_stop = True
        elif what == "progress":
            self.progress = message.progress
        elif what == "failure" and self.failure is None:
            said = message.failure
            self.failure = Failure(
                node_rank=self.hello.node_rank,
                text=f"{self.name}: {said.text}",
                is_consequence=said.is_consequence,
            )
