"""`--placement ray`: a group of nodes on a running Ray cluster. The only module that imports Ray.

Ray only places: an actor on each node starts its launcher as a child, and is never restarted. The launchers themselves
notice a loss.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.config import SECRETS, LauncherConfig
from launcher.errors import ArgumentValidation, LauncherError, NodeFailed, NodeLost
from launcher.group_config import num_nodes
from launcher.processes import parent_watchdog
from launcher.processes.child import Exit
from launcher.processes.signals import Signals
from wire.cli.options import options_of
from wire.cli.spelling import spell, to_argv, to_environment
from wire.exit_status import LOST_NODE
from wire.log import console
from wire.processes.python_child import child_environment, module_command, script_command

logger = logging.getLogger("text_generation_launcher")

_SHOWN = {console.ATTRIBUTE: True}
_CONNECT_LIMIT_S = 10.0
_ASK_EVERY_S = 0.3
_MOST_LINES = 10_000
_AFTER_KILL_S = 5.0
_CHOSEN = ("placement", "nnodes", "node_rank", "node_addr", "master_addr", "config")
"""Options that this module answers."""
_OF_LEADER = ("hostname", "port")
_PASSED_ON = ("HF_", "HUGGING_FACE_", "NCCL_", "GLOO_", "OTEL_", "OMP_NUM_THREADS")
"""How the variables start that a node has from here and not from its own environment."""


class NodeActor:
    """Starts the launcher of one node and reports on it; all calls are short and on one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)

    def address(self) -> str:
        """Return this node's address for the others."""
        return str(ray.util.get_node_ip_address())

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """`words`: the launcher's. The kernel kills it when this process ends, and its own guard what it started."""
        watchdog = script_command(Path(parent_watchdog.__file__))
        left_out = {*_variables(), "OMP_NUM_THREADS"}  # Ray sets this to 1
        own = {name: value for name, value in child_environment().items() if name not in left_out}
        self._process = subprocess.Popen(
            [*watchdog, "exec", str(os.getpid()), *module_command("launcher"), *words],
            env={**own, **environ}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    def report(self) -> tuple[list[str], int | None]:
        """Return the lines since the last report (at most 10,000), and the exit status if any."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self._reader.join(2.0)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return lines, status

    def stop(self) -> None:
        """Asks the launcher to end in order."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def _variables() -> set[str]:
    """Return the variables of options, which hold on all nodes."""
    return {option.env for option in options_of(LauncherConfig) if option.env is not None}


@dataclass
class _Node:
    """An actor as this process sees it."""

    rank: int
    actor: Any
    address: str = ""
    asked: Any = None
    """The report that is awaited."""
    last_error: str = ""
    status: int | None = None
    lost: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status is not None or bool(self.lost)

    @property
    def title(self) -> str:
        return f"node {self.rank} ({self.address})"


def run_on_ray(config: LauncherConfig, environ: Mapping[str, str]) -> int:
    """Returns 0 after a stop in order. Raises LauncherError."""
    if not config.group_token and not config.insecure_group:
        config = dataclasses.replace(config, group_token=secrets.token_hex(32))
    _connect(environ)
    group: Any = None
    try:
        with Signals() as signals:  # after Ray, which takes the handlers for itself
            bundle = _bundle(config)
            bundles = [bundle | _own_node(bundle), *[bundle] * (num_nodes(config) - 1)]
            group = placement_group(bundles, strategy="STRICT_SPREAD")
            if not _is_reserved(group, config, bundle, signals):
                return 0
            nodes = _start(group, bundle, config, environ)
            return _watch(nodes, config, signals)
    except ray.exceptions.RayError as error:
        raise NodeLost(f"Ray ends the group: {_first_line(error)}") from error
    finally:
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        ray.shutdown()


def _connect(environ: Mapping[str, str]) -> None:
    """Raises ArgumentValidation. Ray itself would wait for minutes for a cluster that is not there."""
    where = environ.get("RAY_ADDRESS", "")
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or "/" in where:
        raise ArgumentValidation(
            "`--placement ray` needs the variable RAY_ADDRESS, the HOST:PORT of a running Ray cluster"
            + (f", not {where}" if where else "")
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise ArgumentValidation(f"no Ray cluster at {where} (RAY_ADDRESS): {error}") from None
    try:
        ray.init(address=where, log_to_driver=False, configure_logging=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        causes = f"{error} {error.__cause__}"
        if "AuthToken" in causes or "Unauthenticated" in causes or "Authentication" in causes:
            hint = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on its nodes"
            raise ArgumentValidation(f"the Ray cluster at {where} refuses the token: {hint}") from None
        raise ArgumentValidation(f"the Ray cluster at {where} cannot be joined: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bundle(config: LauncherConfig) -> dict[str, float]:
    """What each node gives. Raises ArgumentValidation if the cluster has too few such nodes."""
    nodes = num_nodes(config)
    has = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sorted((int(one.get("GPU", 0)) for one in has), reverse=True)
    if not gpus or not gpus[0]:
        each = 0
    elif config.num_shard is not None:
        each = config.num_shard * config.num_stage // nodes
    else:
        each = gpus[min(nodes, len(gpus)) - 1]
    bundle = {"CPU": 1.0, "GPU": float(each)} if each else {"CPU": 1.0}
    enough = sum(all(one.get(name, 0) >= amount for name, amount in bundle.items()) for one in has)
    if enough < nodes:
        raise ArgumentValidation(
            f"`--nnodes` {nodes} needs {nodes} Ray nodes with {_said(bundle)} each, but the cluster has {enough} of "
            f"{len(has)} nodes"
        )
    return bundle


def _own_node(bundle: Mapping[str, float]) -> dict[str, float]:
    """Return a trace of the resource that only this machine has, which places node 0 here."""
    own = f"node:{ray.util.get_node_ip_address()}"
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = any(own in one and all(one.get(name, 0) >= amount for name, amount in bundle.items()) for one in resources)
    return {own: 0.001} if fits else {}


def _said(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())


def _is_reserved(group: Any, config: LauncherConfig, bundle: Mapping[str, float], signals: Signals) -> bool:
    """False after a request to stop. Raises ArgumentValidation if other work holds the nodes."""
    deadline = time.monotonic() + config.join_timeout
    ready = group.ready()
    while not ray.wait([ready], timeout=_ASK_EVERY_S)[0]:
        if signals.pop():
            return False
        if time.monotonic() > deadline:
            raise ArgumentValidation(
                f"Ray has not found {num_nodes(config)} free nodes with {_said(bundle)} each in "
                f"{config.join_timeout} s (`--join-timeout`): other work holds them"
            )
    return True


def _start(group: Any, bundle: Mapping[str, float], config: LauncherConfig, environ: Mapping[str, str]) -> list[_Node]:
    remote = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=0)(NodeActor)
    nodes = []
    for rank in range(num_nodes(config)):
        place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        nodes.append(_Node(rank, remote.options(scheduling_strategy=place).remote()))
    addresses = ray.get([node.actor.address.remote() for node in nodes], timeout=config.join_timeout)
    for node, address in zip(nodes, addresses, strict=True):
        node.address = address
    logger.info("Ray has placed %s; node 0 serves", ", ".join(node.title for node in nodes), extra=_SHOWN)
    variables = {name: value for name, value in environ.items() if name.startswith(_PASSED_ON)}
    variables |= to_environment({name: getattr(config, name) for name in SECRETS})
    ray.get(
        [node.actor.start.remote(_words(config, node, addresses), variables) for node in nodes],
        timeout=config.join_timeout,
    )
    return nodes


def _words(config: LauncherConfig, node: _Node, addresses: Sequence[str]) -> list[str]:
    """The command line of a node's launcher: what is asked for, and its place. Secrets travel as variables."""
    left_out = {*SECRETS, *_CHOSEN, *(_OF_LEADER if node.rank else ())}
    given: dict[str, Any] = {}
    for option in options_of(LauncherConfig):
        value = getattr(config, option.name)
        if option.name not in left_out and value != option.default:
            given[option.name] = spell(value) if isinstance(value, bool) and not option.is_switch else value
    place: dict[str, Any] = {"nnodes": len(addresses), "node_rank": node.rank}
    if len(addresses) > 1:
        place |= {"master_addr": addresses[0], "node_addr": node.address}
    return to_argv(given | place)


def _watch(nodes: Sequence[_Node], config: LauncherConfig, signals: Signals) -> int:
    """Shows the output of the launchers until all have ended. Raises LauncherError if one has failed."""
    first: _Node | None = None
    deadline: float | None = None
    while not all(node.has_ended for node in nodes):
        signals.wait(_ASK_EVERY_S)
        if signals.pop():
            for node in nodes:
                node.actor.stop.remote()
        for node in nodes:
            if not node.has_ended:
                _ask(node)
                if node.has_ended and first is None:
                    first = node
                    # By then the launchers have ended each other, unless Ray no longer hears of their nodes.
                    left = config.lease_seconds + config.graceful_termination_timeout + _AFTER_KILL_S
                    deadline = time.monotonic() + left
        if deadline is not None and time.monotonic() > deadline:
            break
    for node in nodes:
        ray.kill(node.actor)
        if not node.has_ended:
            node.lost = "Ray does not hear of it any more"
    failed = [node for node in nodes if node.lost or node.status]
    if failed:
        raise _failure(min(failed, key=lambda node: (_is_consequence(node), node is not first)))
    return 0


def _ask(node: _Node) -> None:
    """Takes a report that has come, and asks for the next; never waits for long."""
    if node.asked is None:
        node.asked = node.actor.report.remote()
    if not ray.wait([node.asked], timeout=0.05)[0]:
        return
    try:
        lines, node.status = ray.get(node.asked)
    except ray.exceptions.RayError as error:
        node.lost = _first_line(error)
        return
    node.asked = None
    for line in lines:
        if line.startswith("Error"):
            node.last_error = line.strip()
    sys.stdout.write("".join(lines))
    sys.stdout.flush()


def _is_consequence(node: _Node) -> int:
    """Rank how likely a node failed after another: its own end, a lost actor, a launcher that lost another."""
    return 1 if node.lost else 2 if node.status == LOST_NODE else 0


def _failure(node: _Node) -> LauncherError:
    if node.lost:
        return NodeLost(f"{node.title} is lost: {node.lost}")
    reason = node.last_error or "see its log"
    message = f"{node.title} {Exit(node.status or 0)}; {reason}"
    return NodeLost(message) if node.status == LOST_NODE else NodeFailed(message)
