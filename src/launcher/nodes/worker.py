"""A node other than node 0: joins, follows the plan, and ends with node 0."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError, NodeLost
from launcher.nodes import group_end
from launcher.nodes.channel import Stream
from launcher.nodes.group_end import Failure
from launcher.nodes.node_group import SHOWN, WAITING_RECORD_S, CommitOf, NodeGroup, Pause
from launcher.nodes.shared_options import merged
from wire.log.levels import level_name
from wire.log.log_line import LogLine
from wire.node.v1 import node_pb2 as pb
from wire.node.v1 import node_pb2_grpc as pb_grpc
from wire.rpc import remote_grpc
from wire.rpc.mutual_tls import MutualTls, open_channel

logger = logging.getLogger("text_generation_launcher")

_POLL_S = 0.2
_VERDICT_S = 3.0
"""How long node 0 may take to find out who failed first."""
_FAREWELL_S = 1.0
_MOST_CHARACTERS = 8192
"""Of a record that is repeated in the log of node 0."""


class _Forwarding(logging.Handler):
    """Forwards records at WARN or above, from any thread, to node 0."""

    def __init__(self, say: Callable[[pb.NodeSays], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "node"):  # another node's
            return
        line = getattr(record, "log_line", None)
        rank = line.rank if isinstance(line, LogLine) else getattr(record, "rank", None)
        said = pb.Record(
            level="ERROR" if record.levelno > logging.ERROR else level_name(record.levelno),
            message=record.getMessage()[:_MOST_CHARACTERS],
            target=line.target if isinstance(line, LogLine) else record.name,
            rank=rank,
        )
        self._say(pb.NodeSays(record=said))


class Worker(NodeGroup):
    """Owns the channel to node 0 and its reading thread; other methods are for the main thread."""

    def __init__(
        self, config: LauncherConfig, hello: pb.Hello, port: int, resolve: Callable[[], str], wake: Callable[[], None]
    ) -> None:
        """Take node 0's port, and `resolve`, which finds its address until it is reached."""
        self.address = hello.address
        self._config, self._hello, self._wake = config, hello, wake
        self._rank = hello.node_rank
        self._name = group_end.title(self._rank, hello.address)
        self._port, self._resolve = port, resolve
        self._address = resolve()
        self._channel = self._open_channel()
        self._stream: Stream[pb.NodeSays] = Stream(pb.NodeSays, config.lease_seconds)
        self._plan: pb.Plan | None = None
        self._start: pb.Start | None = None
        self._stop: pb.Stop | None = None
        self._refusal = ""
        self._is_reported = self._has_asked = False
        self._said_progress = ""
        self._forwarding = _Forwarding(self._stream.say)

    @property
    def _leader(self) -> str:
        return group_end.title(0, self._address)

    @property
    def _target(self) -> str:
        return remote_grpc.host_and_port(self._address, self._port)

    def _open_channel(self) -> grpc.Channel:
        config = self._config
        tls = MutualTls.of(config.group_tls_cert, config.group_tls_key, config.group_tls_ca)
        return open_channel(grpc, self._target, tls, remote_grpc.NO_PROXY)

    def join(self, config: LauncherConfig, commit_of: CommitOf, pause: Pause) -> LauncherConfig:
        deadline = time.monotonic() + config.join_timeout
        self._connect(deadline, pause)
        self._stream.heard()
        self._stream.say(pb.NodeSays(hello=self._hello))
        call = pb_grpc.GroupStub(self._channel).Join(
            self._stream.outgoing(), metadata=remote_grpc.token_metadata(config.group_token)
        )
        logger.addHandler(self._forwarding)
        threading.Thread(target=self._read, args=(call,), name="leader", daemon=True).start()
        record_at = time.monotonic() + WAITING_RECORD_S
        while self._plan is None:
            if time.monotonic() > record_at:
                record_at += WAITING_RECORD_S
                logger.info("Waiting for %s, which waits for other nodes", self._leader, extra=SHOWN)
            pause(_POLL_S)
        plan = self._plan
        self._stream.lease_s = plan.lease_seconds
        config = merged(config, list(plan.options), self._leader)
        return dataclasses.replace(config, revision=plan.commit) if plan.commit else config

    def _connect(self, deadline: float, pause: Pause) -> None:
        ready = grpc.channel_ready_future(self._channel)
        record_at = time.monotonic() + WAITING_RECORD_S
        while not ready.done():
            now = time.monotonic()
            if now > deadline:
                raise ArgumentValidation(
                    f"{self._name} did not reach node 0 at {self._target} within {self._config.join_timeout} s "
                    "(`--join-timeout`): does it run, and are `--master-addr`, `--master-port`, certificates right?"
                )
            if now > record_at:
                record_at += WAITING_RECORD_S
                logger.info("Waiting for node 0 at %s", self._target, extra=SHOWN)
                ready = self._at_its_address(ready)
            self._stream.heard()  # the lease begins when node 0 is reached
            pause(_POLL_S)

    def _at_its_address(self, ready: Any) -> Any:
        """What to wait for: `ready`, or a channel to the address that node 0 has now."""
        address = self._resolve()
        if address == self._address:
            return ready
        ready.cancel()
        self._channel.close()
        self._address = address
        self._channel = self._open_channel()
        return grpc.channel_ready_future(self._channel)

    def _read(self, call: grpc.Call) -> None:
        self._stream.read(call, self._on_message, self._wake)

    def _on_message(self, message: pb.LeaderSays) -> None:
        what = message.WhichOneof("what")
        if what == "refuse":
            self._refusal = message.refuse
        elif what == "plan":
            self._plan = message.plan
        elif what == "start":
            self._start = message.start
        elif what == "stop":
            self._stop = message.stop

    def meet(self, own: pb.Prepared, pause: Pause) -> pb.Start:
        self._stream.say(pb.NodeSays(prepared=own))
        record_at = time.monotonic() + WAITING_RECORD_S
        while self._start is None:
            if time.monotonic() > record_at:
                record_at += WAITING_RECORD_S
                logger.info("Waiting until the model is on all nodes", extra=SHOWN)
            pause(_POLL_S)
        return self._start

    def check(self) -> None:
        stop = self._stop
        if stop is not None:
            if stop.HasField("first_failure"):
                raise NodeLost(stop.first_failure)
        elif self._stream.is_closed.is_set():
            raise self._refused() or NodeLost(group_end.gone(self._leader))
        elif self._stream.is_lost:
            raise NodeLost(group_end.silent(self._leader, self._stream.lease_s))

    def _refused(self) -> ArgumentValidation | None:
        """Why node 0 has not taken this node; None if it has."""
        if self._refusal:
            return ArgumentValidation(self._refusal)
        if self._stream.code is grpc.StatusCode.UNAUTHENTICATED:
            return ArgumentValidation(
                f"{self._leader} does not take the `--group-token` of {self._name}: give the same on each node"
            )
        if self._stream.code is grpc.StatusCode.UNIMPLEMENTED:
            return ArgumentValidation(f"at {self._target} another server listens than node 0: check `--master-port`")
        return None

    def wants_stop(self) -> bool:
        return self._stop is not None and not self._stop.HasField("first_failure")

    def show_progress(self, text: str) -> None:
        if text != self._said_progress:
            self._said_progress = text
            self._stream.say(pb.NodeSays(progress=text))

    def all_are_ready(self) -> bool:
        self._stream.say(pb.NodeSays(serving=pb.Serving()))
        return True

    def report(self, error: LauncherError) -> None:
        if self._is_reported:
            return
        self._is_reported = True
        if not isinstance(error, NodeLost):
            failure = pb.Failure(text=str(error), is_consequence=error.is_consequence)
            self._stream.say(pb.NodeSays(failure=failure))

    def may_stop_shards(self) -> bool:
        """Once node 0 has answered what it still can."""
        if not self._has_asked:
            self._has_asked = True
            self._stream.say(pb.NodeSays(stop_asked=pb.StopAsked()))
        return self._stop is not None or self._stream.is_closed.is_set() or self._stream.is_lost

    def end(self, error: LauncherError) -> LauncherError:
        self.report(error)
        deadline = time.monotonic() + _VERDICT_S
        while self._stop is None and not self._stream.is_closed.is_set() and time.monotonic() < deadline:
            if isinstance(error, NodeLost):
                break
            time.sleep(0.02)
        if self._stop is not None and self._stop.HasField("first_failure"):
            first = Failure(node_rank=self._stop.node_rank, text=self._stop.first_failure)
            return group_end.as_seen_by(self._rank, error, first)
        return group_end.as_seen_by(self._rank, error, Failure(node_rank=self._rank, text=f"{self._name}: {error}"))

    def close(self) -> None:
        logger.removeHandler(self._forwarding)
        self._stream.finish()
        self._stream.is_closed.wait(_FAREWELL_S)
        self._channel.close()
