"""One-shot all-reduce for small messages between GPUs that read each other's memory.

A decode step reduces a few hundred kilobytes twice in each layer; what such a sum costs is latency, and NCCL's steps
from rank to rank have more of it than one kernel in which every rank reads all the others. The kernel and its barrier
are torch's own (`torch.ops.symm_mem`, symmetric memory); here are the questions whether it can run, the staging buffer
and the bound above which NCCL's bandwidth wins.

Every rank adds in the order of the ranks, so all get the same bits. bfloat16 is rounded at each addition, as NCCL does;
float16, which torch's kernel does not take, is staged and added in float32. Nothing here waits for the host, and shapes
alone decide the way: a sum may be captured in a CUDA graph. One buffer serves all: calls must be ordered by streams.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# Staged bytes up to which one shot wins, by number of ranks: each rank reads all the others' messages in full. The
# bounds of vLLM's custom_all_reduce.cuh (two ranks: any size it takes), unmeasured here.
MAX_BYTES: Mapping[int, int] = {2: 4 * 2**20, 4: 512 * 2**10, 8: 256 * 2**10}

# What a message is added in; torch's kernel knows these two.
STAGED = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}

# Vector loads of the kernel. Smaller alignments work too, more slowly, and are rare: hidden sizes are multiples of 64.
ALIGNMENT = 16

# bfloat16 additions.
OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What the choice depends on. `peer_access`: every pair of the ranks' devices, both ways. `nvlink`: every pair is
    joined by NVLink. `operators`: this torch has the kernel. `memory`: torch's word for its kind of symmetric memory.
    """

    world_size: int
    device_count: int
    capability: tuple[int, int]
    peer_access: bool
    nvlink: bool
    operators: bool
    memory: str

    @classmethod
    def gather(cls, world_size: int, device: torch.device) -> PeerFacts:
        """Ask torch and the driver. Rank r computes on device r."""
        count = torch.cuda.device_count()
        pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
        return cls(
            world_size=world_size,
            device_count=count,
            capability=torch.cuda.get_device_capability(device),
            peer_access=world_size <= count and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
            nvlink=world_size <= count and _nvlink(pairs),
            operators=_symmetric_memory() is not None and _has_operator("one_shot_all_reduce"),
            memory=_memory_kind(device),
        )


def why_not(facts: PeerFacts) -> str | None:
    """The reason why these ranks cannot reduce in one shot; None if they can."""
    if facts.world_size not in MAX_BYTES:
        return f"{facts.world_size} ranks, not one of {', '.join(map(str, MAX_BYTES))}"
    if facts.device_count < facts.world_size:
        return f"{facts.device_count} GPUs visible to {facts.world_size} ranks"
    if facts.capability < OLDEST_CAPABILITY:
        return f"compute capability {facts.capability[0]}.{facts.capability[1]} is below 8.0"
    if not facts.peer_access:
        return "the GPUs cannot read each other's memory"
    if facts.world_size > 2 and not facts.nvlink:
        return "more than two GPUs without NVLink between all of them"
    if not facts.operators:
        return f"torch {torch.__version__} has no symmetric memory"
    if facts.memory != "CUDA":
        return f"symmetric memory of the kind {facts.memory}"
    return None


class OneShot:
    """The staging buffer that all ranks have mapped, and the sum through it."""

    def __init__(self, buffer: Tensor, group_name: str, max_bytes: int) -> None:
        """`buffer`: uint8 [max_bytes], symmetric memory that the ranks of `group_name` have exchanged."""
        self._views = {dtype: buffer.view(dtype) for dtype in set(STAGED.values())}
        self._group_name = group_name
        self._max_bytes = max_bytes
        self._copies = _has_operator("one_shot_all_reduce_copy")

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` goes this way. Depends on what is the same on all ranks alone: type, shape, layout."""
        staged = STAGED.get(tensor.dtype)
        if staged is None or not tensor.is_contiguous():
            return False
        size, offset = tensor.numel() * staged.itemsize, tensor.storage_offset() * tensor.element_size()
        return 0 < size <= self._max_bytes and size % ALIGNMENT == 0 and offset % ALIGNMENT == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of what `takes` accepted, same shape and dtype, in memory of its own."""
        operators = torch.ops.symm_mem
        dtype = STAGED[tensor.dtype]
        staged = self._views[dtype][: tensor.numel()].view(tensor.shape)
        if dtype == tensor.dtype and self._copies:  # staging and sum in one kernel
            return operators.one_shot_all_reduce_copy(staged, tensor, "sum", self._group_name)  # type: ignore[no-any-return]
        staged.copy_(tensor)
        return operators.one_shot_all_reduce(staged, "sum", self._group_name).to(tensor.dtype)  # type: ignore[no-any-return]


def connect(rank: int, world_size: int, device: torch.device, agree: Callable[[bool], bool]) -> OneShot | None:
    """Exchange a buffer over torch's default group and try it; None, and one log line that says why, if that cannot be.

    All ranks call it together. agree: true on every rank if it is called with true on every rank.
    """
    reason = why_not(PeerFacts.gather(world_size, device))
    if not agree(reason is None):
        _log_nccl(reason)
        return None
    max_bytes = MAX_BYTES[world_size]
    one_shot = None
    try:
        one_shot = _exchange(device, max_bytes)
    except (RuntimeError, AttributeError, TypeError) as error:  # a private interface of torch's
        reason = f"symmetric memory cannot be exchanged: {str(error).partition(chr(10))[0]}"
    if not agree(one_shot is not None) or one_shot is None:
        _log_nccl(reason)
        return None
    if not agree(sums_correctly(one_shot, rank, world_size, device)):
        _log_nccl("the sums in one shot were wrong when they were tried")
        return None
    logger.info("All-reduce of up to %d KiB in one shot, above through NCCL", max_bytes // 2**10)
    return one_shot


def sums_correctly(one_shot: OneShot, rank: int, world_size: int, device: torch.device) -> bool:
    """Add numbers twice in a row: the second sum must not see the first one's buffer. All partial sums are at most 216,
    which bfloat16 still holds exactly."""
    good = True
    for dtype in STAGED:
        numbers = torch.arange(2048, device=device).remainder_(4).to(dtype).view(2, -1)
        for factor in (1, 2):
            total = one_shot.all_reduce(numbers * (factor * (rank + 1)))
            expected = numbers * (factor * world_size * (world_size + 1) // 2)
            good = torch.equal(total, expected) and good  # all of them: the others wait for this rank's share
    return good


def _log_nccl(reason: str | None) -> None:
    logger.info("All-reduce through NCCL alone: %s", reason or "another rank says why")


def _exchange(device: torch.device, max_bytes: int) -> OneShot:
    memory = _symmetric_memory()
    group = dist.group.WORLD
    assert memory is not None and group is not None
    # Not through `empty`: its pool may hand out the middle of an allocation, which the kernels of some versions ignore.
    buffer = memory._SymmetricMemory.empty_strided_p2p((max_bytes,), (1,), torch.uint8, device)
    memory.rendezvous(buffer, group.group_name)
    return OneShot(buffer, group.group_name, max_bytes)


def _symmetric_memory() -> Any:
    """torch's module, private and missing from builds without distributed CUDA."""
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None


def _has_operator(name: str) -> bool:
    return hasattr(torch.ops.symm_mem, name)


def _memory_kind(device: torch.device) -> str:
    """Versions that cannot say know one kind only."""
    ask = getattr(_symmetric_memory(), "get_backend", None)
    return "CUDA" if ask is None else str(ask(device))


def _nvlink(pairs: list[tuple[int, int]]) -> bool:
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, RuntimeError, AttributeError):  # NVML cannot be asked, or torch asks it no more
        return False
    return all(matrix[a][b] > 0 for a, b in pairs)
