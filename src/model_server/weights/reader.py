"""Checkpoint tensors, read lazily: ranks touch only their rows' and columns' bytes.

Names may have or lack the base prefix. Values go from the mapped file to their place in one casting copy (`fill`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_server.errors import StartupError
from model_server.weights.gguf.delta_heads import ColumnOrder
from model_server.weights.gguf.tensors import GgufTensors
from model_server.weights.header import Header, Stored
from model_server.weights.unmapped import UnmappedTensors
from wire.quantization.gguf import SUFFIX

Range = tuple[int, int]
Place = Callable[[Tensor, Tensor], object]

# What goes to an accelerator at a time; it is held there twice while its type is changed.
CHUNK_BYTES = 64 * 2**20

# What the norms of BERT's first files are called there.
_OLD_SPELLINGS = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))

# The types that weights may be stored in: a model's numbers, not codes of a quantization.
FLOATING = ("F16", "BF16", "F32", "F64")


class WeightReader(Protocol):
    """Gives layers floating-point tensors in the model's type, on its device."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's type, in which tensors come."""

    @property
    def device(self) -> torch.device: ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has `name`; absent parts are off."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of `name`."""

    def stored(self, name: str) -> str:
        """Return safetensors' name of the stored type."""

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        """Read each range of rows in turn, in `dtype` or the model's."""

    def fill(
        self,
        out: Tensor,
        name: str,
        rows: Sequence[Range],
        columns: Range | None = None,
        *,
        index: int | None = None,
        place: Place = ...,
        unit: int = 1,
    ) -> None:
        """Fill part of a fused matrix (`SafetensorsReader`)."""

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        """Read a tensor as stored."""

    def columns(self, name: str) -> ColumnOrder | None:
        """Return the order of a matrix's columns, if those of `raw` have another one."""

    def skip(self, *names: str) -> None:
        """Count present tensors as read, which are not needed."""


def copy_into(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)


class SafetensorsReader:
    """Reads safetensors or GGUF files, open inside its context."""

    def __init__(
        self,
        headers: Mapping[Path, Header],
        *,
        dtype: torch.dtype,
        device: torch.device,
        base_prefix: str = "model.",
        spellings: Sequence[tuple[str, str]] = (),
        mapped: bool = True,
    ) -> None:
        """Take checked headers.

        Args:
            spellings: Parts of names, and what files may have instead.
            mapped: Else only whole rows are read, and later writes to a file are errors.
        """
        self._dtype = dtype
        self._device = device
        self._base_prefix = base_prefix
        self._spellings = spellings
        self._handles: list[Any] = []
        self._file_of: dict[str, tuple[Any, Path, Stored]] = {}
        self._unread: dict[str, Stored] = {}
        for path, header in headers.items():
            try:
                handle = _opened(path, header, mapped=mapped)
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged or incomplete: {_first_line(error)}") from error
            self._handles.append(handle)
            for name, stored in header.tensors.items():
                if name in self._file_of:
                    # TGI's words.
                    other = self._file_of[name][1].name
                    raise StartupError(f"Key {name} was found in multiple files: {path.name} and {other}")
                self._file_of[name] = (handle, path, stored)
                self._unread[name] = stored

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unmapped = [handle for handle in self._handles if isinstance(handle, UnmappedTensors)]
        self._file_of.clear()
        self._handles.clear()
        try:
            for handle in unmapped if kind is None else ():
                handle.check()
        finally:
            for handle in unmapped:
                handle.close()

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def unread(self) -> Mapping[str, Stored]:
        """Return tensors not read yet, by the files' names."""
        return self._unread

    def read_to_host(self) -> None:
        """Read to the host from now on."""
        self._device = torch.device("cpu")

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def stored(self, name: str) -> str:
        return self._stored(name).dtype

    def rows(self, name: str, ranges: Sequence[Range], dtype: torch.dtype | None = None) -> Tensor:
        self._check(name, ranges)
        num_rows = sum(stop - start for start, stop in ranges)
        out = torch.empty((num_rows, *self.shape(name)[1:]), dtype=dtype or self._dtype, device=self._device)
        self.fill(out, name, ranges)
        return out

    def fill(
        self,
        out: Tensor,
        name: str,
        rows: Sequence[Range],
        columns: Range | None = None,
        *,
        index: int | None = None,
        place: Place = copy_into,
        unit: int = 1,
    ) -> None:
        """Fill `out` [num_rows, ...] with the rows of each range.

        Args:
            columns: Of every row; None: all.
            index: Of a matrix in [n, num_rows, num_columns].
            place: Copies (destination, source), whole groups of `unit` rows.
        """
        self._check(name, rows, columns, index)
        view = self._slice(name)
        before = () if index is None else (index,)
        after = () if columns is None else (slice(*columns),)
        position = 0
        for start, stop in rows:
            for first, last in self._chunks(name, len(before), start, stop, unit):
                source = view[(*before, slice(first, last), *after)].to(out.device, non_blocking=True)
                place(out[position : position + last - first], source)
                position += last - first

    def raw(self, name: str, rows: Range | None = None, columns: Range | None = None) -> Tensor:
        """Read any tensor as stored, or parts of it."""
        self._stored(name)
        given = [cut for cut in (rows, columns) if cut is not None]
        if given:
            self._check(name, given[:1], columns)
        part: Tensor = self._view(name)[tuple(slice(*cut) for cut in given) or ...]
        return part.to(self._device, copy=True)

    def columns(self, name: str) -> ColumnOrder | None:
        """Return the order of a matrix's columns, if those of `raw` have another one."""
        found = self._find(name)
        if found is None:
            return None
        handle = self._file_of[found][0]
        return handle.columns(found) if isinstance(handle, GgufTensors) else None

    def skip(self, *names: str) -> None:
        for name in names:
            self._unread.pop(self._find(name) or name, None)

    def _check(self, name: str, rows: Sequence[Range], columns: Range | None = None, index: int | None = None) -> None:
        """Refuse what the tensor does not hold."""
        shape = self.shape(name)
        asked = [max((stop for _, stop in rows), default=0)]
        if index is not None:
            asked.insert(0, index + 1)
        if columns is not None:
            asked.append(columns[1])
        exact = columns is not None or index is not None
        if len(shape) < len(asked) or (exact and len(shape) != len(asked)) or any(map(int.__lt__, shape, asked)):
            raise StartupError(
                f"weight {name} has shape {list(shape)}; the config asks for {asked[0]} rows"
                if len(asked) == 1
                else f"weight {name} has shape {list(shape)}; the config asks for {asked} at least"
            )

    def _chunks(self, name: str, dimension: int, start: int, stop: int, unit: int) -> Iterator[Range]:
        """Split [start, stop) into whole units, for a CPU at once."""
        stored = self._stored(name)
        step = max(stop - start, 1)
        if self._device.type != "cpu":
            num_rows = math.prod(stored.shape[: dimension + 1])
            bytes_per_unit = max(unit * (stored.end - stored.begin) // max(num_rows, 1), 1)
            step = max(CHUNK_BYTES // bytes_per_unit, 1) * unit
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def _find(self, name: str) -> str | None:
        """`name` as this checkpoint spells it."""
        if name in self._file_of:
            return name
        prefix = self._base_prefix
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        if other in self._file_of:
            return other
        for new, old in _OLD_SPELLINGS:
            if name.endswith(new):
                return self._find(name.removesuffix(new) + old)
        for new, old in self._spellings:
            if new in name:
                return self._find(name.replace(new, old, 1))
        return None

    def _stored(self, name: str) -> Stored:
        found = self._find(name)
        if found is None:
            raise StartupError(f"weight {name} does not exist")
        return self._file_of[found][2]

    def _slice(self, name: str) -> Any:
        """View floating numbers; codes need their scales."""
        stored = self._stored(name)
        if stored.dtype not in FLOATING:
            raise StartupError(f"weight {name} is stored as {stored.dtype}, in no format that this version serves")
        return self._view(name)

    def _view(self, name: str) -> Any:
        """View the mapped file; cuts must be copied, never kept."""
        found = self._find(name)
        assert found is not None
        handle, path, _ = self._file_of[found]
        self._unread.pop(found, None)
        try:
            return handle.get_slice(found)
        except SafetensorError as error:
            raise StartupError(f"{path} is damaged: {_first_line(error)}") from error


def _opened(path: Path, header: Header, *, mapped: bool) -> Any:
    if path.suffix == SUFFIX:
        return GgufTensors(path, header)
    return safe_open(path, framework="pt", device="cpu") if mapped else UnmappedTensors(path, header)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
