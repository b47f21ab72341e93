"""A real shard process and a plain `generate.v3` client of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from wire.v3 import generate_pb2 as pb
from wire.v3.generate_pb2_grpc import TextGenerationServiceStub

START_LIMIT_S = 120.0


class ShardProcess:
    """`model-server serve` and a client of it."""

    def __init__(
        self,
        model: Path,
        prefix: Path,
        rank: int = 0,
        world_size: int = 1,
        port: int = 0,
        *flags: str,
        **variables: str,
    ) -> None:
        environ = {**os.environ, **variables, "RANK": str(rank), "WORLD_SIZE": str(world_size), "REQUEST_LOGPROBS": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
        self.socket = Path(f"{prefix}-{rank}")
        self._log = prefix.parent / f"log-{rank}"
        command = [sys.executable, "-m", "model_server", "serve", str(model), "--uds-path", str(prefix)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--dtype", "float32", *(["--sharded"] if world_size > 1 else []), *flags],
                env=environ, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.channel = grpc.insecure_channel(f"unix://{self.socket}", options=[("grpc.max_receive_message_length", -1)])
        self.stub = TextGenerationServiceStub(self.channel)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self.socket.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)
        self.stub.Health(pb.HealthRequest(), timeout=120, wait_for_ready=True)

    def stop(self) -> int:
        self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
