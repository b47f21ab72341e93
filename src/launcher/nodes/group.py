"""From options to this node's place in a group of nodes."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.config import DEFAULT_MODEL_ID, LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.group_config import CONTROL_PORT, num_nodes
from launcher.nodes import address, facts
from launcher.nodes.leader import Leader
from launcher.nodes.node_group import SHOWN, WAITING_RECORD_S, NodeGroup, Pause
from launcher.nodes.worker import Worker
from launcher.planning import model_info
from launcher.planning.hardware import Hardware
from launcher.planning.hub import is_offline
from launcher.planning.plan import NodePart
from launcher.planning.preflight import bindable_port, is_ip_address
from launcher.processes.signals import Signals
from wire.node.v1 import node_pb2 as pb
from wire.rpc import remote_grpc

logger = logging.getLogger("text_generation_launcher")

_RESOLVE_EVERY_S = 1.0
_HUB_TIMEOUT_S = 20.0
_PREFIX_DIGITS = 32


def open_group(config: LauncherConfig, machine: Hardware, signals: Signals, pause: Pause) -> NodeGroup:
    """The leader on node 0, else a worker that has not joined yet. Raises ArgumentValidation."""
    port = CONTROL_PORT if config.master_port is None else config.master_port
    leader = _leader_address(config, pause)
    own = config.node_addr or (leader if config.node_rank == 0 else address.source_address(leader))
    if own is None:
        raise ArgumentValidation(f"this node has no route to node 0 at {leader}: give its address as `--node-addr`")
    hello = pb.Hello(
        node_rank=config.node_rank or 0,
        num_nodes=num_nodes(config),
        address=own,
        versions=facts.versions(),
        num_gpus=len(machine.gpus),
    )
    if config.node_rank != 0:
        return Worker(config, hello, port, lambda: address.resolve(config.master_addr) or leader, signals.wake)
    if own.startswith("127.") or own == "::1":
        logger.warning("Node 0 listens on %s, where other machines cannot reach it: give its `--master-addr`", own)
    port = bindable_port("--master-port", own, port)
    where = remote_grpc.host_and_port(own, port)
    logger.info("Node 0 waits for %d more on %s", hello.num_nodes - 1, where, extra=SHOWN)
    return Leader(config, hello, port, lambda: bindable_port("--master-port", own, 0), signals.wake)


def _leader_address(config: LauncherConfig, pause: Pause) -> str:
    """Name services learn of a node that was just started after a while. Raises ArgumentValidation."""
    asked = config.master_addr
    must_be_own = config.node_rank == 0 and config.node_addr is None
    if must_be_own and is_ip_address(asked) and not address.is_own(asked):
        raise ArgumentValidation(f"`--master-addr` {asked} is the address of node 0, but this node has no such address")
    began = time.monotonic()
    deadline, record_at = began + config.join_timeout, began + WAITING_RECORD_S
    while True:
        found = address.resolve(asked)
        if found is not None and (not must_be_own or address.is_own(found)):
            return found
        what = f"`--master-addr` {asked} " + ("has no address" if found is None else f"is {found}, not of this node,")
        if time.monotonic() > deadline:
            raise ArgumentValidation(f"{what} after {config.join_timeout} s (`--join-timeout`)")
        if time.monotonic() > record_at:
            record_at += WAITING_RECORD_S
            logger.info("Waiting: %s yet", what, extra=SHOWN)
        pause(_RESOLVE_EVERY_S)


def whole(machine: Hardware, nodes: int) -> Hardware:
    """The nodes as one machine: each has as many GPUs, and they are taken to be alike."""
    memory, free = machine.memory_bytes, machine.free_bytes
    return dataclasses.replace(
        machine,
        gpus=machine.gpus * nodes,
        cores=machine.cores * nodes,
        memory_bytes=memory and memory * nodes,
        free_bytes=free and free * nodes,
    )


def with_shards(config: LauncherConfig, machine: Hardware) -> LauncherConfig:
    """`config` with a shard for each node where no GPU says how many."""
    if machine.gpus or config.num_shard is not None:
        return config
    return dataclasses.replace(config, num_shard=max(1, num_nodes(config) // config.num_stage))


def commit_of(config: LauncherConfig, environ: Mapping[str, str]) -> str:
    """Return the commit of a hub model, asked of the hub or else the cache; empty if unknown."""
    model_id = config.model_id or DEFAULT_MODEL_ID
    if model_info.is_local(model_id):
        return ""
    sha = None if is_offline(environ) else _commit_on_hub(model_id, config.revision, environ)
    cached = model_info.directory(model_id, config.revision, environ)
    return sha or ("" if cached is None else cached.name)


def _commit_on_hub(model_id: str, revision: str | None, environ: Mapping[str, str]) -> str | None:
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=environ.get("HF_ENDPOINT") or None, token=environ.get("HF_TOKEN") or None)
    try:
        return hub.model_info(model_id, revision=revision, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # what transports raise differs by version; the download says what is wrong
        logger.debug("The hub does not say which commit %s is: %s", model_id, error)
        return None


def meet(
    config: LauncherConfig,
    group: NodeGroup,
    directory: Path,
    adapters: Mapping[str, Path],
    num_shard: int,
    prefix: str,
    pause: Pause,
) -> tuple[NodePart, int]:
    """Wait until the model is on all nodes; return this node's part, and the port of rank 0.

    Args:
        adapters: The names of `--lora-adapters`, and their folders.
        prefix: Of the shards' sockets.
    """
    nodes, rank = num_nodes(config), config.node_rank or 0
    if num_shard % nodes:
        raise ArgumentValidation(
            f"{num_shard} shards cannot be divided among {nodes} nodes: give a multiple of `--nnodes` as `--num-shard`"
        )
    if rank == 0 and config.num_stage % nodes:
        logger.warning(
            "Tensor parallelism over %d nodes: each layer waits for the network twice, which costs much of the speed "
            "unless the nodes are joined by a fast network such as InfiniBand",
            nodes,
        )
    if rank == 0:
        endpoint = f"{remote_grpc.UNIX}{prefix}-node"
    else:
        port = bindable_port("--shard-port", group.address, config.shard_port)
        endpoint = remote_grpc.TCP + remote_grpc.host_and_port(group.address, port)
    prepared = pb.Prepared(endpoint=endpoint, digests=facts.digests(directory, adapters), num_shard=num_shard)
    start = group.meet(prepared, pause)
    interface = address.interface_of(group.address)
    if interface is None:
        logger.warning(
            "%s is not the first address of a network interface: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
            group.address,
        )
    secret = start.nonce + (config.group_token or "").encode()
    part = NodePart(
        node_rank=rank,
        num_nodes=nodes,
        store_address=start.store_address,
        key_prefix=hashlib.sha256(secret).hexdigest()[:_PREFIX_DIGITS] + "/",
        interface=interface,
        endpoints=tuple(start.endpoints),
    )
    return part, start.store_port
