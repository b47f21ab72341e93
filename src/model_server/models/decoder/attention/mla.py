"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): all heads read one compressed vector per token.

A head's key is `up_key @ latent` beside a rotated part that all heads share, and its value `up_value @ latent`. Neither
is ever made: `up_key` moves to the query and `up_value` to after the weighted sum, so attention runs between queries of
latent width and what the cache holds: latent and rotated part, once per token and not per head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.errors import StartupError
from model_server.layers.fused.fused import Fused
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import Norm
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.attention.layers import attention_layer
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import HeadOrder, MatrixSlice, Part
from model_server.weights.reader import Range

# Of the norms of both latents, whatever the config says of the others.
_LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Sizes of latent attention, an `AttentionSpec`. query_rank: of the query's own latent; None: it has none.

    The rotation and its storage order are those of Spec, as is the scale.
    """

    query_rank: int | None
    latent_rank: int
    rotated_dim: int
    plain_dim: int  # what of a query or key does not rotate
    value_dim: int

    def cached(self, spec: Spec) -> tuple[int, int, int]:
        """One key for all heads, whose beginning is the value."""
        return 1, self.latent_rank + self.rotated_dim, self.latent_rank

    def load(self, loader: Loader, spec: Spec, index: int) -> LatentAttention:
        """The heads are divided among the ranks, the latents are the same on all."""
        prefix = f"{spec.names.layers}.{index}.self_attn."
        rank, size = loader.tensor_group.rank, loader.tensor_group.size
        if spec.num_heads % size != 0:
            raise StartupError(
                f"`num_heads` must be divisible by `num_shards` (got `num_heads`: {spec.num_heads} "
                f"and `num_shards`: {size}"
            )
        heads = (rank * spec.num_heads // size, (rank + 1) * spec.num_heads // size)
        num_heads = heads[1] - heads[0]
        order = None if spec.rope_pairs_adjacent else HeadOrder(self.rotated_dim, self.rotated_dim)
        up_key, up_value = self._up(loader, prefix, spec.num_heads, heads)
        query_norm = None
        if self.query_rank is not None:
            query_norm = loader.fused.rms_norm(
                loader.rows(prefix + "q_a_layernorm.weight", [(0, self.query_rank)]), _LATENT_EPS
            )
        rope = loader.rope_index(spec.ropes[index])
        if rope is None:
            raise StartupError("latent attention needs a rotation")
        return LatentAttention(
            down=loader.column_linear(self._down_parts(prefix, order), spec.hidden_size),
            query_rank=self.query_rank,
            query_norm=query_norm,
            query=self._query(loader, spec, prefix, heads, order),
            latent_norm=loader.fused.rms_norm(
                loader.rows(prefix + "kv_a_layernorm.weight", [(0, self.latent_rank)]), _LATENT_EPS
            ),
            fused=loader.fused,
            up_key=up_key,
            output=LatentOutput(
                up_value,
                loader.row_linear(
                    prefix + "o_proj", (heads[0] * self.value_dim, heads[1] * self.value_dim), spec.hidden_size
                ),
            ),
            rope=rope,
            layer=dataclasses.replace(
                attention_layer(spec, index), index=index - loader.first_layer, num_heads=num_heads
            ),
        )

    def _down_parts(self, prefix: str, order: HeadOrder | None) -> list[Part]:
        """What reads the hidden state on every rank alike: the query's latent, if any, the latent, the rotated key."""
        rank, total = self.latent_rank, self.latent_rank + self.rotated_dim
        name = prefix + "kv_a_proj_with_mqa"
        parts = [Part(name, ((0, rank),), total), Part(name, ((rank, total),), total, order)]
        if self.query_rank is not None:
            parts.insert(0, Part(prefix + "q_a_proj", ((0, self.query_rank),), self.query_rank))
        return parts

    def _query(self, loader: Loader, spec: Spec, prefix: str, heads: Range, order: HeadOrder | None) -> Linear:
        """Rows: the plain parts of all heads, then their rotated parts."""
        width = self.plain_dim + self.rotated_dim
        name = prefix + ("q_proj" if self.query_rank is None else "q_b_proj")
        starts = [h * width for h in range(*heads)]
        plain = tuple((s, s + self.plain_dim) for s in starts)
        rotated = tuple((s + self.plain_dim, s + width) for s in starts)
        total = spec.num_heads * width
        parts = [Part(name, plain, total), Part(name, rotated, total, order)]
        return loader.column_linear(parts, self.query_rank or spec.hidden_size)

    def _up(self, loader: Loader, prefix: str, num_heads: int, heads: Range) -> tuple[Tensor, Tensor]:
        """up_key [heads, plain_dim, latent_rank] and up_value [heads, latent_rank, value_dim]."""
        width = self.plain_dim + self.value_dim
        part = Part(prefix + "kv_b_proj", ((heads[0] * width, heads[1] * width),), num_heads * width)
        wanted = MatrixSlice(parts=(part,), columns=(0, self.latent_rank), num_columns=self.latent_rank)
        both = loader.decoded(wanted).view(-1, width, self.latent_rank)
        return both[:, : self.plain_dim].contiguous(), both[:, self.plain_dim :].transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class LatentOutput:
    """Weighted sums of latents [n, heads * latent_rank] -> this rank's partial sum [n, hidden]."""

    up_value: Tensor  # [heads, latent_rank, value_dim]
    product: Linear

    def __call__(self, attended: Tensor) -> Tensor:
        heads, rank, _ = self.up_value.shape
        values = torch.bmm(attended.view(-1, heads, rank).transpose(0, 1), self.up_value)
        return self.product(values.transpose(0, 1).flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Latent attention of this rank's heads, an `AttentionPart`."""

    down: Linear  # rows: the query's latent if it has one, the latent, the rotated key
    query_rank: int | None
    query_norm: Norm | None
    query: Linear
    latent_norm: Norm
    fused: Fused
    up_key: Tensor  # [heads, plain_dim, latent_rank]
    output: LatentOutput
    rope: int
    layer: AttentionLayer

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(1, self.layer.head_dim, self.layer.value_dim, value_in_key=True)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """[num_tokens, hidden] -> weighted sums of latents [num_tokens, heads * latent_rank]."""
        layer = self.layer
        rank = layer.value_dim
        down = self.down(hidden)
        if self.query_rank is not None:
            assert self.query_norm is not None
            hidden = self.query_norm(down[:, : self.query_rank])
            down = down[:, self.query_rank :]
        heads, plain_dim, _ = self.up_key.shape
        query = self.query(hidden)
        plain = query[:, : heads * plain_dim].view(-1, heads, plain_dim)
        queries = query.new_empty(len(query), heads, layer.head_dim)
        torch.bmm(plain.transpose(0, 1), self.up_key, out=queries[..., :rank].transpose(0, 1))
        rotated = query[:, heads * plain_dim :]
        rows = step.cache.rows[layer.index]
        keys = self.fused.latent_write(
            down, self.latent_norm, rotated, queries, step.rotations[self.rope], rows, step.slots
        ).unsqueeze(1)
        return step.attention.attend(layer, queries, keys, keys[..., :rank])
