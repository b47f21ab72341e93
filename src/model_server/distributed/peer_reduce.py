"""All-reduce of small and middling messages between GPUs that read each other's memory."""

# A decode step reduces a few hundred kilobytes twice in each layer; what such a sum costs is latency, and NCCL's steps
# from rank to rank have more of it than one kernel. There are three such kernels, torch's own with their barriers
# (`torch.ops.symm_mem`, symmetric memory): `one_shot`, in which every rank reads all the others; `two_shot`, in which
# every rank adds one part and then reads the others' parts; `multimem`, in which the switch between the GPUs adds
# (NVLink SHARP). Here are the questions whether they can run, the staging buffer, and the bounds between them and NCCL.
#
# All ranks get the same bits: in one shot each adds in the order of the ranks, otherwise one rank or the switch adds a
# number for all. bfloat16 is rounded at each addition, as NCCL does; float16, which torch's kernels do not take, is
# staged and added in float32. Nothing here waits for the host, and only shapes decide the way: a sum may be captured in
# a CUDA graph. One buffer serves all: calls must be ordered by streams, and a kernel ends only when all ranks have read
# it.

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

NVML = "libnvidia-ml.so.1"

# Staged bytes up to which one shot wins, by number of ranks: each rank reads all the others' messages in full. The
# bounds of vLLM's custom_all_reduce.cuh (two ranks: any size it takes), unmeasured here.
MAX_BYTES: Mapping[int, int] = {2: 4 * 2**20, 4: 512 * 2**10, 8: 256 * 2**10}

# Staged bytes up to which two shots or the switch win, by number of ranks. With two ranks one shot moves no more.
LARGE_BYTES: Mapping[int, int] = {4: 8 * 2**20, 8: 8 * 2**20}

Way = Literal["one_shot", "two_shot", "multimem"]

# torch's operator for each way.
OPERATORS: Mapping[Way, str] = {
    "one_shot": "one_shot_all_reduce",
    "two_shot": "two_shot_all_reduce_out",
    "multimem": "multimem_all_reduce_",
}

# Ways for what is too large for one shot, the fastest first.
LARGE_WAYS: tuple[Way, ...] = ("multimem", "two_shot")

# Sums in the graph that is tried at the start, and the most bytes of one of them.
TRIED_SUMS = 64
TRIED_BYTES = 512 * 2**10

# What a message is added in; torch's kernel knows these two.
STAGED = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}

# Vector loads of the kernel. Smaller alignments work too, more slowly, and are rare: hidden sizes are multiples of 64.
ALIGNMENT = 16

# bfloat16 additions.
OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What the choice of a way depends on."""

    world_size: int
    device_count: int
    capability: tuple[int, int]
    # Every pair of devices, both ways; `nvlink`: every pair.
    peer_access: bool
    nvlink: bool
    # The ways that this torch has a kernel for; `multicast`: the switch can add.
    operators: frozenset[Way]
    multicast: bool
    # Torch's word for its symmetric memory.
    memory: str

    @classmethod
    def gather(cls, world_size: int, device: torch.device) -> PeerFacts:
        """Ask torch and the driver; rank r computes on device r."""
        count = torch.cuda.device_count()
        pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
        return cls(
            world_size=world_size,
            device_count=count,
            capability=torch.cuda.get_device_capability(device),
            peer_access=world_size <= count and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
            nvlink=world_size <= count and _nvlink(pairs),
            operators=_operators(),
            multicast=_has_multicast(device),
            memory=_memory_kind(device),
        )


def why_not(facts: PeerFacts) -> str | None:
    """Say why these ranks cannot reduce in one shot, if so."""
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
    if "one_shot" not in facts.operators:
        return f"torch {torch.__version__} has no symmetric memory"
    if facts.memory not in ("CUDA", "None"):  # None: not decided before the first allocation
        return f"symmetric memory of the kind {facts.memory}"
    return None


def may_use(way: Way, facts: PeerFacts) -> bool:
    """Whether messages beyond one shot may be summed this way."""
    return facts.world_size in LARGE_BYTES and way in facts.operators and (way != "multimem" or facts.multicast)


class PeerReduce:
    """The staging buffer that all ranks map, and the sums through it."""

    def __init__(self, buffer: Tensor, group_name: str, world_size: int, large: Way | None = None) -> None:
        """Take the exchanged buffer: uint8, symmetric, of the size of the largest message.

        Args:
            large: The way of messages too large for one shot; None: not taken.
        """
        self._views = {dtype: buffer.view(dtype) for dtype in set(STAGED.values())}
        self._group_name = group_name
        self._max_bytes = MAX_BYTES[world_size]
        self._large_bytes = min(LARGE_BYTES.get(world_size, 0), buffer.numel())
        # Every rank's part is whole vectors too.
        self._large_alignment = ALIGNMENT * world_size
        self._copies = _has_operator("one_shot_all_reduce_copy")
        self.large = large

    def way(self, tensor: Tensor) -> Way | None:
        """Say how `tensor` is summed here, if at all, by type, shape and layout alone."""
        staged = STAGED.get(tensor.dtype)
        if staged is None or not tensor.is_contiguous():
            return None
        size, offset = tensor.numel() * staged.itemsize, tensor.storage_offset() * tensor.element_size()
        if size == 0 or size % ALIGNMENT or offset % ALIGNMENT:
            return None
        if size <= self._max_bytes:
            return "one_shot"
        return self.large if size <= self._large_bytes and size % self._large_alignment == 0 else None

    def all_reduce(self, tensor: Tensor, way: Way) -> Tensor:
        """Sum over the ranks, in the given way, into new memory."""
        operators = torch.ops.symm_mem
        dtype = STAGED[tensor.dtype]
        staged = self._views[dtype][: tensor.numel()].view(tensor.shape)
        if way == "one_shot" and dtype == tensor.dtype and self._copies:  # staging and sum in one kernel
            return operators.one_shot_all_reduce_copy(staged, tensor, "sum", self._group_name)  # type: ignore[no-any-return]
        staged.copy_(tensor)
        if way == "one_shot":
            return operators.one_shot_all_reduce(staged, "sum", self._group_name).to(tensor.dtype)  # type: ignore[no-any-return]
        if way == "two_shot":
            total = torch.empty_like(staged)
            operators.two_shot_all_reduce_out(staged, "sum", self._group_name, total)
            return total.to(tensor.dtype)
        operators.multimem_all_reduce_(staged, "sum", self._group_name)
        return staged.to(tensor.dtype, copy=True)


Capture = Callable[[Callable[[], object]], Callable[[], object]]


def connect(
    rank: int,
    world_size: int,
    device: torch.device,
    agree: Callable[[bool], bool],
    capture: Capture | None = None,
) -> PeerReduce | None:
    """Exchange and try a buffer over torch's default group, or log why not; all ranks call it together.

    Args:
        agree: True on every rank if true on all.
        capture: From work to its replay; None: by a CUDA graph.
    """
    facts = PeerFacts.gather(world_size, device)
    reason = why_not(facts)
    if not agree(reason is None):
        _log_nccl(reason)
        return None
    reduce = None
    try:
        reduce = _exchange(device, world_size)
    except (RuntimeError, AttributeError, TypeError) as error:  # a private interface of torch's
        reason = f"symmetric memory cannot be exchanged: {str(error).partition(chr(10))[0]}"
    if not agree(reduce is not None) or reduce is None:
        _log_nccl(reason)
        return None
    trial = _Trial(reduce, rank, world_size, device, agree, capture or _captured)
    most = MAX_BYTES[world_size]
    if not trial.passes((4096, most), in_graph=min(most, TRIED_BYTES)):
        _log_nccl("the sums in one shot were wrong when they were tried")
        return None
    text = f"All-reduce of up to {most // 2**10} KiB in one shot"
    for way in LARGE_WAYS:
        if not agree(may_use(way, facts)):
            continue
        reduce.large = way
        if trial.passes((2 * most, LARGE_BYTES[world_size]), in_graph=most + 4096):
            text += f", of up to {LARGE_BYTES[world_size] // 2**20} MiB by {way}"
            break
        reduce.large = None
        logger.warning("All-reduce by %s was wrong when it was tried: it is not used", way)
    logger.info("%s, above through NCCL", text)
    return reduce


class _Trial:
    """Known sums, one by one and in a graph; partial sums up to 216 are exact in bfloat16."""

    def __init__(
        self,
        reduce: PeerReduce,
        rank: int,
        world_size: int,
        device: torch.device,
        agree: Callable[[bool], bool],
        capture: Capture,
    ) -> None:
        self._reduce = reduce
        self._share = rank + 1
        self._total = world_size * (world_size + 1) // 2
        self._device = device
        self._agree = agree
        self._capture = capture

    def passes(self, sizes: tuple[int, ...], *, in_graph: int) -> bool:
        """Whether all ranks found all sums of these sizes right."""
        good = True
        for dtype in STAGED:
            for size in sizes:
                good = self._sums_correctly(dtype, size // STAGED[dtype].itemsize) and good
        return self._agree(good) and self._in_a_graph(in_graph // torch.bfloat16.itemsize)

    def _sum(self, numbers: Tensor) -> Tensor:
        mine = numbers * self._share
        way = self._reduce.way(mine)
        assert way is not None
        return self._reduce.all_reduce(mine, way)

    def _sums_correctly(self, dtype: torch.dtype, count: int) -> bool:
        """Sum twice: the second must not see the first one's buffer."""
        numbers = torch.arange(count, device=self._device).remainder_(4).to(dtype)
        good = True
        try:
            for factor in (1, 2):  # both of them: the others wait for this rank's share
                good = torch.equal(self._sum(numbers * factor), numbers * (factor * self._total)) and good
        except RuntimeError as error:  # what torch refuses it refuses on all ranks
            logger.warning("All-reduce between GPUs failed: %s", str(error).partition("\n")[0])
            return False
        return good

    def _in_a_graph(self, count: int) -> bool:
        """Sum back to back in one replayed graph, with unequal messages, so that a premature or late read is found."""
        pattern = torch.arange(count, device=self._device)
        numbers = torch.empty(TRIED_SUMS, count, dtype=torch.bfloat16, device=self._device)
        totals = torch.empty_like(numbers)

        def work() -> None:
            for index in range(TRIED_SUMS):
                totals[index].copy_(self._sum(numbers[index]))

        numbers.zero_()
        work()  # kernels are loaded
        replay = None
        try:
            replay = self._capture(work)
        except RuntimeError as error:
            logger.warning("All-reduce between GPUs cannot be captured: %s", str(error).partition("\n")[0])
        # A rank without a graph would leave the others waiting in their kernels.
        if not self._agree(replay is not None) or replay is None:
            return False
        good = True
        for start in range(3):
            for index in range(TRIED_SUMS):
                numbers[index] = (pattern + start + index).remainder_(4)
            replay()
            good = torch.equal(totals, numbers * self._total) and good
        return self._agree(good)


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    # thread_local: NCCL's watchdog asks for events on another thread.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


def _log_nccl(reason: str | None) -> None:
    logger.info("All-reduce only through NCCL: %s", reason or "another rank says why")


def _exchange(device: torch.device, world_size: int) -> PeerReduce:
    memory = _symmetric_memory()
    group = dist.group.WORLD
    assert memory is not None and group is not None
    # Not through `empty`: its pool may hand out the middle of an allocation, which the kernels of some versions ignore.
    max_bytes = max(MAX_BYTES[world_size], LARGE_BYTES.get(world_size, 0))
    buffer = memory._SymmetricMemory.empty_strided_p2p((max_bytes,), (1,), torch.uint8, device)
    memory.rendezvous(buffer, group.group_name)
    return PeerReduce(buffer, group.group_name, world_size)


def _symmetric_memory() -> Any:
    """Import torch's private module, which builds without distributed CUDA lack."""
    try:
        return importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None


def _has_operator(name: str) -> bool:
    return hasattr(torch.ops.symm_mem, name)


def _operators() -> frozenset[Way]:
    if _symmetric_memory() is None:
        return frozenset()
    return frozenset(way for way, name in OPERATORS.items() if _has_operator(name))


def _has_multicast(device: torch.device) -> bool:
    """Whether the GPUs' switch adds, in versions that can say."""
    try:
        from torch._C._autograd import DeviceType

        memory = _symmetric_memory()
        return bool(memory._SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0))
    except (ImportError, RuntimeError, AttributeError, TypeError):
        return False


def _memory_kind(device: torch.device) -> str:
    """Return the kind; older versions know one only."""
    ask = getattr(_symmetric_memory(), "get_backend", None)
    return "CUDA" if ask is None else str(ask(device))


def _nvlink(pairs: list[tuple[int, int]]) -> bool:
    try:
        ctypes.CDLL(NVML)  # where it is missing, torch calls a null pointer
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (ImportError, OSError, RuntimeError, AttributeError):  # NVML cannot be asked, or torch asks it no more
        return False
    return all(matrix[a][b] > 0 for a, b in pairs)
