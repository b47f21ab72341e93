"""Where adapters change a model, and what is in effect there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.expert_slots import ExpertShape, ExpertSlots
from model_server.adapters.factors import EmbeddingFactors, pinned
from model_server.adapters.folder import Adapter
from model_server.adapters.product_slots import ProductSlots, SlotSizes
from model_server.adapters.reader import AdapterReader
from model_server.adapters.row_slots import EmbeddingSlots, HeadSlots, RowSizes
from model_server.adapters.rows import BASE, AdapterRows, CurrentRows, RowAdapters
from model_server.adapters.slot_table import SlotTable
from model_server.attention.latent import HeadSizes
from model_server.layers.changes import ExpertChanges, ProductChanges, Shape
from model_server.layers.embedding import Embedding, TokenEmbedding
from model_server.layers.linear.linear import Linear
from model_server.models.adapters.heads import AdaptedHeads
from model_server.models.adapters.linear import AdaptedEmbedding, AdaptedLinear, Addition
from model_server.models.adapters.slotted import SlottedEmbedding, SlottedExperts, SlottedLinear
from model_server.weights.products import HeadTable, Product, Products, Table
from wire.adapters import MAX_NEW_ROWS


@dataclass(frozen=True, slots=True)
class _Site:
    linear: AdaptedLinear | SlottedLinear | SlottedExperts | AdaptedHeads
    # Of a `Linear`.
    product: Product | None = None
    head: HeadTable | None = None

    def read(self, reader: AdapterReader) -> Addition | None:
        if isinstance(self.linear, SlottedExperts | AdaptedHeads):
            return self.linear.read(reader)
        assert self.product is not None
        rows = None if self.head is None else reader.head(self.head)
        factors = reader.product(self.product)
        if isinstance(self.linear, AdaptedLinear):
            return self.linear.addition(factors, rows, reader.memory)
        return self.linear.addition(factors, rows)


_NO_SLOTS = (
    "belongs to experts, for which there are slots only if an adapter of --lora-adapters changes experts; start the "
    "server with this adapter in --lora-adapters, or merge it into the model"
)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What one adapter changes on this rank, by site."""

    additions: dict[int, Addition]
    embedding: EmbeddingFactors | None
    # Memory beside its numbers.
    spare_bytes: int

    @property
    def nbytes(self) -> int:
        own = sum(addition.nbytes for addition in self.additions.values())
        return own + (0 if self.embedding is None else self.embedding.nbytes) + self.spare_bytes


class AdapterSites(ProductChanges):
    """Adapters by number: the model's own first, in order, then later ones. Sites read a step's rows from `current`."""

    def __init__(
        self,
        targets: Products,
        adapters: Sequence[Adapter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        room: int = 0,
        slots: SlotSizes | None = None,
    ) -> None:
        """Prepare the sites.

        Args:
            room: For later adapters.
            slots: Of the device; None: rows use adapters where they were loaded.
        """
        self.names = tuple(adapter.name for adapter in adapters)
        self.number = len(adapters) + room
        self.current = CurrentRows()
        self.of_experts: ExpertChanges = self
        self._of_expert = CurrentRows()
        self._closed: dict[str, str] = {}
        self._targets = targets
        self.adapters = tuple(adapters)  # the model's own, by number
        self._room = room
        self._dtype = dtype
        self._device = device
        self._sites: list[_Site] = []
        of_experts = set(targets.of_experts)
        self._room_for_experts = any(of_experts & a.pairs.keys() for a in self.adapters) and room > 0
        self._table: tuple[AdaptedEmbedding | SlottedEmbedding, Table] | None = None
        self._sizes = slots
        self.slots = None if slots is None else SlotTable(slots.number, self._fill)

    def linear(self, base: Linear, product: Product, head: HeadTable | None = None) -> Linear:
        """Return `base` as a site, if adapters may change it."""
        expert = product.expert
        if head is None and expert is None and not any(part.name in self._targets.linear for part in product.parts):
            return base
        touched = {part.name for part in product.parts}
        if expert is not None:
            touched.add(expert.name)
        if head is not None:
            touched |= {head.table.module, head.tied_to or ""}
        if not self._room and not any(touched & {*a.pairs, *a.rows} for a in self.adapters):
            return base
        linear: AdaptedLinear | SlottedLinear
        if self._sizes is None:
            current = self.current if expert is None else self._of_expert
            linear = AdaptedLinear(base, current, self.number, self._device, self._dtype)
        else:
            linear = self._slotted(base, product, head, self._sizes)
        self._sites.append(_Site(linear, product, head))
        return linear

    def experts(self, products: Sequence[Product | None], shape: Shape) -> ExpertSlots | None:
        site = self._of_all_experts(products, shape)
        return None if site is None else site.slots

    def visited(self, linears: Sequence[Linear], products: Sequence[Product | None], shape: Shape) -> Sequence[Linear]:
        if self._sizes is None:
            pairs = zip(linears, products, strict=True)
            return [base if product is None else self.linear(base, product) for base, product in pairs]
        site = self._of_all_experts(products, shape)
        return linears if site is None else [site.linear(b, self._of_expert, n) for n, b in enumerate(linears)]

    def _of_all_experts(self, wanted: Sequence[Product | None], shape: Shape) -> SlottedExperts | None:
        """Make slots for a product of all experts, if adapters may change it."""
        products = [product for product in wanted if product is not None]
        if len(products) < len(wanted):
            return None
        assert self._sizes is not None
        single = [[part.name for part in product.parts] for product in products]
        fused = {product.expert.name for product in products if product.expert is not None}
        names = {*fused, *(name for some in single for name in some)}
        given = [a.pairs[name] for a in self.adapters for name in names & a.pairs.keys()]
        if not given and not self._room_for_experts:
            if self._room:
                self._closed.update(dict.fromkeys(names, _NO_SLOTS))
            return None
        has_single = bool(self._room) or any(pair.experts is None for pair in given)
        sizes = ExpertShape(
            num_experts=len(products),
            outputs=shape[0],
            inputs=shape[1],
            modules=len(single[0]) if has_single and single[0] else 1,
        )
        affine = any(p.magnitude is not None or p.bias is not None for p in given) or bool(self._room and single[0])
        slots = ExpertSlots(sizes, self._sizes, self._dtype, self._device, affine=affine)
        experts = SlottedExperts(products, slots)
        self._sites.append(_Site(experts))
        return experts

    def heads(self, product: Product, sizes: HeadSizes) -> AdaptedHeads | None:
        (part,) = product.parts
        given = [a.pairs[part.name] for a in self.adapters if part.name in a.pairs]
        if not given and not self._room:
            return None
        affine = self._room > 0 or any(p.magnitude is not None or p.bias is not None for p in given)
        heads = AdaptedHeads(product, sizes, self.current, self._sizes, self._dtype, self._device, affine=affine)
        self._sites.append(_Site(heads))
        return heads

    def embedding(self, base: Embedding, table: Table) -> TokenEmbedding:
        if not self._room and not any(table.module in {*a.pairs, *a.rows} for a in self.adapters):
            return base
        embedding: AdaptedEmbedding | SlottedEmbedding = AdaptedEmbedding(base, self.current)
        if self._sizes is not None:
            vocabulary, width = self._targets.table
            has_rank = self._room or any(table.module in a.pairs for a in self.adapters)
            rows = RowSizes(num_rows=self._new_rows(table.module), rank=self._sizes.rank if has_rank else 0)
            slots = EmbeddingSlots(self._sizes.number, rows, vocabulary, width, self._dtype, self._device)
            embedding = SlottedEmbedding(base, self.current, slots)
        self._table = embedding, table
        return embedding

    def numbers_of(self, num_rows: int) -> Tensor | None:
        return None if self.current.rows is None else self.current.rows.among(num_rows).numbers

    def narrow(self, numbers: Tensor | None) -> None:
        has_any = numbers is not None and bool((numbers != BASE).any())
        rows = RowAdapters(numbers, self._device) if has_any and numbers is not None else None
        self._of_expert.rows = None if rows is None else AdapterRows(rows, rows)

    def slots_of(self, num_rows: int) -> Tensor | None:
        return None if self.current.rows is None else self.current.rows.among(num_rows).slots

    def load_given(self) -> int:
        """Load the model's own adapters, and return their bytes."""
        size = 0
        for number, adapter in enumerate(self.adapters):
            loaded = self.read(adapter)
            self.put(number, loaded)
            size += loaded.nbytes
        return size

    def check(self, adapter: Adapter) -> None:
        """Refuse what there are no slots for."""
        for name in adapter.pairs.keys() & self._closed.keys():
            raise adapter.error(f"{name:.200} {self._closed[name]}")

    def read(self, adapter: Adapter) -> LoadedAdapter:
        """Read this rank's part of an adapter; on any thread, beside steps."""
        self.check(adapter)
        with torch.inference_mode(), adapter.open() as opened:
            place = self._device if self.slots is None else torch.device("cpu")
            reader = AdapterReader(adapter, opened, self._dtype, place)
            additions: dict[int, Addition] = {}
            for number, site in enumerate(self._sites):
                addition = site.read(reader)
                if addition is not None:
                    additions[number] = addition
            embedding = None if self._table is None else reader.embedding(self._table[1])
            if self.slots is not None:
                embedding = pinned(embedding)
            return LoadedAdapter(additions, embedding, reader.memory.spare_bytes)

    def put(self, number: int, loaded: LoadedAdapter) -> None:
        """Put an adapter in effect under a number, which no running step may have."""
        for place, addition in loaded.additions.items():
            self._sites[place].linear.put(number, addition)
        if loaded.embedding is not None and self._table is not None:
            self._table[0].put(number, loaded.embedding)

    def remove(self, number: int) -> None:
        """Free a number, which no running step may have."""
        if self.slots is not None:
            self.slots.forget(number)
        for site in self._sites:
            site.linear.remove(number)
        if self._table is not None:
            self._table[0].remove(number)

    def _fill(self, slot: int, number: int) -> bool:
        """Copy an adapter into a slot; return whether its steps need the host."""
        with torch.inference_mode():
            slotted = (site.linear for site in self._sites if not isinstance(site.linear, AdaptedLinear))
            found = [linear.fill(slot, number) for linear in slotted]
            if self._table is not None and isinstance(self._table[0], SlottedEmbedding):
                found.append(self._table[0].fill(slot, number))
        return any(found)

    def _slotted(self, base: Linear, product: Product, head: HeadTable | None, sizes: SlotSizes) -> SlottedLinear:
        names = {part.name for part in product.parts if part.name in self._targets.linear}
        touched = {name for name in names if self._room or any(name in a.pairs for a in self.adapters)}
        slots = None
        if touched:
            columns = product.columns
            inputs = self._targets.linear[min(touched)][0] if columns is None else columns[1] - columns[0]
            pairs = [a.pairs[name] for a in self.adapters for name in touched if name in a.pairs]
            affine = self._room > 0 or any(p.magnitude is not None or p.bias is not None for p in pairs)
            slots = ProductSlots(product.parts, touched, inputs, sizes, self._dtype, self._device, affine=affine)
        rows = None
        if head is not None:
            count = max(self._new_rows(head.table.module), 0 if head.tied_to is None else self._new_rows(head.tied_to))
            if count:
                rows = HeadSlots(sizes.number, count, self._targets.table[1], self._dtype, self._device)
        return SlottedLinear(base, self.current, slots, rows)

    def _new_rows(self, module: str) -> int:
        found = [a.rows[module] for a in self.adapters if module in a.rows]
        if self._room or any(new.ids is None for new in found):
            return MAX_NEW_ROWS
        return max((len(new.ids or ()) for new in found), default=0)
