"""Node 0: admits the other nodes, sends them the plan, and tells all of the first failure."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import grpc

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError, NodeLost
from launcher.group_config import num_nodes
from launcher.nodes import group_end, server
from launcher.nodes.facts import differing
from launcher.nodes.group_end import Failure
from launcher.nodes.member import Member
from launcher.nodes.node_group import SHOWN, WAITING_RECORD_S, CommitOf, NodeGroup, Pause
from launcher.nodes.shared_options import to_words
from wire.log.levels import TO_PYTHON
from wire.node.v1 import node_pb2 as pb
from wire.rpc.mutual_tls import MutualTls

logger = logging.getLogger("text_generation_launcher")

_POLL_S = 0.5
_SETTLE_S, _EXPLAIN_S = 0.3, 1.5
"""After a failure: how long others may have failed before it, unnoticed; and how long a failure that is only the
consequence of another one waits for that."""
_FAREWELL_S = 1.0
_NONCE_BYTES = 16


class Leader(NodeGroup):
    """Owns the server, whose threads call `_talk`; the rest is for the main thread."""

    def __init__(
        self,
        config: LauncherConfig,
        hello: pb.Hello,
        port: int,
        store_port: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """Take what this node would say itself, and how to wake the main thread.

        Args:
            store_port: Finds where rank 0 may listen.
        """
        self.address = hello.address
        self._config, self._hello, self._wake, self._store_port = config, hello, wake, store_port
        self._num_nodes = num_nodes(config)
        self._name = group_end.title(0, hello.address)
        self._lock = threading.Lock()
        self._members: dict[int, Member] = {}
        self._refused = ""
        self._is_complete = self._is_ending = False
        self._failures: list[Failure] = []
        self._record_at = 0.0
        tls = MutualTls.of(config.group_tls_cert, config.group_tls_key, config.group_tls_ca)
        try:
            self._server = server.start(hello.address, port, self._num_nodes, config.group_token, tls, self._talk)
        except RuntimeError:
            raise ArgumentValidation(
                f"node 0 cannot listen on {hello.address}, port {port}: choose another `--master-port`"
            ) from None

    # Joining. On the server's threads.

    def _talk(self, requests: Iterable[pb.NodeSays], context: grpc.ServicerContext) -> Iterator[pb.LeaderSays]:
        first = next(iter(requests), None)
        if first is None or first.WhichOneof("what") != "hello":
            return
        member = Member(first.hello, self._config.lease_seconds)
        reason = self._admit(member)
        if reason is not None:
            logger.warning("Refused %s: %s", member.name, reason)
            self._refused = reason
            yield pb.LeaderSays(refuse=reason)
            return
        logger.info("%s has joined", member.name, extra=SHOWN)
        reader = threading.Thread(
            target=member.read, args=(requests, self._heard_by(member), self._wake), name=member.name, daemon=True
        )
        reader.start()
        yield from member.outgoing()
        member.close()

    def _admit(self, member: Member) -> str | None:
        """Admit a node, or return in one sentence why it cannot join."""
        hello = member.hello
        if hello.num_nodes != self._num_nodes:
            return f"{member.name} has `--nnodes` {hello.num_nodes}, {self._name} {self._num_nodes}"
        if not 0 < hello.node_rank < self._num_nodes:
            return f"{member.name} is not one of the {self._num_nodes} nodes of {self._name}"
        library = differing(dict(self._hello.versions), dict(hello.versions))
        if library is not None:
            theirs, ours = (dict(said.versions).get(library, "none") for said in (hello, self._hello))
            return f"{member.name} has {library} {theirs}, {self._name} {ours}: install the same version on each node"
        if hello.num_gpus != self._hello.num_gpus:
            return f"{member.name} has {hello.num_gpus} GPUs, {self._name} {self._hello.num_gpus}: each needs as many"
        with self._lock:
            there = self._members.get(hello.node_rank)
            if self._is_complete or (there is not None and not there.is_closed.is_set()):
                address = "" if there is None else there.hello.address
                return (
                    f"{self._name} has a node {hello.node_rank} already, at {address}: give each its own `--node-rank`"
                )
            self._members[hello.node_rank] = member
        return None

    def _heard_by(self, member: Member) -> Callable[[pb.NodeSays], None]:
        def on_message(message: pb.NodeSays) -> None:
            member.on_message(message)
            if message.WhichOneof("what") == "record":
                record = message.record
                fields = {"node": member.hello.node_rank} | ({"rank": record.rank} if record.HasField("rank") else {})
                logger.log(TO_PYTHON.get(record.level, logging.WARNING), "%s", record.message, extra=fields)

        return on_message

    # Until the start.

    def join(self, config: LauncherConfig, commit_of: CommitOf, pause: Pause) -> LauncherConfig:
        deadline = time.monotonic() + config.join_timeout
        while missing := self._missing():
            if time.monotonic() > deadline:
                names = " and ".join(f"node {rank}" for rank in missing)
                because = f"; refused was: {self._refused}" if self._refused else ""
                raise ArgumentValidation(
                    f"{names} did not join {self._name} within {config.join_timeout} s (`--join-timeout`){because}"
                )
            self._say_who_is_missing(dict.fromkeys(missing, "not joined yet"))
            pause(_POLL_S)
        commit = commit_of(config)
        plan = pb.Plan(options=to_words(config), commit=commit, lease_seconds=config.lease_seconds)
        self._to_all(pb.LeaderSays(plan=plan))
        logger.info("All %d nodes have joined", self._num_nodes, extra=SHOWN)
        return dataclasses.replace(config, revision=commit) if commit else config

    def _missing(self) -> list[int]:
        with self._lock:
            there = [rank for rank, member in self._members.items() if not member.is_closed.is_set()]
            self._is_complete = len(there) == self._num_nodes - 1
        return [rank for rank in range(1, self._num_nodes) if rank not in there]

    def meet(self, own: pb.Prepared, pause: Pause) -> pb.Start:
        while waiting := [member for member in self._others() if member.prepared is None]:
            self._say_who_is_missing({member.hello.node_rank: member.progress for member in waiting})
            pause(_POLL_S)
        for member in self._others():
            said = member.prepared or pb.Prepared()
            name = differing(dict(own.digests), dict(said.digests))
            if name is not None:
                raise ArgumentValidation(
                    f"{name} of the model is not the same on {self._name} and {member.name}: "
                    "give both the same revision, or the same directory"
                )
            if said.num_shard != own.num_shard:
                raise ArgumentValidation(
                    f"{self._name} would serve with {own.num_shard} shards, {member.name} with {said.num_shard}: "
                    "give `--num-shard`"
                )
        prepared = [own, *(member.prepared or pb.Prepared() for member in self._others())]
        start = pb.Start(
            store_address=self._hello.address,
            store_port=self._store_port(),
            nonce=secrets.token_bytes(_NONCE_BYTES),
            endpoints=[one.endpoint for one in prepared],
        )
        self._to_all(pb.LeaderSays(start=start))
        return start

    # While the processes of this node run.

    def check(self) -> None:
        if not self._is_complete or self._is_ending:
            return
        for member in self._others():
            failure = member.loss()
            if failure is not None:
                self._failures.append(failure)
        if self._failures:
            first = group_end.first_of(self._failures)
            lost = NodeLost(first.text)
            lost.is_consequence = first.is_consequence
            raise lost

    def wants_stop(self) -> bool:
        return any(member.asks_for_stop for member in self._others())

    def show_progress(self, text: str) -> None:
        """Show what the other nodes do: this one's progress is in its log."""
        self.all_are_ready()

    def all_are_ready(self) -> bool:
        waiting = {m.hello.node_rank: m.progress for m in self._others() if not m.is_serving}
        if waiting:
            self._say_who_is_missing(waiting)
        return not waiting

    def report(self, error: LauncherError) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        if not isinstance(error, NodeLost):
            text = f"{self._name}: {error}"
            self._failures.append(Failure(node_rank=0, text=text, is_consequence=error.is_consequence))

    def may_stop_shards(self) -> bool:
        self._is_ending = True
        self._to_all(pb.LeaderSays(stop=pb.Stop()))
        return True

    def end(self, error: LauncherError) -> LauncherError:
        self.report(error)
        deadline = time.monotonic() + _EXPLAIN_S
        settled = time.monotonic() + _SETTLE_S
        while True:
            seen = [*self._failures, *filter(None, (member.loss() for member in self._others()))]
            is_explained = any(not failure.is_consequence for failure in seen)
            if time.monotonic() > (settled if is_explained else deadline):
                break
            time.sleep(0.02)
        if not seen:
            return error
        first = group_end.first_of(seen)
        self._to_all(pb.LeaderSays(stop=pb.Stop(first_failure=first.text, node_rank=first.node_rank)))
        return group_end.as_seen_by(0, error, first)

    def close(self) -> None:
        others = self._others()
        for member in others:
            member.finish()
        deadline = time.monotonic() + _FAREWELL_S
        for member in others:
            member.is_closed.wait(max(0.0, deadline - time.monotonic()))
        self._server.stop(_FAREWELL_S).wait(_FAREWELL_S)

    def _others(self) -> list[Member]:
        with self._lock:
            return [self._members[rank] for rank in sorted(self._members)]

    def _to_all(self, message: pb.LeaderSays) -> None:
        for member in self._others():
            member.say(message)

    def _say_who_is_missing(self, missing: dict[int, str]) -> None:
        """Now and then, a line for each."""
        now = time.monotonic()
        if now < self._record_at:
            return
        if self._record_at:
            with self._lock:
                names = {rank: self._members[rank].name for rank in missing if rank in self._members}
            for rank, progress in missing.items():
                logger.info("Waiting for %s: %s", names.get(rank, f"node {rank}"), progress, extra=SHOWN)
        self._record_at = now + WAITING_RECORD_S
