"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): all heads read one compressed vector per token."""

# A head's key is `up_key @ latent` beside a rotated part that all heads share, and its value `up_value @ latent`. The
# cache holds latent and rotated part, once per token and not per head. In decode neither key nor value is made:
# `up_key` moves to the query and `up_value` to after the weighted sum. How prompts are computed: `attention.latent`.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.attention.latent import HeadSizes, LatentHeads, LatentLayer, LatentStep
from model_server.attention.sparse import SparseStep
from model_server.cpp.library import usable
from model_server.errors import StartupError
from model_server.layers.fused.fused import Fused
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import HeadPanels
from model_server.layers.norm import Norm
from model_server.layers.rotary import unrotated
from model_server.layers.temperature import QueryTemperature
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.attention.indexer import Indexer, IndexerSpec
from model_server.models.decoder.attention.layers import attention_layer
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.products import Product, Products
from model_server.weights.reader import Range

# Of the norms of both latents, whatever the config says of the others.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Sizes of latent attention, an `AttentionSpec`; `query_rank` is None without a query's latent."""

    query_rank: int | None
    latent_rank: int
    rotated_dim: int
    plain_dim: int  # what of a query or key does not rotate
    value_dim: int
    indexer: IndexerSpec | None = None  # None: queries attend to all keys

    def products(self, spec: Spec) -> Products:
        queries, latent = spec.num_heads * (self.plain_dim + self.rotated_dim), self.latent_rank + self.rotated_dim
        found = {"kv_a_proj_with_mqa": (spec.hidden_size, latent)}
        if self.query_rank is None:
            found["q_proj"] = spec.hidden_size, queries
        else:
            found |= {"q_a_proj": (spec.hidden_size, self.query_rank), "q_b_proj": (self.query_rank, queries)}
            if self.indexer is not None and all(self.indexer.full):
                found |= self.indexer.products(spec.hidden_size, self.query_rank)
        found["kv_b_proj"] = self.latent_rank, spec.num_heads * (self.plain_dim + self.value_dim)
        found["o_proj"] = spec.num_heads * self.value_dim, spec.hidden_size
        return Products(linear={f"self_attn.{name}": shape for name, shape in found.items()})

    def cached(self, spec: Spec) -> tuple[int, int, int]:
        """Return one key for all heads, which begins with the value."""
        return 1, self.latent_rank + self.rotated_dim, self.latent_rank

    def load(self, loader: Loader, spec: Spec, index: int) -> LatentAttention:
        """Load the heads of this rank, and the latents of all."""
        prefix = f"{spec.names.layers}.{index}.self_attn."
        rank, size = loader.tensor_group.rank, loader.tensor_group.size
        if spec.num_heads % size != 0:
            raise StartupError(
                f"`num_heads` must be divisible by `num_shards` (got `num_heads`: {spec.num_heads} "
                f"and `num_shards`: {size}"
            )
        heads = (rank * spec.num_heads // size, (rank + 1) * spec.num_heads // size)
        query_norm = None
        if self.query_rank is not None:
            query_norm = loader.fused.rms_norm(
                loader.vector(prefix + "q_a_layernorm.weight", [(0, self.query_rank)], self.query_rank), _LATENT_EPS
            )
        rope = loader.rope_index(spec.ropes[index] or unrotated(self.rotated_dim))
        assert rope is not None
        indexer = None
        if self.indexer is not None and self.indexer.is_full(index):
            assert self.query_rank is not None
            indexer = self.indexer.load(
                loader,
                prefix + "indexer.",
                hidden_size=spec.hidden_size,
                query_rank=self.query_rank,
                rotated_dim=self.rotated_dim,
            )
        absorbed = dataclasses.replace(
            attention_layer(spec, index), index=index - loader.first_layer, num_heads=heads[1] - heads[0]
        )
        sizes = {"head_dim": self.plain_dim + self.rotated_dim, "value_dim": self.value_dim}
        constants = {field.name: getattr(absorbed, field.name) for field in dataclasses.fields(AttentionLayer)}
        return LatentAttention(
            down=loader.column_linear(self._down_parts(spec, prefix), spec.hidden_size),
            query_rank=self.query_rank,
            query_norm=query_norm,
            query=self._query(loader, spec, prefix, heads),
            latent_norm=loader.fused.rms_norm(
                loader.vector(prefix + "kv_a_layernorm.weight", [(0, self.latent_rank)], self.latent_rank), _LATENT_EPS
            ),
            fused=loader.fused,
            output=loader.row_linear(
                prefix + "o_proj", (heads[0] * self.value_dim, heads[1] * self.value_dim), spec.hidden_size
            ),
            rope=rope,
            temperature=spec.temperature,
            layer=LatentLayer(
                **constants | sizes, heads=self._up(loader, prefix, spec.num_heads, heads), absorbed=absorbed
            ),
            indexer=indexer,
            top_k=None if self.indexer is None else self.indexer.top_k,
        )

    def _down_parts(self, spec: Spec, prefix: str) -> list[Part]:
        """List what reads hidden states on every rank: query's latent, latent, rotated key."""
        order = None if spec.rope_pairs_adjacent else HeadOrder(self.rotated_dim, self.rotated_dim)
        rank, total = self.latent_rank, self.latent_rank + self.rotated_dim
        name = prefix + "kv_a_proj_with_mqa"
        parts = [Part(name, ((0, rank),), total), Part(name, ((rank, total),), total, order)]
        if self.query_rank is not None:
            parts.insert(0, Part(prefix + "q_a_proj", ((0, self.query_rank),), self.query_rank))
        return parts

    def _query(self, loader: Loader, spec: Spec, prefix: str, heads: Range) -> Linear:
        """Load rows of each head, the rotated part first."""
        width = self.plain_dim + self.rotated_dim
        name = prefix + ("q_proj" if self.query_rank is None else "q_b_proj")
        starts = [h * width for h in range(*heads)]
        rows = tuple(r for s in starts for r in ((s + self.plain_dim, s + width), (s, s + self.plain_dim)))
        order = None if spec.rope_pairs_adjacent else HeadOrder(width, self.rotated_dim)
        part = Part(name, rows, spec.num_heads * width, order)
        return loader.column_linear([part], self.query_rank or spec.hidden_size)

    def _up(self, loader: Loader, prefix: str, num_heads: int, heads: Range) -> LatentHeads:
        width = self.plain_dim + self.value_dim
        part = Part(prefix + "kv_b_proj", ((heads[0] * width, heads[1] * width),), num_heads * width)
        both = self._both(loader, prefix, num_heads, heads, loader.decoded)
        up_value = both[:, self.plain_dim :].transpose(1, 2)

        def again(wanted: MatrixSlice) -> Tensor:
            return loader.read_again(wanted, torch.float32, as_stored=True)

        product = Product(
            parts=(part,),
            columns=None,
            weight=lambda: self._both(loader, prefix, num_heads, heads, again).flatten(0, 1),
        )
        sizes = HeadSizes(
            heads=heads[1] - heads[0], plain=self.plain_dim, value=self.value_dim, latent=self.latent_rank
        )
        changes = loader.changes.heads(product, sizes)
        up_key, up_value = both[:, : self.plain_dim].contiguous(), up_value.contiguous()
        panels = None
        if usable(up_key.device, up_key.dtype) and self.plain_dim % 2 == 0 and self.latent_rank % 2 == 0:
            panels = HeadPanels(up_key.transpose(1, 2)), HeadPanels(up_value.transpose(1, 2))
        return LatentHeads(up_key, up_value, changes, panels)

    def _both(
        self, loader: Loader, prefix: str, num_heads: int, heads: Range, read: Callable[[MatrixSlice], Tensor]
    ) -> Tensor:
        """Read what makes keys and values of latents, [heads, plain_dim + value_dim, latent_rank]."""

        def matrix(name: str, rows: int, columns: int) -> Tensor:
            part = Part(prefix + name, ((heads[0] * rows, heads[1] * rows),), num_heads * rows)
            return read(MatrixSlice(parts=(part,), columns=(0, columns), num_columns=columns)).view(-1, rows, columns)

        rank = self.latent_rank
        if not loader.holds(prefix + "k_b_proj"):
            return matrix("kv_b_proj", self.plain_dim + self.value_dim, rank)
        # As GGUF files have them.
        keys = matrix("k_b_proj", rank, self.plain_dim).transpose(1, 2)
        return torch.cat((keys, matrix("v_b_proj", self.value_dim, rank)), dim=1)


def is_sparse(spec: Spec) -> bool:
    """Whether an indexer chooses keys."""
    return isinstance(spec.attention, Mla) and spec.attention.indexer is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Latent attention of this rank's heads, an `AttentionPart`."""

    down: Linear  # rows: the query's latent if it has one, the latent, the rotated key
    query_rank: int | None
    query_norm: Norm | None
    query: Linear
    latent_norm: Norm
    fused: Fused
    output: Linear
    rope: int
    temperature: QueryTemperature | None
    layer: LatentLayer
    indexer: Indexer | None = None
    top_k: int | None = None  # keys that a query attends to, at most; None: all

    @property
    def kv_shape(self) -> KvShape:
        absorbed, indexer = self.layer.absorbed, self.indexer
        index_dim = 0 if indexer is None else indexer.spec.head_dim
        return KvShape(1, absorbed.head_dim, absorbed.value_dim, value_in_key=True, index_dim=index_dim)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Attend to [num_tokens, heads * value_dim]; single queries are absorbed here."""
        layer, absorbed = self.layer, self.layer.absorbed
        rank, dim = layer.rank, layer.rotated_dim
        down, latents = self.down(hidden), hidden
        if self.query_rank is not None:
            assert self.query_norm is not None
            latents = self.query_norm(down[:, : self.query_rank])
            down = down[:, self.query_rank :]
        sparse = self._chosen(hidden, latents, step)
        query = self.query(latents).view(-1, layer.num_heads, layer.head_dim)
        if self.temperature is not None:
            query.mul_(self.temperature(step.positions))
        rotated = query[..., :dim]
        queries, turned = query, rotated
        is_absorbed = step.is_decode or sparse is not None
        if is_absorbed:
            queries = query.new_empty(len(query), layer.num_heads, absorbed.head_dim)
            layer.heads.absorb(query[..., dim:], queries[..., :rank], layer.heads.rows)
            turned = queries[..., rank:]
        rows = step.cache.rows[layer.index][:, : rank + dim]
        keys = self.fused.latent_write(
            down, self.latent_norm, rotated, turned, step.rotations[self.rope], rows, step.slots
        ).unsqueeze(1)
        attention = sparse or step.attention
        if is_absorbed:
            attended = attention.attend(absorbed, queries, keys, keys[..., :rank])
            return layer.heads.values(attended, layer.heads.rows)
        return attention.attend(layer, queries, keys, keys[..., :rank])

    def _chosen(self, hidden: Tensor, latents: Tensor, step: Step) -> SparseStep | None:
        """Cache the indexer's keys, and choose what queries of more than `top_k` keys read; None: there is none."""
        if self.top_k is None:
            return None
        assert isinstance(step.attention, LatentStep)
        sparse, indexer = step.attention.sparse(self.top_k), self.indexer
        if indexer is None:
            return sparse
        rotations = step.rotations[self.rope]
        rows = step.cache.rows[self.layer.index][:, -indexer.spec.head_dim :]
        indexer.write(hidden, rotations, rows, step.slots)
        if sparse is not None:
            indexer.choose(hidden, latents, rotations, rows, sparse)
        return sparse
