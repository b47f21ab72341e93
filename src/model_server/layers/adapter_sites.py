"""The places of a model that adapters change, and what is in them: adapters come with the model, or while it serves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.factors import EmbeddingFactors
from model_server.adapters.folder import Adapter, Targets
from model_server.adapters.reader import AdapterReader, HeadTable, Product, Table
from model_server.adapters.rows import BASE, AdapterRows, CurrentRows
from model_server.layers.adapted import AdaptedEmbedding, AdaptedLinear, Addition
from model_server.layers.embedding import Embedding
from model_server.layers.linear.linear import Linear


@dataclass(frozen=True, slots=True)
class _Site:
    linear: AdaptedLinear
    product: Product
    head: HeadTable | None


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What one adapter changes on this rank, by the place of the site; `AdapterSites.put` puts it in effect."""

    additions: dict[int, Addition]
    embedding: EmbeddingFactors | None

    @property
    def nbytes(self) -> int:
        own = sum(addition.nbytes for addition in self.additions.values())
        return own + (0 if self.embedding is None else self.embedding.nbytes)


class AdapterSites:
    """Adapters have numbers: those that the model is loaded with their places among `adapters`, further ones the
    numbers from there on. `current` is what all sites read the rows of a step from."""

    def __init__(
        self, targets: Targets, adapters: Sequence[Adapter], dtype: torch.dtype, device: torch.device, *, room: int = 0
    ) -> None:
        """targets: what adapters may change. room: for how many adapters that come later."""
        self.names = tuple(adapter.name for adapter in adapters)
        self.number = len(adapters) + room
        self.current = CurrentRows()
        self._of_expert = CurrentRows()
        self._closed: dict[str, str] = {}
        self._targets = targets
        self._adapters = tuple(adapters)
        self._room = room
        self._dtype = dtype
        self._device = device
        self._sites: list[_Site] = []
        self._table: tuple[AdaptedEmbedding, Table] | None = None

    def linear(self, base: Linear, product: Product, head: HeadTable | None = None) -> Linear:
        """`base`, which computes `product`, as a site if adapters may change it. head: where it is the head."""
        expert = product.expert
        if head is None and expert is None and not any(part.name in self._targets.linear for part in product.parts):
            return base
        touched = {part.name for part in product.parts}
        if expert is not None:
            touched.add(expert.name)
        if head is not None:
            touched |= {head.table.module, head.tied_to or ""}
        if not self._room and not any(touched & {*a.pairs, *a.rows} for a in self._adapters):
            return base
        current = self.current if expert is None else self._of_expert
        linear = AdaptedLinear(base, current, self.number, self._device, self._dtype)
        self._sites.append(_Site(linear, product, head))
        return linear

    def embedding(self, base: Embedding, table: Table) -> Embedding | AdaptedEmbedding:
        """`base` as a site if adapters may change it."""
        if not self._room and not any(table.module in {*a.pairs, *a.rows} for a in self._adapters):
            return base
        self._table = AdaptedEmbedding(base, self.current), table
        return self._table[0]

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that the model is loaded with, by their numbers."""
        return self._adapters

    def numbers_of(self, num_rows: int) -> Tensor | None:
        """[num_rows] int64 of host memory: of the adapter of each row that the running layer has, BASE: none; None: no
        row has one."""
        return None if self.current.rows is None else self.current.rows.numbers_among(num_rows)

    def narrow(self, numbers: Tensor | None) -> None:
        """Which rows the expert has that runs from now on, as `numbers_of` has them; None: none with an adapter."""
        has_any = numbers is not None and bool((numbers != BASE).any())
        self._of_expert.rows = AdapterRows(numbers, numbers, self._device) if has_any and numbers is not None else None

    def close(self, names: Iterable[str], why: str) -> None:
        """Adapters that change one of these modules or parameters are refused. why: what the error says of it."""
        self._closed.update(dict.fromkeys(names, why))

    def load_given(self) -> int:
        """Put the adapters in effect that the model is loaded with; their bytes. Raises StartupError."""
        size = 0
        for number, adapter in enumerate(self._adapters):
            loaded = self.read(adapter)
            self.put(number, loaded)
            size += loaded.nbytes
        return size

    def read(self, adapter: Adapter) -> LoadedAdapter:
        """Read this rank's part of an adapter. May run on any thread, also while a step runs. Raises StartupError."""
        for name in adapter.pairs.keys() & self._closed.keys():
            raise adapter.error(f"{name:.200} {self._closed[name]}")
        with torch.inference_mode(), adapter.open() as opened:
            reader = AdapterReader(adapter, opened, self._dtype, self._device)
            additions: dict[int, Addition] = {}
            for place, site in enumerate(self._sites):
                rows = None if site.head is None else reader.head(site.head)
                addition = site.linear.addition(reader.product(site.product), rows)
                if addition is not None:
                    additions[place] = addition
            return LoadedAdapter(additions, None if self._table is None else reader.embedding(self._table[1]))

    def put(self, number: int, loaded: LoadedAdapter) -> None:
        """From now on rows with that number get this adapter. No row of a running step may have the number."""
        for place, addition in loaded.additions.items():
            self._sites[place].linear.put(number, addition)
        if loaded.embedding is not None and self._table is not None:
            self._table[0].put(number, loaded.embedding)

    def remove(self, number: int) -> None:
        """The number is free again. No row of a running step may have it."""
        for site in self._sites:
            site.linear.remove(number)
        if self._table is not None:
            self._table[0].remove(number)
