"""All blocks of an encoder in one C++ call, if every one is of BERT's or ModernBERT's kind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from model_server.attention.cpp import CppStep, serves, shape_struct
from model_server.attention.two_ways import TwoWays
from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import (
    EncoderConfigStruct,
    EncoderLayerStruct,
    EncoderMatrixStruct,
    EncoderNormStruct,
    EncoderStepStruct,
    PagingStruct,
)
from model_server.layers.activation import Activation, Gated, gelu_tanh
from model_server.layers.fused.cpp import CppSiluGated
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear, whole_panels
from model_server.layers.norm import AddNorm, LayerNorm
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.attention.multi_head import Attention
from model_server.models.decoder.blocks import Block, PostNormBlock, SequentialBlock
from model_server.models.decoder.mlp import DenseMlp
from model_server.models.decoder.parts import Step

# By their numbers in encoder_stack.hpp.
_ACTIVATIONS: tuple[Activation, ...] = (F.gelu, gelu_tanh, F.silu, F.relu)


class CppEncoderStack:
    """Blocks as `source/encoder_stack.hpp` runs them, which must outlive it."""

    def __init__(self, layers: Sequence[_Layer], kind: _Kind) -> None:
        # In the order of pagings, behind that of layers without a window.
        self._windows = sorted({layer.window for layer in layers if layer.window is not None})
        self._layers = layers  # keeps what the addresses below point to
        self._structs = (EncoderLayerStruct * len(layers))(*[layer.struct(self._paging(layer)) for layer in layers])
        self._config = EncoderConfigStruct(
            num_layers=len(layers),
            hidden=layers[0].output.outputs,
            intermediate=layers[0].down.inputs,
            norms_after=kind.norms_after,
            gated=kind.gated,
            activation=kind.activation,
            eps=kind.eps,
            layers=self._structs,
        )
        self._caches = (ctypes.c_void_p * len(layers))()
        self._cache: KvCache | None = None

    def _paging(self, layer: _Layer) -> int:
        return 0 if layer.window is None else 1 + self._windows.index(layer.window)

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None, adapters: object = None) -> Tensor:
        """Run hidden [num_tokens, hidden], overwritten, to the rows kept."""
        assert adapters is None, "encoders have none"
        if step.cache is not self._cache:
            self._cache = step.cache
            self._caches[:] = [rows.data_ptr() for rows in step.cache.rows[: len(self._layers)]]
        gathered = [r.gathered for r in step.rotations]
        steps = self._steps(step)
        assert steps is not None
        struct = EncoderStepStruct(
            tokens=hidden.shape[0],
            num_pagings=len(steps),
            hidden=hidden.data_ptr(),
            rotations=(ctypes.c_void_p * max(1, len(gathered)))(*[t.data_ptr() for t in gathered]),
            slots=step.slots.data_ptr(),
            caches=self._caches,
            pagings=(PagingStruct * len(steps))(*[one.paging for one in steps]),
        )
        prepared().cpp_encoder_stack(TYPES[hidden.dtype], self._config, struct)
        return hidden if kept_rows is None else hidden.index_select(0, kept_rows)

    def takes(self, step: Step, hidden: Tensor) -> bool:
        """Whether it can run this step: attention in C++, and a cache of the activations' type."""
        return self._steps(step) is not None and step.cache.rows[0].dtype == hidden.dtype and hidden.is_contiguous()

    def _steps(self, step: Step) -> list[CppStep] | None:
        """Return attention's steps in the order of pagings."""
        attention = step.attention
        if isinstance(attention, TwoWays):
            found = [attention.whole, *[attention.windows[window] for window in self._windows]]
        else:
            found = [] if self._windows else [attention]
        known = [one for one in found if isinstance(one, CppStep)]
        return known if len(known) == len(found) > 0 else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all blocks of a stack have in common."""

    norms_after: bool
    gated: bool
    activation: int
    eps: float


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm's numbers in float32; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def struct(self) -> EncoderNormStruct:
        return EncoderNormStruct(
            weight=None if self.weight is None else self.weight.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention
    attention_norm: _Norm
    mlp_norm: _Norm
    qkv: PackedLinear
    output: PackedLinear
    up: PackedLinear
    down: PackedLinear

    @property
    def window(self) -> int | None:
        return self.attention.layer.window

    def struct(self, paging: int) -> EncoderLayerStruct:
        struct = EncoderLayerStruct(
            attention_norm=self.attention_norm.struct(),
            mlp_norm=self.mlp_norm.struct(),
            rope=-1 if self.attention.rope is None else self.attention.rope,
            rotary=self.attention.heads.rotary_dim,
            paging=paging,
            attention=shape_struct(self.attention.layer, self.attention.kv_shape),
        )
        for name in ("qkv", "output", "up", "down"):
            setattr(struct, name, _matrix_struct(getattr(self, name)))
        return struct


def cpp_encoder_stack(blocks: Sequence[Block], world_size: int) -> CppEncoderStack | None:
    """Return the blocks as one stack, if all are alike, with packed matrices and layer norms of one eps."""
    found = [_layer(block) for block in blocks] if world_size == 1 else []
    known = [one for one in found if one is not None]
    if len(known) < len(blocks) or len({kind for kind, _ in known}) != 1:
        return None
    return CppEncoderStack([layer for _, layer in known], known[0][0])


def _layer(block: Block) -> tuple[_Kind, _Layer] | None:
    """Return what the C++ code needs of a block, or None if it does not know it."""
    attention, mlp = block.attention, block.mlp
    if not isinstance(block, PostNormBlock | SequentialBlock) or not _is_plain(block):
        return None
    if not isinstance(attention, Attention) or not isinstance(mlp, DenseMlp) or not _knows(attention):
        return None
    norms_after, activation = isinstance(block, PostNormBlock), _activation(mlp.activation)
    matrices = [_packed(linear) for linear in (attention.qkv, attention.output, mlp.up, mlp.down)]
    qkv, output, up, down = matrices
    if activation is None or qkv is None or output is None or up is None or down is None:
        return None
    norms = [_norm(norm) for norm in (block.attention_norm, block.mlp_norm)]
    attention_norm, mlp_norm = norms
    if attention_norm is None or mlp_norm is None or mlp_norm.weight is None or not whole_panels(down.inputs):
        return None
    if norms_after and attention_norm.weight is None:
        return None
    eps = {norm.eps for norm in (block.attention_norm, block.mlp_norm) if isinstance(norm, LayerNorm)}
    if len(eps) != 1:
        return None
    kind = _Kind(norms_after, up.outputs != down.inputs, activation, eps.pop())
    return kind, _Layer(attention, attention_norm, mlp_norm, qkv, output, up, down)


def _is_plain(block: PostNormBlock | SequentialBlock) -> bool:
    if isinstance(block, PostNormBlock):
        return True
    return block.multiplier == 1.0 and block.attention_post_norm is None and block.mlp_post_norm is None


def _knows(attention: Attention) -> bool:
    extras = (attention.qk_norm, attention.clip, attention.temperature, attention.gate, attention.value_norm)
    plain = all(extra is None for extra in extras) and attention.layer.value_scale == 1.0
    return plain and serves(attention.layer, attention.kv_shape)


def _activation(function: Activation) -> int | None:
    if isinstance(function, CppSiluGated):
        function = F.silu
    elif isinstance(function, Gated):
        function = function.function
    return next((number for number, known in enumerate(_ACTIVATIONS) if known is function), None)


def _norm(norm: AddNorm | None) -> _Norm | None:
    """Return the norm's numbers; None: it is of a kind that the C++ code does not know."""
    if norm is None:
        return _Norm()
    if not isinstance(norm, LayerNorm) or norm.weight is None or norm.weight.dim() != 1:
        return None
    return _Norm(norm.weight.float().contiguous(), None if norm.bias is None else norm.bias.float().contiguous())


def _packed(linear: Linear) -> PackedLinear | None:
    return linear if isinstance(linear, PackedLinear) else None


def _matrix_struct(matrix: PackedLinear) -> EncoderMatrixStruct:
    bias = None if matrix.bias is None else matrix.bias.data_ptr()
    return EncoderMatrixStruct(panels=matrix.panels.data_ptr(), bias=bias, outputs=matrix.outputs, inputs=matrix.inputs)
