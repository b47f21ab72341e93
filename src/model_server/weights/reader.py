"""Tensors of a checkpoint, read lazily: each rank touches only the bytes of the rows or columns it keeps.

Layers pull what they need by name; what a checkpoint calls things is known to `models`, not here. Names may carry the
base prefix (`model.`) or lack it: public files do both (model_server.md 5.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.errors import StartupError

Range = tuple[int, int]


class WeightReader(Protocol):
    """Where layers get their tensors from. Every tensor comes in the model's dtype on the model's device."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`. What is absent is off: biases, norms, an own head."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of `name`."""

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        """The rows [start, stop) of each range, one after the other; `dtype` instead of the model's."""

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of a matrix."""

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        """Some rows and columns of matrix `index` of a tensor [n, num_rows, num_columns]."""


class SafetensorsReader:
    """Reads a set of safetensors files. A context manager: the files stay open inside.

    Raises StartupError, one line, for a file that is damaged or cut short, a tensor that is missing, in two files, not
    floating point, or smaller than what is asked of it.
    """

    def __init__(
        self, files: Iterable[Path], *, dtype: torch.dtype, device: torch.device, base_prefix: str = "model."
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._base_prefix = base_prefix
        self._handles: list[Any] = []
        self._file_of: dict[str, tuple[Any, Path]] = {}
        for path in files:
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
                names: list[str] = handle.keys()
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged or incomplete: {_first_line(error)}") from error
            self._handles.append(handle)
            for name in names:
                if name in self._file_of:
                    # TGI's words.
                    other = self._file_of[name][1].name
                    raise StartupError(f"Key {name} was found in multiple files: {path.name} and {other}")
                self._file_of[name] = (handle, path)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._handles.clear()

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        available = self.shape(name)
        stop = max(stop for _, stop in ranges)
        if not available or available[0] < stop:
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {stop} rows")
        view = self._slice(name)
        parts = [view[start:stop] for start, stop in ranges]
        return self._convert(name, parts[0] if len(parts) == 1 else torch.cat(parts), dtype)

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        available = self.shape(name)
        if len(available) != 2 or available[1] < stop:
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {stop} columns")
        return self._convert(name, self._slice(name)[:, start:stop])

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        available, asked = self.shape(name), (index + 1, rows[1], columns[1])
        if len(available) != 3 or any(a < b for a, b in zip(available, asked, strict=True)):
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {list(asked)} at least")
        return self._convert(name, self._slice(name)[index, slice(*rows), slice(*columns)])

    def _find(self, name: str) -> str | None:
        """`name` as this checkpoint spells it."""
        if name in self._file_of:
            return name
        prefix = self._base_prefix
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return other if other in self._file_of else None

    def _slice(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise StartupError(f"weight {name} does not exist")
        handle, path = self._file_of[found]
        try:
            return handle.get_slice(found)
        except SafetensorError as error:
            raise StartupError(f"{path} is damaged: {_first_line(error)}") from error

    def _convert(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise StartupError(
                f"weight {name} is stored as {tensor.dtype}; quantized checkpoints are not served by this version"
            )
        # A copy in any case: what safetensors returns may share the file's memory map.
        return tensor.to(device=self._device, dtype=dtype or self._dtype, copy=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
