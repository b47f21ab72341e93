"""The ranks of one model and their collectives; with one rank they are no-ops.

| What                        | CPU          | CUDA                                                            |
|-----------------------------|--------------|-----------------------------------------------------------------|
| sums and gathers of tensors | gloo         | NCCL; most sums in one kernel where peers allow (`peer_reduce`) |
| from one rank to another    | gloo         | NCCL, on a stream of its own behind what the sender has queued  |
| agreement on numbers        | gloo         | gloo: nothing waits for the device, and a lost rank is an error |
| a rank's end                | `peer_watch` | `peer_watch`                                                    |

On CUDA nothing here waits for the host, so sums and gathers may be captured in a graph. The communicator exists before
the first call (torch's `device_id`), and both kinds of collective have run once: neither may be set up in a capture.
NCCL's watchdog sees no collective of a replayed graph, nor any before its timeout; a failure that it finds, or that a
kernel leaves, comes up at the next wait for the device as torch's own RuntimeError, which ends the process as well.

Knows nothing of models. The store that the ranks meet at listens only on the given address (loopback by default),
where torch's own would listen on every interface.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from model_server.distributed import peer_reduce
from model_server.distributed.peer_reduce import PeerReduce
from model_server.distributed.peer_watch import Identity, PeerWatch
from model_server.errors import FatalError, LostPeerError, MissingPeerError, StartupError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# As TGI's (utils/dist.py); also the longest time that ranks may drift apart while they load.
TIMEOUT_S = 120.0

# A rank that ends in order closes its connections some time before its process is gone.
NAMING_S = 2.0


# Its name since torch 2.13, and the one before.
_gather: Callable[[Tensor, Tensor, dist.ProcessGroup | None], object] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


class ProcessGroup:
    """One rank alone: every collective returns what it is given."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in `tensor`'s memory or new one: `tensor` itself is no longer to be read."""
        return tensor

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., n] on each rank -> [..., n * size], in the order of the ranks; converted to `dtype` if given."""
        return tensor if dtype is None else tensor.to(dtype)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank. Does not touch the device."""
        return value

    def any_of(self, yes: bool, limit_s: float | None = None) -> bool:
        """Whether it is so on any rank, for ranks of which some may have left their step early. Waits `limit_s` for the
        others, or as long as they may drift apart.

        Raises FatalError if they do not come, or have not come by as many collectives: they wait in one for this rank.
        """
        return yes

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def part(self, parts: list[list[int]]) -> ProcessGroup:
        """The group of those of `parts` among which this rank is; alone in one, or in none, it gets one of its own. All
        ranks call this together, with the same parts. A part ends with this group, and knows a lost rank as this does.
        """
        return ProcessGroup()

    def send(self, tensor: Tensor, to: int) -> Callable[[], object]:
        """Start to send `tensor` to that rank of this group, once what the caller has queued on the device is done.
        What is returned waits for the end, on a device without holding up the host; until then the caller does not
        write to the tensor."""
        raise FatalError("there is no other rank to send to")

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` with what that rank of this group has sent next. On a device this is only queued."""
        raise FatalError("there is no other rank to receive from")

    def on_lost(self, report: Callable[[str], object]) -> None:
        """From now on `report` learns, on a thread of its own, that another rank is gone. Before, the process ends."""

    def close(self, *, orderly: bool = True) -> None:
        """Leave the group. Safe to call twice. Not `orderly`: this rank has failed, and the others do not leave too, so
        that it must not wait for them."""


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
    """Meet the other ranks at `address`:`port` (rank 0 listens there); gloo for a CPU device, nccl for CUDA.

    collective_timeout_s: of a collective; None: `timeout_s`. key_prefix: of every key in the store, so that a process
    that does not know it meets no rank. one_shot: sums of a few MiB on CUDA bypass NCCL where the devices can read each
    other's memory. force: a single rank makes a group too, whose collectives are real ones (`address` and `port` are
    then not used); for measuring. Raises StartupError if the port is taken, and MissingPeerError, which names them, if
    not all ranks come within `timeout_s` seconds.
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
        return dist.HashStore()  # type: ignore[attr-defined]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family) if rank == 0 else None
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
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
    """The ranks that have not come in time. The store itself would wait as well, but only count them."""
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
    """Several ranks over torch.distributed's default group. What goes wrong in a collective is fatal."""

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
        """members, handle: of a part of the default group; its ranks in that group, and torch's object for it."""
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

    def use_device(self, device: torch.device, *, one_shot: bool) -> None:
        """Run each collective of a CUDA `device` once; see whether small sums can do without NCCL."""
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

    def all_gather_last(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1]).contiguous()
        gathered = rows.new_empty(self.size * rows.shape[0], rows.shape[1])
        self._run(lambda: _gather(gathered, rows, self._handle))
        # [ranks, rows, n] -> [rows, ranks, n]; for one row the memory is in order already.
        by_row = gathered.view(self.size, *rows.shape).transpose(0, 1)
        shape = (*tensor.shape[:-1], self.size * tensor.shape[-1])
        if dtype is None or dtype is tensor.dtype:
            return by_row.reshape(shape)
        # Order and type in one pass over the logits.
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
        return mine

    def send(self, tensor: Tensor, to: int) -> Callable[[], object]:
        started: list[dist.Work | None] = []
        self._guard(lambda: started.append(dist.isend(tensor, self._members[to], group=self._handle)))
        work = started[0]
        assert work is not None, "this rank is in the group"
        return lambda: self._guard(work.wait)

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
        """Raises FatalError for what the backend says of the others, LostPeerError if one of them is known to be gone.
        An error of this rank's device or memory is passed on as it is."""
        self._num_collectives += 1
        self._guard(collective)

    def _guard(self, exchange: Callable[[], object]) -> None:
        """`_run` for what not all ranks do together, on any thread."""
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
    """NCCL's and the store's errors have types of their own; gloo's are bare RuntimeErrors, the device's are not."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "CUDA" not in str(error))


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]
