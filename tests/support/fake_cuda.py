"""A GPU without a card: tensors that have a device, a shape and a type, but no numbers (torch's FakeTensorMode).

What it shows: operators between tensors of two devices, and questions to the device (`.item()`, `bool(tensor)`,
`nonzero`), which raise. What it does not: numbers, and kernels of our own, for which the plain operators stand in.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.graph_doubles import FakeEvent, PlainGraph, PlainGraphCapture
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
_CUDA_GUARD, _META_GUARD = 1, 14  # c10::DeviceType


class _FakePinned:
    """A host buffer whose slices are fake tensors."""

    def __init__(self, size: int) -> None:
        self.shape = (size,)
        self._bytes = np.zeros(size, np.uint8)

    def numpy(self) -> npt.NDArray[np.uint8]:
        return self._bytes

    def __getitem__(self, part: slice) -> Tensor:
        return torch.zeros(len(self._bytes[part]), dtype=torch.uint8)


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """A torch built without CUDA cannot make that device current; the device `meta` shows how to do nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    try:
        guards = (ctypes.c_void_p * (_META_GUARD + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except ValueError:
        pytest.skip("this torch keeps its device guards elsewhere")
    before = guards[_CUDA_GUARD]
    guards[_CUDA_GUARD] = before or guards[_META_GUARD]
    try:
        yield
    finally:
        guards[_CUDA_GUARD] = before


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Inside, tensors on `CUDA` are fake; what only a driver has (pinned memory, events) is replaced."""
    from model_server.kernels import availability
    from model_server.memory import transfer as staging

    # Kernels of our own do not run on fake tensors: where there is Triton, it is hidden.
    monkeypatch.setitem(sys.modules, "triton", None)
    availability.refusal.cache_clear()
    monkeypatch.setattr(staging, "_pinned", _FakePinned)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    with _device_guard(), FakeTensorMode() as mode, torch.no_grad():  # fakes know no inference mode on a device
        yield mode
    availability.refusal.cache_clear()


def on_cuda(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Shape and type of a real tensor; floating types become `dtype`."""
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=CUDA)


class OnDeviceAlone(TorchDispatchMode):
    """Every operator has its tensors on the GPU; single numbers may come from the host. As inside of a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, Tensor) or leaf.is_cuda or leaf.dim() == 0, f"{func} touches {leaf}"
            assert not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor), f"{func} touches a real tensor"
        return result


class NeverWaits(TorchDispatchMode):
    """No copy between host and device that the host waits for: from pageable memory it waits for all queued work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            queued = (kwargs or {}).get("non_blocking", False) or args[2:] == (True,)
            assert queued or source.device == result.device, f"{func} of {source} waits"
        return result


class DeviceGraphCapture(PlainGraphCapture):
    """Records only what stays on the device."""

    def capture(self, work: Callable[[], object]) -> PlainGraph:
        with OnDeviceAlone():
            work()
        return super().capture(work)

    def capture_pieces(self, work: Callable[[Callable[[], None]], object]) -> tuple[PlainGraph, ...]:
        with OnDeviceAlone():
            work(lambda: None)
        return super().capture_pieces(work)
