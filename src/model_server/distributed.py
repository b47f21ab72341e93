"""The ranks of one model and their collectives; with one rank they are no-ops.

Knows nothing of models. The store that the ranks meet at listens on the given address alone (loopback by default),
where torch's own would listen on every interface.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from model_server.errors import FatalError, StartupError

# As TGI's (utils/dist.py); also the longest time that ranks may drift apart while they load.
TIMEOUT_S = 120.0


class ProcessGroup:
    """One rank alone: every collective returns what it is given."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        return tensor

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        """[..., n] on each rank -> [..., n * size], in the order of the ranks."""
        return tensor

    def all_reduce_min(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank."""
        return value

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def close(self) -> None:
        """Leave the group. Safe to call twice."""


def connect(
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    address: str = "127.0.0.1",
    port: int = 29500,
    timeout_s: float = TIMEOUT_S,
) -> ProcessGroup:
    """Meet the other ranks at `address`:`port` (rank 0 listens there); gloo for a CPU device, nccl for CUDA.

    Raises StartupError if the port is taken or not all ranks come within `timeout_s` seconds.
    """
    if world_size == 1:
        return ProcessGroup()
    if not 0 <= rank < world_size:
        raise StartupError(f"rank {rank} is not below the number of shards {world_size}")
    if address == "localhost" or address.startswith("127."):
        # gloo would otherwise resolve the host name, which need not have an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=timeout_s)
    listener: socket.socket | None = None
    try:
        if rank == 0:
            listener = socket.create_server((address, port))
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except OSError as error:
        raise StartupError(
            f"cannot listen on {address}:{port} for the other shards: {os.strerror(error.errno or 0)}; "
            "choose another --master-port"
        ) from error
    except (RuntimeError, ValueError) as error:
        # ValueError: torch's word for a store that closed while the ranks were meeting.
        raise StartupError(
            f"rank {rank} of {world_size} did not meet the others at {address}:{port} within {timeout_s:g} s"
        ) from error
    return _TorchGroup(rank, world_size, device)


class _TorchGroup(ProcessGroup):
    """Several ranks over torch.distributed's default group. A lost rank is fatal: raises FatalError."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._run(lambda: dist.all_reduce(tensor))
        return tensor

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, tensor))
        return torch.cat(parts, dim=-1)

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self._run(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN))
        return int(tensor.item())

    def barrier(self) -> None:
        self.all_reduce_min(0)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise FatalError(f"rank {self.rank} lost another rank: {str(error).splitlines()[0]}") from error
