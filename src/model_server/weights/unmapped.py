"""Safetensors read instead of mapped: truncating a mapped file ends the process, and adapters are written while
serving.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.header import BITS, Header, Stored
from wire.model_files import open_regular

_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


class UnmappedTensors:
    """One open file, which must fit `header`."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._file = open_regular(path, StartupError)
        self._facts = self._now()
        if self._facts[0] < max((stored.end for stored in header.tensors.values()), default=0):
            raise self._changed()

    def get_slice(self, name: str) -> Rows:
        return Rows(self, self._header.tensors[name])

    def read(self, begin: int, size: int) -> bytearray:
        """Bytes of the file."""
        found = bytearray(size)
        left = memoryview(found)
        while left:  # the kernel reads at most 2 GiB at a time
            count = os.preadv(self._file.fileno(), [left], begin + size - len(left))
            if not count:
                raise self._changed()
            left = left[count:]
        return found

    def check(self) -> None:
        """Refuse a file written to since it was opened."""
        if self._now() != self._facts:
            raise self._changed()

    def close(self) -> None:
        """Nothing can be read any more."""
        self._file.close()

    def _now(self) -> tuple[int, int]:
        facts = os.fstat(self._file.fileno())
        return facts.st_size, facts.st_mtime_ns

    def _changed(self) -> StartupError:
        return StartupError(f"{self._path} has changed while it was read: try again")


class Rows:
    """Reads `[slice(first, last)]` of a tensor into new memory."""

    def __init__(self, tensors: UnmappedTensors, stored: Stored) -> None:
        self._tensors = tensors
        self._stored = stored

    def __getitem__(self, cut: tuple[slice]) -> Tensor:
        stored, inner = self._stored, self._stored.shape[1:]
        first, last = cut[0].start, cut[0].stop
        size = math.prod(inner) * BITS[stored.dtype] // 8
        if last <= first or not size:
            return torch.empty((max(last - first, 0), *inner), dtype=_TYPES[stored.dtype])
        found = self._tensors.read(stored.begin + first * size, (last - first) * size)
        return torch.frombuffer(found, dtype=_TYPES[stored.dtype]).view(last - first, *inner)
