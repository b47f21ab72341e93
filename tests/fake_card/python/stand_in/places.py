"""Device tensors as memory: device memory is host memory here, so a CPU's operator can compute in it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


class Place:
    """A tensor's memory, without holding the tensor."""

    __slots__ = ("dtype", "pointer", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.pointer = tensor.data_ptr()
        self.shape = tuple(tensor.shape)
        self.stride = tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self) -> Tensor:
        """The same memory as a tensor of the CPU."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        num_bytes = extent * self.dtype.itemsize
        memory = (ctypes.c_char * num_bytes).from_address(self.pointer)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def places(tree: Any) -> Any:
    """Device tensors of a tree as places."""
    return tree_map(lambda x: Place(x) if isinstance(x, Tensor) and x.is_cuda else x, tree)


def on_cpu(tree: Any) -> Any:
    """Places of a tree as tensors of the CPU."""
    return tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of a tree."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
