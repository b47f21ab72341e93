"""From a Spec and a checkpoint to a Decoder: the parts, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from model_server.attention.backend import AttentionBackend
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.layers.embedding import Embedding, Head, Stem, vocab_range
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.fused import Fused
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.models.decoder.attention import load_attention
from model_server.models.decoder.blocks import Block, ParallelBlock, PostNormBlock, SequentialBlock
from model_server.models.decoder.cpp_stack import cpp_stack
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.spec import Spec
from model_server.quantization.forms import Form, Plain
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import Range, WeightReader


def build(
    spec: Spec,
    reader: WeightReader,
    placement: Placement,
    attention: AttentionBackend,
    *,
    progress: Callable[[int, int], None] | None = None,
    fused: Fused | None = None,
) -> Decoder:
    """Read this rank's part of every tensor. `progress(done, total)` is called after each layer.

    fused: the element-wise operators; None: the device's own.

    Raises StartupError if the model cannot be divided among the ranks or a tensor is missing or of the wrong size.
    """
    device, group = placement.device, placement.group
    loader = Loader(
        reader,
        device,
        group,
        spec.norm,
        spec.norm_eps,
        spec.norm_offset,
        spec.norm_affine,
        fused_for(device, reader.dtype) if fused is None else fused,
    )
    stem, head = _vocabulary(loader, spec)
    names = spec.names
    norm = _norm(loader, spec, names.norm)
    projection = None
    if names.output_projection is not None and loader.has(names.output_projection + ".weight"):
        width = _embedding_width(spec)
        projection = loader.column_linear([Part(names.output_projection, ((0, width),), None)], spec.hidden_size)
    blocks: list[Block] = []
    for index in range(spec.num_layers):
        blocks.append(_block(loader, spec, index))
        if progress is not None:
            progress(index + 1, spec.num_layers)
    loader.linears.measure(group)
    return Decoder(
        stem=stem,
        blocks=blocks,
        norm=norm,
        projection=projection,
        head=head,
        rotaries=tuple(Rotary(rope, device) for rope in loader.ropes),
        attention=attention,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        weight_bytes=loader.weight_bytes,
        stack=cpp_stack(blocks, group.size),
    )


def _vocabulary(loader: Loader, spec: Spec) -> tuple[Stem, Head]:
    """Both ends. A tied head shares the embedding's memory where both hold the same rows."""
    group, names = loader.group, spec.names
    width = _embedding_width(spec)
    start, stop = vocab_range(spec.vocab_size, group)
    embedding = names.embedding
    if spec.tied_head and not loader.has(embedding + ".weight") and loader.has(names.head + ".weight"):
        embedding = names.head  # of two names for one tensor some checkpoints kept the other

    def matrix(name: str, rows: Range) -> Form:
        return loader.matrix(MatrixSlice(parts=(Part(name, (rows,), None),), columns=(0, width), num_columns=width))

    table = matrix(embedding, (start, stop))
    sharded = group.size > 1 and spec.vocab_size % group.size == 0
    rows = (start, stop) if sharded else (0, spec.vocab_size)
    own = not spec.tied_head and loader.has(names.head + ".weight")
    if own:
        form = matrix(names.head, rows)
    elif rows == (start, stop):
        form = table
    else:
        form = matrix(embedding, rows)
    dtype = loader.reader.dtype
    if spec.normalized_head:
        form = Plain(F.normalize(form.dequantize(dtype)))
    bias = loader.rows(names.head + ".bias", [rows]) if loader.has(names.head + ".bias") else None
    head = Head(
        loader.linears.make(form, bias),
        group,
        sharded=sharded,
        multiplier=spec.logits_multiplier,
        softcap=spec.logits_softcap,
    )
    return _stem(loader, spec, Embedding(table.dequantize(dtype), start, group)), head


def _embedding_width(spec: Spec) -> int:
    return spec.hidden_size if spec.embedding_size is None else spec.embedding_size


def _stem(loader: Loader, spec: Spec, embedding: Embedding) -> Stem:
    names = spec.names
    projection = multiplier = None
    table = None
    if names.positions is not None:
        table = loader.whole(names.positions + ".weight")
        if spec.max_positions is not None and len(table) < spec.max_positions + spec.position_offset:
            raise StartupError(
                f"weight {names.positions}.weight has {len(table)} rows; the config asks for "
                f"{spec.max_positions + spec.position_offset}"
            )
    if names.embedding_projection is not None and loader.has(names.embedding_projection + ".weight"):
        part = Part(names.embedding_projection, ((0, spec.hidden_size),), None)
        projection = loader.column_linear([part], _embedding_width(spec))
    if spec.embedding_multiplier != 1.0:
        # Of the weights' dtype, as transformers multiplies: in bfloat16 Gemma's root of the width is a rounded one.
        multiplier = torch.tensor(spec.embedding_multiplier, dtype=embedding.dtype, device=loader.device)
    return Stem(
        embedding,
        multiplier=multiplier,
        projection=projection,
        position_table=table,
        position_offset=spec.position_offset,
        norm=_norm(loader, spec, names.embedding_norm),
    )


def _block(loader: Loader, spec: Spec, index: int) -> Block:
    names = spec.names
    prefix = f"{names.layers}.{index}."

    def norm(name: str | None) -> AddNorm | None:
        return None if name is None else _norm(loader, spec, prefix + name)

    attention_norm, attention_post_norm = norm(names.attention_norm), norm(names.attention_post_norm)
    plan = spec.mlps[index] if spec.mlps else None
    attention = (
        load_attention(loader, spec, index) if spec.attention is None else spec.attention.load(loader, spec, index)
    )
    mlp_norm, mlp_post_norm = norm(names.mlp_norm), norm(names.mlp_post_norm)
    mlp = load_mlp(loader, spec, index) if plan is None else plan.load(loader, spec, index)
    reduce = loader.group.all_reduce
    multiplier = spec.residual_multiplier
    if spec.block == "sequential":
        return SequentialBlock(
            attention, mlp, reduce, attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, multiplier
        )
    if spec.block == "parallel":
        return ParallelBlock(attention, mlp, reduce, attention_norm, mlp_norm)
    return PostNormBlock(attention, mlp, reduce, attention_norm, mlp_norm)


def _norm(loader: Loader, spec: Spec, name: str | None) -> AddNorm | None:
    return None if name is None else loader.norm(name, spec.hidden_size)
