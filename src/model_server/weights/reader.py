"""Tensors of a checkpoint, read lazily: each rank touches only the bytes of the rows or columns it keeps.

Layers pull what they need by name; what a checkpoint calls things is known to `models`, not here. Names may carry the
base prefix (`model.`) or lack it: public files do both (model_server.md 5.3).

Memory: files are mapped, and every value goes from the map to its place in one copy that also casts. The `_into`
methods fill a part of a tensor that the caller has made, so that fused matrices need no pieces beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.header import Stored, read_header

Range = tuple[int, int]
Place = Callable[[Tensor, Tensor], object]

# What goes to an accelerator at a time; it is held there twice while its type is changed.
CHUNK_BYTES = 64 * 2**20

# The types that weights may be stored in: a model's numbers, not codes of a quantization.
_FLOATING = ("F16", "BF16", "F32", "F64")


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

    @property
    def dtype(self) -> torch.dtype:
        """The model's type, in which tensors come."""

    def rows_into(self, out: Tensor, name: str, ranges: Sequence[Range], *, place: Place = ..., unit: int = 1) -> None:
        """Fill a part of a fused matrix; see `SafetensorsReader`."""

    def columns_into(self, out: Tensor, name: str, start: int, stop: int) -> None:
        """Fill a part of a fused matrix; see `SafetensorsReader`."""

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        """Some rows and columns of matrix `index` of a tensor [n, num_rows, num_columns]."""


def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)


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
        self._file_of: dict[str, tuple[Any, Path, Stored]] = {}
        for path in files:
            header = read_header(path)
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged or incomplete: {_first_line(error)}") from error
            self._handles.append(handle)
            for name, stored in header.tensors.items():
                if name in self._file_of:
                    # TGI's words.
                    other = self._file_of[name][1].name
                    raise StartupError(f"Key {name} was found in multiple files: {path.name} and {other}")
                self._file_of[name] = (handle, path, stored)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._handles.clear()

    @property
    def dtype(self) -> torch.dtype:
        """The model's type, in which tensors come."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where tensors come to lie."""
        return self._device

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        self._check_rows(name, ranges)
        num_rows = sum(stop - start for start, stop in ranges)
        out = self._empty((num_rows, *self.shape(name)[1:]), dtype)
        self.rows_into(out, name, ranges)
        return out

    def rows_into(
        self, out: Tensor, name: str, ranges: Sequence[Range], *, place: Place = _copy, unit: int = 1
    ) -> None:
        """Fill `out` [num_rows, ...], any type and strides, with the rows of each range, one after the other.

        place(destination, source): copies some of the rows, in another order if it likes. It is given whole groups of
        `unit` rows; every range must hold whole groups.
        """
        self._check_rows(name, ranges)
        view = self._slice(name)
        position = 0
        for start, stop in ranges:
            for first, last in self._chunks(name, start, stop, unit):
                source = view[first:last].to(out.device, non_blocking=True)
                place(out[position : position + last - first], source)
                position += last - first

    def columns(self, name: str, start: int, stop: int) -> Tensor:
        self._check_columns(name, stop)
        out = self._empty((self.shape(name)[0], stop - start))
        self.columns_into(out, name, start, stop)
        return out

    def columns_into(self, out: Tensor, name: str, start: int, stop: int) -> None:
        """Fill `out` [num_rows, stop - start], any type and strides, with columns [start, stop) of a matrix."""
        self._check_columns(name, stop)
        view = self._slice(name)
        for first, last in self._chunks(name, 0, self.shape(name)[0]):
            _copy(out[first:last], view[first:last, start:stop].to(out.device, non_blocking=True))

    def stacked(self, name: str, index: int, rows: Range, columns: Range) -> Tensor:
        out = self._empty((rows[1] - rows[0], columns[1] - columns[0]))
        self.stacked_into(out, name, index, rows, columns)
        return out

    def stacked_into(self, out: Tensor, name: str, index: int, rows: Range, columns: Range) -> None:
        """Fill `out` [num_rows, num_columns], any type and strides, with a part of matrix `index` of a stack."""
        available, asked = self.shape(name), (index + 1, rows[1], columns[1])
        if len(available) != 3 or any(a < b for a, b in zip(available, asked, strict=True)):
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {list(asked)} at least")
        view = self._slice(name)
        _copy(out, view[index, slice(*rows), slice(*columns)].to(out.device, non_blocking=True))

    def _check_rows(self, name: str, ranges: Sequence[Range]) -> None:
        available = self.shape(name)
        stop = max(stop for _, stop in ranges)
        if not available or available[0] < stop:
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {stop} rows")

    def _check_columns(self, name: str, stop: int) -> None:
        available = self.shape(name)
        if len(available) != 2 or available[1] < stop:
            raise StartupError(f"weight {name} has shape {list(available)}; the config asks for {stop} columns")

    def _chunks(self, name: str, start: int, stop: int, unit: int = 1) -> Iterator[Range]:
        """[start, stop) in ranges of whole units: in one for the CPU, where nothing is held between file and place."""
        stored = self._stored(name)
        step = max(stop - start, 1)
        if self._device.type != "cpu":
            bytes_per_unit = max(unit * (stored.end - stored.begin) // max(stored.shape[0], 1), 1)
            step = max(CHUNK_BYTES // bytes_per_unit, 1) * unit
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _find(self, name: str) -> str | None:
        """`name` as this checkpoint spells it."""
        if name in self._file_of:
            return name
        prefix = self._base_prefix
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return other if other in self._file_of else None

    def _stored(self, name: str) -> Stored:
        found = self._find(name)
        if found is None:
            raise StartupError(f"weight {name} does not exist")
        return self._file_of[found][2]

    def _slice(self, name: str) -> Any:
        """A view of the mapped file. What is cut out of it may share the map: it must be copied, never kept."""
        stored = self._stored(name)
        if stored.dtype not in _FLOATING:
            raise StartupError(
                f"weight {name} is stored as {stored.dtype}; quantized checkpoints are not served by this version"
            )
        found = self._find(name)
        assert found is not None
        handle, path, _ = self._file_of[found]
        try:
            return handle.get_slice(found)
        except SafetensorError as error:
            raise StartupError(f"{path} is damaged: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
