"""This rank's part of the matrices of LoRA adapters, one product of the model at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.adapters.folder import Adapter
from model_server.adapters.rows import CurrentRows
from model_server.errors import StartupError
from model_server.weights.matrix import Part
from model_server.weights.reader import Range, SafetensorsReader


@dataclass(frozen=True, slots=True)
class Expansion:
    """One B [stop - start, rank]: of the rows [start, stop) of the outputs, from the inner values at `first` on."""

    start: int
    stop: int
    first: int
    b: Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's matrices for one product. a [inner, in]: of one or several modules that read the same input.

    Both are of the model's type and hold this rank's part; the adapter's scale is in the Bs.
    """

    a: Tensor
    expansions: tuple[Expansion, ...]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + sum(e.b.nbytes for e in self.expansions)

    def add(self, x: Tensor, out: Tensor) -> None:
        """Add its product with x [n, in] to out [n, outputs], which is float32 or of the type of x."""
        inner = F.linear(x, self.a).to(out.dtype)
        for e in self.expansions:
            out[:, e.start : e.stop].addmm_(inner[:, e.first : e.first + e.b.shape[1]], e.b.to(out.dtype).t())


class AdapterReader:
    """Reads the adapters that a model is loaded with. A context manager: their files stay open inside.

    An adapter's number is its place among `adapters`. `current` is what all products read their rows from.
    """

    def __init__(self, adapters: Sequence[Adapter], dtype: torch.dtype, device: torch.device) -> None:
        self.names = tuple(adapter.name for adapter in adapters)
        self.current = CurrentRows()
        self._adapters = tuple(adapters)
        self._dtype = dtype
        self._device = device
        self._readers: list[SafetensorsReader] = []
        self._open = ExitStack()

    def __enter__(self) -> AdapterReader:
        self._readers = [self._open.enter_context(adapter.open()) for adapter in self._adapters]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def columns(self, parts: Sequence[Part], inputs: Range | None = None) -> Mapping[int, Factors]:
        """What each adapter adds to the product of these rows of matrices, by its number, if it adds anything.

        inputs: the columns of this rank; None: all. Their partial sums add up over the ranks as the base model's do.

        Raises StartupError for numbers that are not finite.
        """
        found: dict[int, Factors] = {}
        for number in range(len(self._adapters)):
            modules: list[tuple[Tensor, Tensor, int]] = []
            inner: dict[str, Tensor] = {}
            start = 0
            for part in parts:
                if part.name in self._adapters[number].pairs:
                    if part.name not in inner:
                        inner[part.name] = self._a(number, part.name, inputs)
                    modules.append((inner[part.name], self._b(number, part), start))
                start += part.num_kept
            if modules:
                found[number] = joined(modules)
        return found

    def check_copies(self, module: str, rows: Range, weight: Tensor) -> None:
        """`weight`: these rows of the base model's matrix. Raises StartupError if an adapter brings another one."""
        for adapter, reader in zip(self._adapters, self._readers, strict=True):
            key = adapter.pairs[module].copy if module in adapter.pairs else None
            if key is not None and not torch.equal(self._placed(reader.rows(key, [rows])), weight):
                raise StartupError(
                    f"LoRA adapter `{adapter.name}`: tensor {key:.200} replaces the base model's; only a copy of it is "
                    "served"
                )

    def _a(self, number: int, module: str, inputs: Range | None) -> Tensor:
        pair = self._adapters[number].pairs[module]
        whole = self._finite(number, pair.a, self._readers[number].rows(pair.a, [(0, pair.rank)]))
        return self._placed(whole if inputs is None else whole[:, slice(*inputs)])

    def _b(self, number: int, part: Part) -> Tensor:
        """The scale is multiplied in before the numbers are rounded to the model's type."""
        pair = self._adapters[number].pairs[part.name]
        rows = self._finite(number, pair.b, self._readers[number].rows(pair.b, part.rows))
        return self._placed((rows if part.order is None else part.order.apply(rows)) * pair.scale)

    def _finite(self, number: int, key: str, tensor: Tensor) -> Tensor:
        if not tensor.isfinite().all():
            raise StartupError(
                f"LoRA adapter `{self.names[number]}`: tensor {key:.200} holds numbers that are not finite"
            )
        return tensor

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype).contiguous()


def joined(modules: list[tuple[Tensor, Tensor, int]]) -> Factors:
    """modules: A [rank, in], B [rows, rank] and the first of its rows among the outputs, of each; an A may repeat."""
    matrices: list[Tensor] = []
    expansions: list[Expansion] = []
    first = 0
    for a, b, start in modules:
        if not matrices or a is not matrices[-1]:
            first = sum(m.shape[0] for m in matrices)
            matrices.append(a)
        expansions.append(Expansion(start, start + b.shape[0], first, b))
    return Factors(torch.cat(matrices), tuple(expansions))
