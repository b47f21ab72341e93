"""Which node failed first, and the sentence that each node ends with."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import LauncherError, NodeLost


@dataclass(frozen=True, kw_only=True)
class Failure:
    """node_rank: of the node that failed. text: one sentence with the name of the node."""

    node_rank: int
    text: str
    is_consequence: bool = False


def title(node_rank: int, address: str) -> str:
    return f"node {node_rank} ({address})" if address else f"node {node_rank}"


def first_of(failures: list[Failure]) -> Failure:
    """Return the failure that explains the others, of failures in the order of their detection."""
    return next((failure for failure in failures if not failure.is_consequence), failures[0])


def as_seen_by(node_rank: int, own: LauncherError, first: Failure) -> LauncherError:
    """Return the node's own error if it failed first, else the loss of the node that did."""
    if first.node_rank != node_rank:
        return NodeLost(first.text)
    if isinstance(own, NodeLost):
        return own
    return type(own)(first.text)


def silent(name: str, lease_s: float) -> str:
    return (
        f"{name} has not been heard from for {lease_s:g} s (`--lease-seconds`): "
        "the node, its network or its launcher has stopped"
    )


def gone(name: str) -> str:
    return f"{name} is gone: its launcher was killed, or its connection was closed"
