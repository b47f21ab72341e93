"""GroupConfig: the options of a group of nodes that serve one model, filled from the variables of LeaderWorkerSet or
torchrun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from launcher.errors import ArgumentValidation
from wire import tls
from wire.cli.options import option

_NODES = "Nodes"
_PORT = 65535
_U32 = 2**32 - 1
_MOST_NODES = 1024
_LOCALHOST = "localhost"
CONTROL_PORT = 29500
"""Where the leader listens for the other nodes, unless `--master-port` says otherwise."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Options of the nodes that serve one model."""

    nnodes: int | None = option(
        None, panel=_NODES, minimum=1, maximum=_MOST_NODES,
        help="Nodes that serve the model together, a launcher on each. Default: LWS_GROUP_SIZE, else 1.",
    )  # fmt: skip
    placement: Literal["ray"] | None = option(
        None, panel=_NODES,
        help="`ray`: start the launchers of all nodes on the Ray cluster of RAY_ADDRESS; needs tercet[ray].",
    )  # fmt: skip
    node_rank: int | None = option(
        None, panel=_NODES, maximum=_MOST_NODES - 1,
        help="Rank of this node; node 0 leads and serves HTTP. Default: LWS_WORKER_INDEX, else 0.",
    )  # fmt: skip
    master_addr: str = option(
        _LOCALHOST, panel=_NODES,
        help="Address of node 0, or where the shards of a single node connect to each other. Default with several "
        "nodes: LWS_LEADER_ADDRESS.",
    )  # fmt: skip
    master_port: int | None = option(
        None, panel=_NODES, maximum=_PORT,
        help="Port where node 0 listens for the other nodes, or where the shards of a single node connect to each "
        "other. Default: 29500; a free port if a single node finds 29500 in use.",
    )  # fmt: skip
    node_addr: str | None = option(
        None, panel=_NODES,
        help="IP address of this node, the only one on which it listens for the other nodes. Default: the address "
        "from which this node reaches node 0.",
    )  # fmt: skip
    shard_port: int = option(
        0, panel=_NODES, maximum=_PORT,
        help="Port of this node's shards for the router on node 0; 0 chooses a free one.",
    )  # fmt: skip
    group_token: str | None = option(
        None, panel=_NODES, header=True, help="Secret that all nodes share; required with several nodes."
    )
    insecure_group: bool = option(
        False, panel=_NODES, help="Serve with several nodes without a --group-token, on a network of your own."
    )
    group_tls_cert: Path | None = option(
        None, panel=_NODES, help="PEM file with this node's certificate, for TLS between the nodes of a group."
    )
    group_tls_key: Path | None = option(None, panel=_NODES, help="PEM file with the key of --group-tls-cert.")
    group_tls_ca: Path | None = option(
        None, panel=_NODES, help="PEM file with the certificate of the authority that signed those of all nodes."
    )
    join_timeout: int = option(
        600, panel=_NODES, minimum=1, maximum=_U32, help="Seconds in which all nodes must have joined."
    )  # fmt: skip
    lease_seconds: int = option(
        10, panel=_NODES, minimum=2, maximum=_U32, help="Seconds of silence after which a node counts as lost."
    )


C = TypeVar("C", bound=GroupConfig)


def with_supervisor(config: C, environ: Mapping[str, str]) -> C:
    """Fill `config` from LeaderWorkerSet's or torchrun's variables where no option says it.

    torchrun's own store listens on MASTER_PORT (`--master-port`), so node 0 takes the next port.
    """
    filled = supervisor_variables(config, environ)
    nnodes = _number(filled["--nnodes"], environ) if "--nnodes" in filled else config.nnodes or 1
    node_rank = _number(filled["--node-rank"], environ) if "--node-rank" in filled else config.node_rank or 0
    master_addr, master_port = config.master_addr, config.master_port
    if "--master-addr" in filled:
        master_addr = environ[filled["--master-addr"]]
    if nnodes > 1 and _is_by_torchrun(environ) and master_port is not None:
        master_port += 1
    return dataclasses.replace(
        config, nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )


def supervisor_variables(config: GroupConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which `with_supervisor` fills options, by flag."""
    by_torchrun = _is_by_torchrun(environ)
    counts = ("GROUP_WORLD_SIZE", "GROUP_RANK") if by_torchrun else ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    num_nodes = environ.get(counts[0], "").lstrip("0") if config.nnodes is None else str(config.nnodes)
    filled = (
        ("--nnodes", counts[0], config.nnodes is None),
        ("--node-rank", counts[1], config.node_rank is None),
        ("--master-addr", "LWS_LEADER_ADDRESS", config.master_addr == _LOCALHOST and num_nodes not in ("", "1")),
    )
    return {flag: variable for flag, variable, is_open in filled if is_open and environ.get(variable)}


def _is_by_torchrun(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(variable: str, environ: Mapping[str, str]) -> int:
    text = environ[variable]
    if not text.isdecimal():
        raise ArgumentValidation(f"the variable {variable} is not a number: {text}")
    return int(text)


def num_nodes(config: GroupConfig) -> int:
    """How many nodes serve the model."""
    return config.nnodes or 1


def check_placement(config: GroupConfig) -> None:
    """Refuses what Ray chooses. Raises ArgumentValidation."""
    for flag, is_given in (
        ("--node-rank", config.node_rank is not None),
        ("--node-addr", config.node_addr is not None),
        ("--master-addr", config.master_addr != _LOCALHOST),
    ):
        if is_given:
            raise ArgumentValidation(f"`{flag}` and `--placement ray` contradict each other: Ray chooses the nodes")
    if config.group_token and config.insecure_group:
        raise ArgumentValidation("`--group-token` and `--insecure-group` contradict each other: leave one out")


def check_group(config: GroupConfig) -> None:
    """Refuses options of nodes that contradict each other. Raises ArgumentValidation."""
    nodes, rank = num_nodes(config), config.node_rank or 0
    if rank >= nodes:
        raise ArgumentValidation(f"`--node-rank` must be < `--nnodes`. Given: {rank} and {nodes}")
    if nodes == 1:
        for flag, is_given in (
            ("--node-addr", config.node_addr is not None),
            ("--shard-port", config.shard_port != 0),
            ("--insecure-group", config.insecure_group),
            ("--group-tls-cert", config.group_tls_cert is not None),
        ):
            if is_given:
                raise ArgumentValidation(f"`{flag}` is for several nodes: give `--nnodes` too, or leave it out")
        return
    if not config.group_token and not config.insecure_group:
        raise ArgumentValidation(
            "several nodes need a `--group-token` (or GROUP_TOKEN), the same secret on each; on a network that "
            "no other machine can reach, `--insecure-group` serves without it"
        )
    if config.group_token and config.insecure_group:
        raise ArgumentValidation("`--group-token` and `--insecure-group` contradict each other: leave one out")
    _check_tls(config)
    if rank > 0 and config.master_addr == _LOCALHOST:
        raise ArgumentValidation(f"node {rank} needs the address of node 0: give `--master-addr`")


def _check_tls(config: GroupConfig) -> None:
    files = (config.group_tls_cert, config.group_tls_key, config.group_tls_ca)
    if all(path is None for path in files):
        return
    if None in files:
        raise ArgumentValidation("`--group-tls-cert`, `--group-tls-key` and `--group-tls-ca` need each other: give all")
    try:
        tls.check(config.group_tls_cert, config.group_tls_key, flags=("--group-tls-cert", "--group-tls-key"))
        tls.check_authority("--group-tls-ca", config.group_tls_ca)
    except tls.TlsError as error:
        raise ArgumentValidation(str(error)) from None
