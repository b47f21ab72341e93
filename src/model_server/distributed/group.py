"""The ranks of one model and their collectives; with one rank they are no-ops."""

# | What                        | CPU          | CUDA                                                            |
# |-----------------------------|--------------|-----------------------------------------------------------------|
# | sums and gathers of tensors | gloo         | NCCL; most sums in one kernel where peers allow (`peer_reduce`) |
# | from one rank to another    | gloo         | NCCL, on a stream of its own behind what the sender has queued  |
# | agreement on numbers        | gloo         | gloo: nothing waits for the device, and a lost rank is an error |
# | a rank's end                | `peer_watch` | `peer_watch`                                                    |
#
# On CUDA nothing here waits for the host, so sums and gathers may be captured in a graph. The communicator exists
# before the first call (torch's `device_id`), and both kinds of collective have run once: neither may be set up in a
# capture. NCCL's watchdog sees no collective of a replayed graph, nor any before its timeout; a failure that it finds,
# or that a kernel leaves, comes up at the next wait for the device as torch's own RuntimeError, which ends the process
# as well.
#
# Knows nothing of models. The store that the ranks meet at listens only on the given address (loopback by default),
# where torch's own would listen on every interface.

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from model_server.distributed import peer_reduce
from model_server.distributed.peer_reduce import PeerReduce
from model_server.distributed.peer_watch import Identity, PeerWatch
from model_server.errors import FatalError, LostPeerError, MissingPeerError, StartupError

if TYPE_CHECKING:
    from torch.distributed import Store

# As TGI's (utils/dist.py); also the longest time that ranks may drift apart while they load.
TIMEOUT_S = 120.0

# A rank that ends in order closes its connections some time before its process is gone.
NAMING_S = 2.0

# Messages that a rank has begun to send and not seen end: a receiver is never further behind than this.
MOST_SENDING = 64

# Its name since torch 2.13, and the one before.
_gather: Callable[[Tensor, Tensor, dist.ProcessGroup | None], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class ProcessGroup:
    """One rank alone, whose collectives return what they get."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks; `tensor` itself is no longer to be read."""
        return tensor

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """Gather [..., n] to [..., n * size] in the order of the ranks, in `dtype` if given, or into `out`."""
        if out is not None:
            return out.copy_(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def all_reduce_min(self, value: int) -> int:
        """Return the ranks' smallest value, without the device."""
        return value

    def any_of(self, yes: bool, limit_s: float | None = None) -> bool:
        """Whether it is so on any rank, of which some may have left their step early.

        Raises:
            FatalError: Others did not come within `limit_s`, or wait in another collective.
        """
        return yes

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def part(self, parts: list[list[int]]) -> ProcessGroup:
        """Return the group of that of `parts` with this rank, else a group of its own; all ranks call it together.

        A part ends with this group, and knows lost ranks as this does.
        """
        return ProcessGroup()

    def send(self, tensor: Tensor, to: int) -> None:
        """Send `tensor`, which nothing may write to afterwards, to a rank once the device's queued work is done.

        It arrives whenever that rank receives, unless this one closes the group before.
        """
        raise FatalError("there is no other rank to send to")

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with what a rank sends next; on a device only queued."""
        raise FatalError("there is no other rank to receive from")

    def on_lost(self, report: Callable[[str], object]) -> None:
        """Report lost ranks on a thread of its own; before, a loss ends the process."""

    def close(self, *, orderly: bool = True) -> None:
        """Leave the group; safe to call twice. Not `orderly`: this rank failed and does not wait for the others."""


def connect(
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    address: str = "127.0.0.1",
    port: int = 29500,
    timeout_s: float = TIMEOUT_S,
    collective_timeout_s: float | None = None,
    key_prefix: str = "",
    one_shot: bool = True,
    force: bool = False,
) -> ProcessGroup:
    """Meet the other ranks at `address`:`port`, where rank 0 listens; gloo on CPUs, NCCL on CUDA.

    Args:
        collective_timeout_s: Of a collective; None: `timeout_s`.
        key_prefix: Of the store's keys; a process without it meets no rank.
        one_shot: Sums of a few MiB on CUDA bypass NCCL where devices read each other's memory.
        force: A single rank makes real collectives, for measuring.

    Raises:
        StartupError: The port is taken.
        MissingPeerError: Ranks, which it names, did not come within `timeout_s`.
    """
    if not 0 <= rank < world_size:
        raise StartupError(f"rank {rank} is not below the number of shards {world_size}")
    if world_size == 1 and not force:
        return ProcessGroup()
    if world_size == 1 or address == "localhost" or address.startswith("127."):
        # gloo would otherwise resolve the host name, which need not have an address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = _store(rank, world_size, address, port, timeout_s, key_prefix)
        missing = _missing(store, rank, world_size, timeout_s)
        if missing:
            who = " and ".join(f"rank {peer}" for peer in missing)
            text = f"{_unmet(rank, world_size, address, port, timeout_s)}: {who} did not connect"
            raise MissingPeerError(f"{text} (TGI_DIST_TIMEOUT sets the limit)")
        limit_s = collective_timeout_s or timeout_s
        _join(store, rank, world_size, device, limit_s)
        group = _TorchGroup(rank, world_size, _watch(store, rank, world_size), store, limit_s)
        group.barrier()  # the connections are there before the first call
        if device.type == "cuda":
            group.use_device(device, one_shot=one_shot and world_size > 1)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {address}:{port} for the other shards: {os.strerror(error.errno or 0)}; "
            "choose another --master-port"
        ) from error
    except dist.DistBackendError as error:
        raise StartupError(f"rank {rank} of {world_size}: {_reason(error)}") from error
    except (RuntimeError, ValueError) as error:
        # ValueError: torch's word for a store that closed while the ranks were meeting.
        raise MissingPeerError(f"{_unmet(rank, world_size, address, port, timeout_s)}: {_reason(error)}") from error
    return group


def _unmet(rank: int, world_size: int, address: str, port: int, timeout_s: float) -> str:
    return f"rank {rank} of {world_size} did not connect to the others at {address}:{port} within {timeout_s:g} s"


def _store(rank: int, world_size: int, address: str, port: int, timeout_s: float, key_prefix: str) -> Store:
    if world_size == 1:
        return dist.HashStore()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family) if rank == 0 else None
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except dist.DistError as error:
        text = _unmet(rank, world_size, address, port, timeout_s)
        raise MissingPeerError(f"{text}: rank 0, which listens there, did not connect") from error
    return PrefixStore(key_prefix, store) if key_prefix else store


def _missing(store: Store, rank: int, world_size: int, timeout_s: float) -> list[int]:
    """Return the ranks that did not come in time, which the store would only count."""
    store.set(f"arrived/{rank}", "yes")
    arrived = [f"arrived/{peer}" for peer in range(world_size)]
    try:
        store.wait(arrived, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return [peer for peer, key in enumerate(arrived) if not store.check([key])]
    return []


def _join(store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        return
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns of options whose time limit is another than the group's
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        pg_options=options,
        device_id=device,
    )


def _watch(store: Store, rank: int, world_size: int) -> PeerWatch:
    store.set(f"process/{rank}", Identity.own().encode())
    others = [peer for peer in range(world_size) if peer != rank]
    watch = PeerWatch(rank, {peer: Identity.decode(store.get(f"process/{peer}").decode()) for peer in others})
    watch.start()
    return watch


class _TorchGroup(ProcessGroup):
    """Ranks over torch.distributed; errors in a collective are fatal."""

    def __init__(
        self,
        rank: int,
        size: int,
        watch: PeerWatch,
        store: Store,
        timeout_s: float,
        members: tuple[int, ...] | None = None,
        handle: dist.ProcessGroup | None = None,
    ) -> None:
        """Take torch's handle of a part, and its ranks in the default group."""
        self.rank = rank
        self.size = size
        self._members = tuple(range(size)) if members is None else members
        self._handle = handle
        self._store = store
        self._timeout_s = timeout_s
        self._num_collectives = 0
        self._num_questions = 0
        self._watch = watch
        self._device: torch.device | None = None
        self._peers: PeerReduce | None = None
        self._is_whole = True
        # gloo sends when the receiver asks, and nothing if its work was let go of before that.
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._parts: list[ProcessGroup] = []  # which send until this group ends

    def use_device(self, device: torch.device, *, one_shot: bool) -> None:
        """Run each collective once, and see whether small sums can do without NCCL."""
        self._device = device
        tensor = torch.ones(1, 64, device=device)
        self.all_gather_last(self.all_reduce(tensor))
        torch.cuda.synchronize(device)
        if one_shot:
            self._peers = peer_reduce.connect(self.rank, self.size, device, self._agree)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        way = None if self._peers is None else self._peers.way(tensor)
        if self._peers is not None and way is not None:
            self._num_collectives += 1
            return self._peers.all_reduce(tensor, way)
        self._run(lambda: dist.all_reduce(tensor, group=self._handle))
        return tensor

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1]).contiguous()
        gathered = rows.new_empty(self.size * rows.shape[0], rows.shape[1])
        self._run(lambda: _gather(gathered, rows, self._handle))
        # [ranks, rows, n] -> [rows, ranks, n]; for one row the memory is in order already.
        by_row = gathered.view(self.size, *rows.shape).transpose(0, 1)
        shape = (*tensor.shape[:-1], self.size * tensor.shape[-1])
        # Order and type in one pass over the logits.
        if out is not None:
            out.view(by_row.shape).copy_(by_row)
            return out
        if dtype is None or dtype is tensor.dtype:
            return by_row.reshape(shape)
        return torch.empty(by_row.shape, dtype=dtype, device=tensor.device).copy_(by_row).view(shape)

    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        self._run(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._handle))
        return int(tensor.item())

    def any_of(self, yes: bool, limit_s: float | None = None) -> bool:
        self._num_questions += 1
        keys = [f"any/{self._num_questions}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], f"{self._num_collectives} {int(yes)}")
            self._store.wait(keys, timedelta(seconds=limit_s or self._timeout_s))
            answers = [self._store.get(key).decode().split() for key in keys]
        except RuntimeError as error:
            lost = self._watch.lost(NAMING_S)
            if lost is not None:
                raise LostPeerError(f"rank {self.rank} lost {lost}: {_reason(error)}") from error
            raise FatalError(f"rank {self.rank} left a step that the others are still in: {_reason(error)}") from error
        if len({count for count, _ in answers}) > 1:
            raise FatalError(f"rank {self.rank} left a step that the others are still in")
        return any(answer == "1" for _, answer in answers)

    def barrier(self) -> None:
        self.all_reduce_min(0)

    def part(self, parts: list[list[int]]) -> ProcessGroup:
        mine: ProcessGroup = ProcessGroup()
        for index, members in enumerate(parts):
            if len(members) < 2:
                continue
            handle = dist.new_group(members, timeout=timedelta(seconds=self._timeout_s))
            if self._members[self.rank] in members:
                store = PrefixStore(f"part/{index}", self._store)
                rank = members.index(self._members[self.rank])
                mine = _TorchGroup(rank, len(members), self._watch, store, self._timeout_s, tuple(members), handle)
        mine.barrier()  # the connections are there before the first call
        if self._device is not None and isinstance(mine, _TorchGroup):
            mine.use_device(self._device, one_shot=False)
        self._parts.append(mine)
        return mine

    def send(self, tensor: Tensor, to: int) -> None:
        started: list[dist.Work | None] = []
        self._guard(lambda: started.append(dist.isend(tensor, self._members[to], group=self._handle)))
        work = started[0]
        assert work is not None, "this rank is in the group"
        self._sending.append((work, tensor))
        while len(self._sending) > MOST_SENDING:
            self._guard(self._sending.popleft()[0].wait)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._guard(lambda: dist.recv(tensor, self._members[source], group=self._handle))

    def on_lost(self, report: Callable[[str], object]) -> None:
        self._watch.on_lost = report

    def close(self, *, orderly: bool = True) -> None:
        self._watch.close()
        self._peers = None
        # If a rank is missing, destroying the group would wait for it.
        if orderly and self._is_whole and self._watch.lost() is None and dist.is_initialized():
            dist.destroy_process_group()

    def _agree(self, good: bool) -> bool:
        return self.all_reduce_min(int(good)) == 1

    def _run(self, collective: Callable[[], object]) -> None:
        """Run a collective; errors of this rank's device or memory are passed on.

        Raises:
            FatalError: The backend blames others; LostPeerError if one is known to be gone.
        """
        self._num_collectives += 1
        self._guard(collective)

    def _guard(self, exchange: Callable[[], object]) -> None:
        """Run what not all ranks do together, on any thread."""
        try:
            exchange()
        except RuntimeError as error:
            if not _speaks_of_peers(error):
                raise
            self._is_whole = False
            lost = self._watch.lost(NAMING_S)
            if lost is None:
                # A rank of another node is not watched: it may be the one that failed.
                kind = FatalError if self._watch.sees_all else LostPeerError
                raise kind(f"rank {self.rank} cannot reach the others: {_reason(error)}") from error
            raise LostPeerError(f"rank {self.rank} lost {lost}: {_reason(error)}") from error


def _speaks_of_peers(error: RuntimeError) -> bool:
    """Recognize errors of NCCL and the store by type, gloo's as bare RuntimeErrors."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "CUDA" not in str(error))


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]
