"""The gRPC server of node 0; refuses calls without the group's token before reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from wire.node.v1 import node_pb2 as pb
from wire.node.v1 import node_pb2_grpc as pb_grpc
from wire.rpc import remote_grpc
from wire.rpc.mutual_tls import MutualTls, open_port

_MORE_THREADS = 8
"""Than nodes: for those that are refused."""

Talk = Callable[[Iterable[pb.NodeSays], grpc.ServicerContext], Iterator[pb.LeaderSays]]


def start(address: str, port: int, num_nodes: int, token: str | None, tls: MutualTls | None, talk: Talk) -> grpc.Server:
    """Listens on `address` alone. Raises RuntimeError if it cannot."""
    # A call holds a thread for as long as it lasts.
    threads = ThreadPoolExecutor(max_workers=num_nodes + _MORE_THREADS, thread_name_prefix="nodes")
    server = grpc.server(threads, interceptors=[_RequireToken(token)], options=remote_grpc.ONE_LISTENER)
    pb_grpc.add_GroupServicer_to_server(_Servicer(talk), server)
    open_port(server, remote_grpc.host_and_port(address, port), tls)
    server.start()
    return server


class _Servicer(pb_grpc.GroupServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, talk: Talk) -> None:
        self._talk = talk

    def Join(self, requests: Iterable[pb.NodeSays], context: grpc.ServicerContext) -> Iterator[pb.LeaderSays]:
        yield from self._talk(requests, context)


class _RequireToken(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: str | None) -> None:
        self._token = token

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        if remote_grpc.is_allowed(details.invocation_metadata, self._token):
            return continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(requests: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token of the group is missing or wrong")
