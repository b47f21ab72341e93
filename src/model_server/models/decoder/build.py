"""From a Spec and a checkpoint to a Decoder, in the order of reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.attention.latent import LatentBackend
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.layers.changes import ProductChanges
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.fused import Fused
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.models.adapters.sites import AdapterSites
from model_server.models.decoder.attention.mla import Mla, is_sparse
from model_server.models.decoder.attention.multi_head import load_attention, load_shared_attention
from model_server.models.decoder.blocks import (
    Block,
    NormedBlock,
    ParallelBlock,
    PostNormBlock,
    SequentialBlock,
    SingleBlock,
)
from model_server.models.decoder.cpp_encoder_stack import CppEncoderStack, cpp_encoder_stack
from model_server.models.decoder.cpp_stack import CppStack, cpp_stack
from model_server.models.decoder.decoder import Decoder, Rows
from model_server.models.decoder.experts_beside import ExpertsBesideMlp
from model_server.models.decoder.layer_inputs import extended, load_layer_inputs
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mixers.nothing import Nothing
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.parts import AttentionPart, MixerPart
from model_server.models.decoder.spec import Spec
from model_server.models.decoder.vocabulary import load_vocabulary
from model_server.quantization.kv_cache import CacheScales
from model_server.quantization.scheme import Scheme
from model_server.recurrence.states import StatePool
from model_server.weights.reader import WeightReader


def build(
    spec: Spec,
    reader: WeightReader,
    placement: Placement,
    attention: AttentionBackend,
    *,
    progress: Callable[[int, int], None] | None = None,
    fused: Fused | None = None,
    scheme: Scheme | None = None,
    adapters: AdapterSites | None = None,
    linears: LinearFactory | None = None,
) -> Decoder:
    """Read this rank's part of its stage's layers.

    Args:
        progress: Called with (done, total) after each layer.
        fused: None: the device's own.
        scheme: How weights are quantized, if they are.
        adapters: Loaded with the model.
        linears: None: the fastest products.

    Raises:
        StartupError: The model cannot be divided, or a tensor is missing or of the wrong size.
    """
    device, layout, group = placement.device, placement.ranks.layout, placement.ranks.tensor
    layers = layout.layers(spec.num_layers)
    _check_stage(spec, layers)
    assert spec.block == "single" or not spec.wide_stream, "other blocks add up in the model's type"
    loader = Loader(
        reader,
        device,
        group,
        spec.norm,
        spec.norm_eps,
        spec.norm_offset,
        spec.norm_affine,
        fused_for(device, reader.dtype) if fused is None else fused,
        first_layer=layers.start,
        cache_scales=CacheScales(reader) if placement.cache_dtype is torch.float8_e4m3fn else None,
        scheme=scheme or Scheme(),
        batch_invariant=placement.batch_invariant,
        changes=adapters or ProductChanges(),
        num_drafted=placement.num_drafted,
        chosen_linears=linears,
    )
    embedding, output = load_vocabulary(
        loader, spec, has_input=layout.stage.rank == 0, has_output=layout.has_last_stage
    )
    layer_inputs = load_layer_inputs(loader, spec) if layout.stage.rank == 0 else None
    blocks: list[Block] = []
    mixers: dict[int, MixerPart] = {}
    for index in layers:
        blocks.append(load_block(loader, spec, index, mixers))
        if progress is not None:
            progress(len(blocks), len(layers))
    if adapters is not None:
        loader.weight_bytes += adapters.load_given()
    loader.linears.measure(group)
    if group.rank == 0:
        loader.scheme.report(reader.dtype)
    if loader.cache_scales is not None:
        loader.cache_scales.report()
    shapes = {number: shape for number, mixer in mixers.items() if (shape := mixer.state_shape) is not None}
    return Decoder(
        embedding=embedding,
        blocks=blocks,
        output=output,
        rotaries=tuple(Rotary(rope, device) for rope in loader.ropes),
        attention=attention if spec.attention is None else LatentBackend(attention, is_sparse=is_sparse(spec)),
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        weight_bytes=loader.held_bytes,
        stream=Rows(
            spec.hidden_size,
            spec.layer_input_width or 0,
            spec.num_layers - layers.start,
            len(layers),
            torch.float32 if spec.wide_stream else reader.dtype,
        ),
        stack=_stack(spec, blocks, group.size),
        bidirectional=spec.bidirectional,
        adapters=adapters,
        first_layer=layers.start,
        has_mixers=bool(mixers),
        states=StatePool(shapes, device) if shapes else None,
        layer_inputs=layer_inputs,
        embedded_as=_embedded_as(spec, device) if spec.blank_ids and embedding is not None else None,
    )


def _embedded_as(spec: Spec, device: torch.device) -> Tensor:
    """Return the id whose embedding each id has."""
    ids = torch.arange(spec.vocab_size)
    ids[list(spec.blank_ids)] = spec.blank_id
    return ids.to(device)


def _stack(spec: Spec, blocks: Sequence[Block], world_size: int) -> CppStack | CppEncoderStack | None:
    if spec.mixer_names is not None:
        return None  # a stage of one kind of layers would be computed in another way than the whole model
    stack = cpp_stack(blocks, world_size)
    return cpp_encoder_stack(blocks, world_size) if stack is None and spec.bidirectional else stack


def _check_stage(spec: Spec, layers: range) -> None:
    """Refuse stages whose layers read what another stage has."""
    indexer = spec.attention.indexer if isinstance(spec.attention, Mla) else None
    if indexer is not None and not indexer.is_full(layers.start):
        raise StartupError(
            f"layer {layers.start} of this model reads keys that a layer before it chose, which another stage has: "
            "choose other --stage-layers, or leave out --num-stage"
        )
    for index in layers:
        if spec.owner(index) not in layers:
            raise StartupError(
                f"layer {index} of this model reads the keys of layer {spec.owner(index)}, which another stage has: "
                "choose other --stage-layers, or leave out --num-stage"
            )


def _load_mixer(loader: Loader, spec: Spec, index: int, mixers: dict[int, MixerPart]) -> AttentionPart:
    """Load attention, or what layer `index` has instead, also into `mixers`."""
    mixer = spec.mixer(index)
    if mixer is not None:
        mixers[index - loader.first_layer] = part = mixer.load(loader, spec, index)
        return part
    if spec.owner(index) != index:
        return load_shared_attention(loader, spec, index)
    return load_attention(loader, spec, index) if spec.attention is None else spec.attention.load(loader, spec, index)


def load_block(loader: Loader, spec: Spec, index: int, mixers: dict[int, MixerPart] | None = None) -> Block:
    """Load layer `index`; `mixers` gets what it has instead of attention, by its place among this rank's layers."""
    spec = spec.of_layer(index)
    names = spec.names
    prefix = f"{names.layers}.{index}."

    def norm(name: str | None) -> AddNorm | None:
        return None if name is None else loader.stream_norm(prefix + name, spec.hidden_size, is_wide=spec.wide_stream)

    has_norm = index > 0 or spec.first_norm
    attention_norm = norm(names.attention_norm) if has_norm else None
    attention_post_norm = norm(names.attention_post_norm)
    mlp_spec = spec.mlps[index] if spec.mlps else None
    attention = _load_mixer(loader, spec, index, {} if mixers is None else mixers)
    mlp_norm, mlp_post_norm = norm(names.mlp_norm), norm(names.mlp_post_norm)
    mlp = load_mlp(loader, spec, index) if mlp_spec is None else mlp_spec.load(loader, spec, index)
    reduce = loader.tensor_group.all_reduce
    multiplier = spec.residual_multiplier
    if spec.block == "sequential":
        whole = _as_it_is if isinstance(mlp, ExpertsBesideMlp) else None
        block = SequentialBlock(
            attention, mlp, reduce, attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, multiplier, whole
        )
        return extended(loader, spec, index, block)
    if spec.block == "single":
        return SingleBlock(attention, mlp, reduce, attention_norm, not isinstance(mlp, Nothing))
    if spec.block == "normed":
        assert attention_norm is not None and mlp_norm is not None, "the family has both"
        return NormedBlock(attention, mlp, reduce, attention_norm, mlp_norm, spec.factors[index])
    if spec.block == "parallel":
        return ParallelBlock(attention, mlp, reduce, attention_norm, mlp_norm)
    return PostNormBlock(attention, mlp, reduce, attention_norm, mlp_norm)


def _as_it_is(summed: Tensor) -> Tensor:
    return summed
