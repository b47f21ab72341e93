"""What changes a model's products for some rows of a step; each product is shown to it as it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from model_server.attention.latent import HeadChanges, HeadSizes
from model_server.layers.embedding import Embedding, TokenEmbedding
from model_server.layers.linear.linear import Linear
from model_server.weights.products import HeadTable, Product, Table

Shape = tuple[int, int]


class AddedMatrices(Protocol):
    """Factors of what is added to a product of all experts, by slot."""

    a: Tensor  # [slots, experts, modules, rank, in]
    b: Tensor  # [slots, experts, outputs, rank]
    affine: Tensor | None  # [slots, experts, 2, outputs] float32 multiplies, then adds


class ExpertChanges(Protocol):
    """Changes of products of experts."""

    def experts(self, products: Sequence[Product | None], shape: Shape) -> AddedMatrices | None:
        """Return what is added to a product [outputs, inputs] of all experts, if anything ever is."""

    def slots_of(self, num_rows: int) -> Tensor | None:
        """Return each row's slot in the running layer, [num_rows] int32 on the device; None without any."""

    def visited(self, linears: Sequence[Linear], products: Sequence[Product | None], shape: Shape) -> Sequence[Linear]:
        """Return the product of each expert, computed one by one, changed for the rows of `narrow`."""

    def numbers_of(self, num_rows: int) -> Tensor | None:
        """Return each row's number in the running layer, [num_rows] int64 on the host; None without any."""

    def narrow(self, numbers: Tensor | None) -> None:
        """Set the rows of the expert that runs, as `numbers_of` has them."""


class ProductChanges:
    """Changes of all products: there are none."""

    of_experts: ExpertChanges | None = None

    def linear(self, base: Linear, product: Product, head: HeadTable | None = None) -> Linear:
        """Return `base`, changed; `head`: where it is the head."""
        return base

    def heads(self, product: Product, sizes: HeadSizes) -> HeadChanges | None:
        """Return what changes keys and values of latents, if anything ever does."""
        return None

    def embedding(self, base: Embedding, table: Table) -> TokenEmbedding:
        """Return `base`, changed."""
        return base
