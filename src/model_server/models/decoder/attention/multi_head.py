"""Grouped-query attention, and how heads are read from every packing of q, k and v."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.backend import AttentionLayer
from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.fused.fused import Fused, HeadLayout
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import Norm, WideRmsNorm
from model_server.layers.rotary import rotate_
from model_server.layers.temperature import QueryTemperature
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.attention.layers import attention_layer
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import HeadOrder, Part
from model_server.weights.reader import Range


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention of this rank's heads."""

    qkv: Linear  # rows: all query heads, all key heads, all value heads
    output: Linear
    layer: AttentionLayer
    fused: Fused
    heads: HeadLayout
    rope: int | None  # which of the step's rotations
    qk_norm: Norm | None = None  # over [num_tokens, num_heads + num_kv_heads, head_dim]
    clip: float | None = None
    temperature: QueryTemperature | None = None
    gate: Linear | None = None  # of what the heads give
    value_norm: Norm | None = None  # over [num_tokens, num_kv_heads, head_dim]
    is_shared: bool = False  # later layers read its keys and values

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(self.layer.num_kv_heads, self.layer.head_dim, self.layer.value_dim)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Attend to [num_tokens, num_heads * head_dim], before the output product."""
        layer = self.layer
        qkv = self.qkv(hidden)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        if self.value_norm is not None:
            values = qkv[:, (layer.num_heads + layer.num_kv_heads) * layer.head_dim :]
            values = values.view(-1, layer.num_kv_heads, layer.head_dim)
            values.copy_(self.value_norm(values))
        rotations = None if self.rope is None else step.rotations[self.rope]
        self.fused.rotate_write(qkv, self.heads, self.qk_norm, rotations, step.cache.rows[layer.index], step.slots)
        num_heads, num_rotated = layer.num_heads, layer.num_heads + layer.num_kv_heads
        heads = qkv.view(hidden.shape[0], num_rotated + layer.num_kv_heads, layer.head_dim)
        query = heads[:, :num_heads]
        if self.temperature is not None:
            query.mul_(self.temperature(step.positions))
        key, value = heads[:, num_heads:num_rotated], heads[:, num_rotated:]
        if self.is_shared:
            step.shared[layer.index] = key, value
        found = step.attention.attend(layer, query, key, value)
        return found if self.gate is None else found.mul_(torch.sigmoid(self.gate(hidden)))


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Grouped-query attention of this rank's query heads on the keys and values of a layer before it."""

    query: Linear
    output: Linear
    layer: AttentionLayer  # its index is that of the layer that stores the keys
    norm: Norm | None  # over [num_tokens, num_heads, head_dim]
    rope: int | None  # which of the step's rotations

    @property
    def kv_shape(self) -> KvShape:
        """Return a shape of no numbers."""
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Attend to [num_tokens, num_heads * head_dim], before the output product."""
        layer = self.layer
        query = self.query(hidden).view(-1, layer.num_heads, layer.head_dim)
        if self.norm is not None:
            query = self.norm(query)
        if self.rope is not None:
            rotate_(query, step.rotations[self.rope].gathered)
        return step.attention.attend(layer, query, *step.shared[layer.index])


def head_ranges(spec: Spec, tensor_group: ProcessGroup) -> tuple[Range, Range]:
    """Return this rank's query and KV heads; of fewer KV heads than ranks r * num_kv_heads // size."""
    # TGI refuses all KV heads except one there; its words are kept for what cannot be divided.
    size, rank = tensor_group.size, tensor_group.rank
    for name, count in (("num_heads", spec.num_heads), ("num_key_value_heads", spec.num_kv_heads)):
        if count % size != 0 and (name == "num_heads" or size % count != 0):
            raise StartupError(
                f"`{name}` must be divisible by `num_shards` (got `{name}`: {count} and `num_shards`: {size}"
            )
    queries = spec.num_heads // size
    first = rank * spec.num_kv_heads // size
    return (rank * queries, (rank + 1) * queries), (first, first + max(spec.num_kv_heads // size, 1))


def load_attention(
    loader: Loader, spec: Spec, index: int, *, prefix: str | None = None, input_size: int | None = None
) -> Attention:
    """Load this rank's heads of layer `index`.

    Args:
        spec: Of the layer.
        prefix: Of names; None: as of all layers.
        input_size: None: the hidden size.
    """
    names, dim = spec.names, spec.head_dim
    prefix = f"{names.layers}.{index}." if prefix is None else prefix
    queries, keys = head_ranges(spec, loader.tensor_group)
    rope = spec.ropes[index]
    scales = loader.cache_scales
    module = (prefix + names.output).rpartition(".")[0]
    key_scale, value_scale = (1.0, 1.0) if scales is None else scales.of(module)
    order = HeadOrder(dim, rope.dim) if rope is not None and not spec.rope_pairs_adjacent else None
    layer = dataclasses.replace(
        attention_layer(spec, index),
        index=index - loader.first_layer,
        num_heads=queries[1] - queries[0],
        num_kv_heads=keys[1] - keys[0],
        alibi=None if spec.alibi is None else loader.alibi(spec.alibi[slice(*queries)], spec.alibi_bfloat16_scale),
        sinks=_sinks(loader, spec, prefix, queries),
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return Attention(
        qkv=loader.column_linear(
            qkv_parts(spec, prefix, queries, keys, order),
            spec.hidden_size if input_size is None else input_size,
            transposed=spec.transposed,
        ),
        output=loader.row_linear(
            prefix + names.output, (queries[0] * dim, queries[1] * dim), spec.hidden_size, transposed=spec.transposed
        ),
        layer=layer,
        fused=loader.fused,
        heads=HeadLayout(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=dim,
            rotary_dim=0 if rope is None else rope.dim,
            key_scale=key_scale,
            value_scale=value_scale,
        ),
        rope=loader.rope_index(rope),
        qk_norm=qk_norm(loader, spec, prefix, queries, keys, order),
        clip=spec.qkv_clip,
        temperature=spec.temperature,
        gate=_gate(loader, spec, prefix, queries) if spec.gated_attention else None,
        value_norm=loader.fused.rms_norm(torch.ones(dim, device=loader.device), spec.norm_eps)
        if spec.value_norm
        else None,
        is_shared=index in spec.kv_from,
    )


def load_shared_attention(loader: Loader, spec: Spec, index: int) -> SharedAttention:
    """Load this rank's query heads of layer `index`, whose sizes `spec` has."""
    owner = spec.owner(index)
    names, dim, rope = spec.names, spec.head_dim, spec.ropes[index]
    prefix = f"{names.layers}.{index}."
    queries, keys = head_ranges(spec, loader.tensor_group)
    rows = (queries[0] * dim, queries[1] * dim)
    order = HeadOrder(dim, rope.dim) if rope is not None and not spec.rope_pairs_adjacent else None
    scales = loader.cache_scales
    # As the layer that stores them has them.
    module = f"{names.layers}.{owner}.{names.output}".rpartition(".")[0]
    key_scale, value_scale = (1.0, 1.0) if scales is None else scales.of(module)
    norm = None
    if loader.has(f"{prefix}{names.q_norm}.weight"):
        weight = loader.vector(f"{prefix}{names.q_norm}.weight", [(0, dim)], dim)
        weight = weight if order is None else order.apply(weight)
        norm = loader.norm_of(weight.expand(queries[1] - queries[0], -1), None)
    return SharedAttention(
        query=loader.column_linear(
            [Part(prefix + names.qkv[0], (rows,), spec.num_heads * dim, order)], spec.hidden_size
        ),
        output=loader.row_linear(prefix + names.output, rows, spec.hidden_size),
        layer=dataclasses.replace(
            attention_layer(spec, index),
            index=owner - loader.first_layer,
            num_heads=queries[1] - queries[0],
            num_kv_heads=keys[1] - keys[0],
            key_scale=key_scale,
            value_scale=value_scale,
        ),
        norm=norm,
        rope=loader.rope_index(rope),
    )


def _gate(loader: Loader, spec: Spec, prefix: str, queries: Range) -> Linear:
    """Load the gates, behind each head's query in their matrix."""
    dim = spec.head_dim
    rows = tuple(((2 * head + 1) * dim, (2 * head + 2) * dim) for head in range(*queries))
    part = Part(prefix + spec.names.qkv[0], rows, 2 * spec.num_heads * dim)
    return loader.column_linear([part], spec.hidden_size, transposed=spec.transposed)


def qkv_parts(spec: Spec, prefix: str, queries: Range, keys: Range, order: HeadOrder | None) -> list[Part]:
    """Return where this rank's heads are in the file."""
    names, dim = [prefix + n for n in spec.names.qkv], spec.head_dim
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads

    def rows(first: int, last: int) -> Range:
        return first * dim, last * dim

    if len(names) == 3:
        query: tuple[Range, ...] = (rows(*queries),)
        if spec.gated_attention:
            query = tuple(rows(2 * head, 2 * head + 1) for head in range(*queries))
        return [
            Part(names[0], query, (1 + spec.gated_attention) * num_heads * dim, order),
            Part(names[1], (rows(*keys),), num_kv_heads * dim, order),
            Part(names[2], (rows(*keys),), num_kv_heads * dim),
        ]
    if len(names) == 2:
        split, both = num_kv_heads, 2 * num_kv_heads * dim
        return [
            Part(names[0], (rows(*queries),), num_heads * dim, order),
            Part(names[1], (rows(*keys),), both, order),
            Part(names[1], (rows(split + keys[0], split + keys[1]),), both),
        ]
    (name,) = names
    total = (num_heads + 2 * num_kv_heads) * dim
    if spec.packing == "stacked":
        query_rows = (rows(*queries),)
        key_rows, value_rows = (
            (rows(base + keys[0], base + keys[1]),) for base in (num_heads, num_heads + num_kv_heads)
        )
        return [Part(name, query_rows, total, order), Part(name, key_rows, total, order), Part(name, value_rows, total)]
    group = num_heads // num_kv_heads
    places = [(h // group) * (group + 2) + h % group for h in range(*queries)]
    key_places = [k * (group + 2) + group for k in range(*keys)]
    return [
        Part(name, tuple(rows(p, p + 1) for p in places), total, order),
        Part(name, tuple(rows(p, p + 1) for p in key_places), total, order),
        Part(name, tuple(rows(p + 1, p + 2) for p in key_places), total),
    ]


def _sinks(loader: Loader, spec: Spec, prefix: str, queries: Range) -> Tensor | None:
    name = spec.names.sinks
    if name is None or not loader.has(prefix + name):
        return None
    return loader.vector(prefix + name, [queries], spec.num_heads).float()


def qk_norm(
    loader: Loader, spec: Spec, prefix: str, queries: Range, keys: Range, order: HeadOrder | None
) -> Norm | None:
    """Load the norm of query and key heads, of the kind that the weight's shape says."""
    # [head_dim]: one weight for all heads; [num_heads, head_dim]: one per head; [num_heads * head_dim]: one norm over
    # all heads. StableLM keeps a tensor per head.
    names = [prefix + spec.names.q_norm, prefix + spec.names.k_norm]
    dim = spec.head_dim
    ranges = (queries, keys)
    if loader.has(names[0] + ".norms.0.weight"):
        for name, count in zip(names, (spec.num_heads, spec.num_kv_heads), strict=True):
            loader.reader.skip(*(f"{name}.norms.{h}.weight" for h in range(count)))  # other ranks read the others
        weights = [
            torch.cat([loader.whole(f"{name}.norms.{h}.weight") for h in range(*heads)]).view(-1, dim)
            for name, heads in zip(names, ranges, strict=True)
        ]
        return loader.norm_of(_ordered(torch.cat(weights), order), None)
    if not loader.has(names[0] + ".weight"):
        return None
    shape = loader.reader.shape(names[0] + ".weight")
    wide = shape == (spec.num_heads * dim,) and spec.num_heads > 1

    def per_head(kind: str) -> Tensor:
        tensors = []
        for name, heads, count in zip(names, ranges, (spec.num_heads, spec.num_kv_heads), strict=True):
            if wide:
                rows = (heads[0] * dim, heads[1] * dim)
                tensor = loader.vector(f"{name}.{kind}", [rows], count * dim).view(-1, dim)
            elif len(shape) == 2:
                tensor = loader.rows(f"{name}.{kind}", [heads], dim, count)
            else:
                tensor = loader.vector(f"{name}.{kind}", [(0, dim)], dim).expand(heads[1] - heads[0], -1)
            tensors.append(tensor)
        return _ordered(torch.cat(tensors), order)

    if wide:
        if spec.norm != "rms" or spec.norm_offset:
            raise StartupError(f"weight {names[0]}.weight: a norm over all heads is served as a plain RMS norm only")
        return WideRmsNorm(per_head("weight"), queries[1] - queries[0], spec.norm_eps, loader.tensor_group)
    return loader.norm_of(per_head("weight"), per_head("bias") if loader.has_norm_bias(names[0]) else None)


def _ordered(heads: Tensor, order: HeadOrder | None) -> Tensor:
    """Reorder `heads` [num_heads, head_dim] by rotated pairs."""
    return heads if order is None else order.apply(heads.reshape(-1)).view(heads.shape)
