"""The shard's gRPC server on its socket: bound after loading, until a signal or fatal error."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_reflection.v1alpha import reflection

from model_server.rpc.endpoint import Endpoint, EndpointPlan
from model_server.rpc.sockets import claim_socket
from model_server.rpc.tracing import TracingInterceptor
from wire import phases
from wire.rpc.local_grpc import CHANNEL_OPTIONS
from wire.tracing import Tracing
from wire.v3 import generate_pb2 as pb
from wire.v3 import generate_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

# TGI's shard takes messages up to 2^31 - 1 bytes; prompt logprobs exceed gRPC's default of 4 MiB.
MAX_MESSAGE_BYTES = 2**31 - 1
_GRACE_S = 0.5


class ShardServer:
    """Owns the gRPC server; `request_stop` is for any thread."""

    def __init__(
        self,
        servicer: pb_grpc.TextGenerationServiceServicer,
        path: Path,
        tracing: Tracing | None = None,
        endpoint: EndpointPlan | None = None,
        more: Callable[[grpc.aio.Server], None] | None = None,
    ) -> None:
        """Take what answers.

        Args:
            endpoint: For all shards of a node in a group.
            more: Adds another service, if there is one.
        """
        self._servicer = servicer
        self._path = path
        self._endpoint = endpoint
        self._more = more
        self._interceptors = [] if tracing is None else [TracingInterceptor(tracing)]
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._failure: BaseException | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for; on any thread."""
        return self._stop.is_set()

    def request_stop(self, failure: BaseException | None = None) -> None:
        """Leave `serve`, which raises the failure if given."""

        def stop() -> None:
            self._failure = self._failure or failure
            self._stop.set()

        self._loop.call_soon_threadsafe(stop)

    async def serve(self) -> None:
        """Bind and serve until a stop."""
        server = grpc.aio.server(
            interceptors=self._interceptors,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                *CHANNEL_OPTIONS,
            ],
        )
        pb_grpc.add_TextGenerationServiceServicer_to_server(self._servicer, server)
        if self._more is not None:
            self._more(server)
        names = (pb.DESCRIPTOR.services_by_name["TextGenerationService"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        claim_socket(self._path)
        server.add_insecure_port(f"unix://{self._path}")
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.request_stop)
        await server.start()
        self._path.chmod(0o600)
        endpoint = None if self._endpoint is None else Endpoint(self._endpoint)
        if endpoint is not None:
            await endpoint.start()
        phases.enter(phases.SERVING)
        logger.info("Server started at unix://%s", self._path)
        await self._stop.wait()
        # A fatal error has been answered already; give its answer a moment to leave.
        await server.stop(_GRACE_S)
        if endpoint is not None:
            await endpoint.stop(_GRACE_S)
        if self._failure is not None:
            raise self._failure
