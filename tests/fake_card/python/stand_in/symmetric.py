"""The sums of torch's symmetric memory (`torch.ops.symm_mem`) over processes: each rank reads the others' buffers,
which are mapped, between two meetings. The signal pads, which the kernels that do not run would use, count the
meetings.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stand_in import queued
from stand_in.places import Place

_MEET_S = float(os.environ.get("FAKE_CARD_MEET_S", "120"))
_PAUSE_S = 5e-5
_met: dict[int, int] = {}  # meetings so far, by the address of this rank's pad


def compute(name: str, args: Any, kwargs: Any, result: Any) -> None:
    """Queue what operator `name` does on a card. Others than sums of a buffer over all ranks are refused."""
    bound = list(args) + list(kwargs.values())
    tensors = [x for x in bound if isinstance(x, Tensor)]
    group = next(x for x in reversed(bound) if isinstance(x, str))
    buffer = tensors[0]
    handle = _handle(buffer, group)
    if name == "one_shot_all_reduce_copy":
        target, source = result, tensors[1]
    elif name in ("one_shot_all_reduce", "two_shot_all_reduce_", "multimem_all_reduce_"):
        target, source = result, None
    elif name in ("two_shot_all_reduce_out", "one_shot_all_reduce_out"):
        target, source = tensors[1], None
    else:
        raise NotImplementedError(f"symm_mem::{name} has no stand-in")
    queued.enqueue(_sum(handle, Place(buffer), Place(target), None if source is None else Place(source)))


def _handle(buffer: Tensor, group: str) -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.rendezvous(buffer, group)


def _sum(handle: Any, buffer: Place, target: Place, source: Place | None) -> Callable[[], None]:
    offset = buffer.pointer - handle.buffer_ptrs[handle.rank]

    def run() -> None:
        if source is not None:
            buffer.tensor().copy_(source.tensor())
        _meet(handle)
        total = _of_rank(handle, 0, offset, buffer).clone()
        for rank in range(1, handle.world_size):
            total += _of_rank(handle, rank, offset, buffer)
        _meet(handle)
        target.tensor().copy_(total)

    return run


def _of_rank(handle: Any, rank: int, offset: int, like: Place) -> Tensor:
    place = Place.__new__(Place)
    place.pointer = handle.buffer_ptrs[rank] + offset
    place.shape, place.stride, place.dtype = like.shape, like.stride, like.dtype
    return place.tensor()


def _meet(handle: Any) -> None:
    """Return once every rank has come here as often as this one."""
    pads = handle.signal_pad_ptrs
    own = pads[handle.rank]
    count = _met[own] = _met.get(own, 0) + 1
    ctypes.c_int64.from_address(own).value = count
    ends = time.monotonic() + _MEET_S
    for rank, pad in enumerate(pads):
        while ctypes.c_int64.from_address(pad).value < count:
            if time.monotonic() > ends:
                raise TimeoutError(f"rank {handle.rank} is alone in sum {count}: rank {rank} has not come")
            time.sleep(_PAUSE_S)
