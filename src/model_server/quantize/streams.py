"""Hidden states that enter a layer, in files: one is read while the next is written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from model_server.errors import StartupError
from wire.model_files import open_regular

# Those of the calibration, of the held-out samples, and of these again as the model gives them that is not quantized.
GROUPS = ("calibration", "held_out", "plain")


class Streams:
    """What enters one layer, by group of sequences."""

    def __init__(
        self,
        path: Path,
        counts: tuple[int, int, int],
        length: int,
        width: int,
        dtype: torch.dtype,
        *,
        is_new: bool,
    ) -> None:
        """Map the file, which is new or of its whole size.

        Args:
            counts: Of the sequences in each of `GROUPS`.
            is_new: Reserve its room, since writing a mapped file on a full disk ends the process.
        """
        self._first = dict(zip(GROUPS, (0, counts[0], counts[0] + counts[1]), strict=True))
        shape = (sum(counts), length, width)
        size = shape[0] * length * width
        if is_new:
            _reserve(path, size * dtype.itemsize)
        # Mapped: what does not fit into memory stays in the file.
        self._states = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)

    def get(self, group: str, number: int) -> Tensor:
        """[length, width]"""
        return self._states[self._first[group] + number]

    def put(self, group: str, number: int, states: Tensor) -> None:
        self._states[self._first[group] + number].copy_(states)


def digest(path: Path) -> str:
    with open_regular(path, StartupError) as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _reserve(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
