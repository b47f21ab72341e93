"""GGUF tensors for the weight reader: mapped, in transformers' order; blocks stay bytes."""

from __future__ import annotations

import math
import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.gguf.architectures import architecture_of
from model_server.weights.gguf.delta_heads import ColumnOrder, DeltaHeads
from model_server.weights.gguf.header import BLOCKS
from model_server.weights.gguf.names import metadata_of
from model_server.weights.header import Header, Stored
from wire.model_files import open_regular

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """One file, mapped while this or a tensor lives; must not change."""

    def __init__(self, path: Path, header: Header) -> None:
        """header: of `read_named`."""
        metadata = metadata_of(path)
        self._architecture = architecture_of(metadata, path)
        name = metadata.get("general.architecture")
        heads = metadata.get(f"{name}.attention.head_count")
        groups = metadata.get(f"{name}.attention.head_count_kv", heads)
        groups = max(groups) if isinstance(groups, list) and groups else groups
        self._num_heads = {"q_proj": heads, "k_proj": groups}
        self._delta = DeltaHeads.of(metadata) if self._architecture.tiled else None
        self._header = header
        self._path = path
        with open_regular(path, StartupError) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if any(stored.end > len(self._map) for stored in header.tensors.values()):
            raise StartupError(f"{path} has become shorter while it was read")

    def get_slice(self, name: str) -> Tensor:
        """Return floating numbers, or rows of blocks [rows, bytes] uint8, perhaps mapped."""
        stored = self._header.tensors[name]
        tensor = self._view(stored)
        module, _, _ = name.rpartition(".")
        if name.endswith(".A_log"):
            tensor = tensor.neg().log()
        if self._delta is not None:
            tensor = self._delta.rows(tensor, name)
        if self._architecture.added and module.endswith("norm") and not module.endswith(self._architecture.not_added):
            return tensor - self._architecture.added
        heads = self._num_heads.get(module.rpartition(".")[2])
        if self._architecture.adjacent and heads is not None:
            return self._halves(tensor, heads, name)
        return tensor

    def columns(self, name: str) -> ColumnOrder | None:
        """Return the order of a matrix's columns, if blocks of it have another one."""
        return None if self._delta is None else self._delta.columns(name)

    def _view(self, stored: Stored) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            taken = torch.frombuffer(self._map, dtype=torch.uint8, count=stored.end - stored.begin, offset=stored.begin)
        if stored.dtype in _FLOATS:
            dtype = _FLOATS[stored.dtype]
            aligned = taken if taken.data_ptr() % dtype.itemsize == 0 else taken.clone()
            return aligned.view(dtype).view(stored.shape)
        length, size = BLOCKS[stored.dtype]
        return taken.view(math.prod(stored.shape[:-1]), stored.shape[-1] // length * size)

    def _halves(self, tensor: Tensor, heads: object, name: str) -> Tensor:
        """Move adjacent rotated pairs half a head apart."""
        if type(heads) is not int or heads < 1 or len(tensor) % (2 * heads):
            raise StartupError(f"{self._path}: {name} has {len(tensor)} rows, which are not {heads!r:.80} heads")
        pairs = tensor.view(heads, len(tensor) // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
