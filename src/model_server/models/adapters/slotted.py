"""Products and an embedding with LoRA adapters in slots, copied there from host memory when rows need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model_server.adapters.expert_slots import ExpertFactors, ExpertSlots
from model_server.adapters.factors import EmbeddingFactors, Factors, HeadRows, pinned
from model_server.adapters.product_slots import ProductSlots
from model_server.adapters.reader import AdapterReader
from model_server.adapters.row_slots import EmbeddingSlots, HeadSlots
from model_server.adapters.rows import CurrentRows
from model_server.layers.embedding import Embedding
from model_server.layers.linear.linear import Linear
from model_server.models.adapters.linear import Adapted, AdaptedEmbedding, Addition
from model_server.weights.products import Product


class OnHost:
    """What adapters add, by number, in host memory until it is copied into a slot."""

    __slots__ = ("_on_host",)

    def __init__(self) -> None:
        self._on_host: dict[int, Any] = {}

    def put(self, number: int, added: Any) -> None:
        """Offer a number's adapter to slots."""
        self._on_host[number] = added

    def remove(self, number: int) -> None:
        self._on_host.pop(number, None)


class SlottedLinear(OnHost, Adapted):
    """A product with adapters in slots."""

    __slots__ = ("_current", "_head", "_head_rows", "_slots", "base")

    def __init__(
        self, base: Linear, current: CurrentRows, slots: ProductSlots | None, head: HeadSlots | None = None
    ) -> None:
        """Wrap `base`.

        Args:
            current: The rows of the running step.
            slots: None: adapters have no matrices for it.
            head: Where they replace rows of the head.
        """
        super().__init__()
        self.base = base
        self._current = current
        self._slots = slots
        self._head = head
        self._head_rows: dict[int, HeadRows] = {}

    def addition(self, factors: Factors | None, rows: HeadRows | None = None) -> Addition | None:
        """Pin what `put` takes; None: no change."""
        if factors is None and rows is None:
            return None
        return Addition(pinned(factors), pinned(rows))

    def fill(self, slot: int, number: int) -> bool:
        """Copy an adapter into a slot, in the device's order; return whether it has rows of a head."""
        addition: Addition | None = self._on_host.get(number)
        if self._slots is not None:
            factors = None if addition is None else addition.factors
            assert factors is None or isinstance(factors, Factors)
            self._slots.write(slot, factors)
        self._head_rows.pop(slot, None)
        if addition is None or addition.rows is None:
            return False
        assert self._head is not None
        self._head_rows[slot] = self._head.write(slot, addition.rows)
        return True

    def adapt(self, x: Tensor, out: Tensor) -> Tensor:
        rows = self._current.rows
        if rows is None:
            return out
        if self._head_rows:
            for slot, index in rows.among(x.shape[0]).groups:
                if slot in self._head_rows:
                    self._head_rows[slot].replace(x, out, index)
        if self._slots is not None:
            self._slots.add(rows, x, out)
        return out


class SlottedExperts(OnHost):
    """Adapters in slots for a product of all experts of a layer."""

    __slots__ = ("_products", "slots")

    def __init__(self, products: Sequence[Product], slots: ExpertSlots) -> None:
        """products: of each expert."""
        super().__init__()
        self._products = tuple(products)
        self.slots = slots

    def read(self, reader: AdapterReader) -> Addition | None:
        """Read what an adapter adds, for `put`, if anything."""
        found = self.slots.shape.factors([reader.product(product) for product in self._products])
        if found is None:
            return None
        return Addition(pinned(found))

    def fill(self, slot: int, number: int) -> bool:
        """Copy an adapter into a slot, in the device's order; its steps do not need the host."""
        addition: Addition | None = self._on_host.get(number)
        factors = None if addition is None else addition.factors
        assert factors is None or isinstance(factors, ExpertFactors)
        self.slots.write(slot, factors)
        return False

    def linear(self, base: Linear, current: CurrentRows, expert: int) -> SlottedExpert:
        """Return the product of one expert, for experts computed one by one."""
        return SlottedExpert(base, current, self.slots, expert)


@dataclass(frozen=True, slots=True)
class SlottedExpert(Adapted):
    """The product of one expert."""

    base: Linear
    current: CurrentRows
    slots: ExpertSlots
    expert: int

    def adapt(self, x: Tensor, out: Tensor) -> Tensor:
        if self.current.rows is not None:
            self.slots.add(self.current.rows, self.expert, x, out)
        return out


class SlottedEmbedding(OnHost):
    """An embedding whose rows adapters in slots change."""

    __slots__ = ("_adapted", "_slots")

    def __init__(self, base: Embedding, current: CurrentRows, slots: EmbeddingSlots) -> None:
        super().__init__()
        self._adapted = AdaptedEmbedding(base, current)
        self._slots = slots

    def __call__(self, ids: Tensor) -> Tensor:
        return self._adapted(ids)

    def fill(self, slot: int, number: int) -> bool:
        """Copy an adapter into a slot, in the device's order; return whether it changes anything."""
        self._adapted.remove(slot)
        factors: EmbeddingFactors | None = self._on_host.get(number)
        if factors is None:
            return False
        self._adapted.put(slot, self._slots.write(slot, factors))
        return True
