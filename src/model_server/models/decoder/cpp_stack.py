"""All blocks of a decoder in one C++ call, if every one is of Llama's kind.

Both ways use the same packed matrices and norms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model_server.adapters.panels import AdapterPanels
from model_server.adapters.rows import AdapterRows
from model_server.attention.cpp import CppStep, serves, shape_struct
from model_server.cpp.library import TYPES, prepared
from model_server.cpp.structs import (
    AdapterFactorsStruct,
    StackConfigStruct,
    StackLayerStruct,
    StackMatrixStruct,
    StackStepStruct,
)
from model_server.layers.adapted import AdaptedLinear, base_of
from model_server.layers.fused.cpp import CppRmsNorm, CppSiluGated
from model_server.layers.linear.code_panels import CodeLinear
from model_server.layers.linear.dequantizing import SplitLinear
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear, whole_panels
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.attention.multi_head import Attention
from model_server.models.decoder.blocks import Block, SequentialBlock
from model_server.models.decoder.mlp import DenseMlp
from model_server.models.decoder.parts import Step


class CppStack:
    """Blocks as `source/stack.hpp` runs them, which must outlive it."""

    def __init__(self, layers: Sequence[_Layer], first_layer: int = 0) -> None:
        self._cached = slice(first_layer, first_layer + len(layers))
        self._layers = layers  # keeps what the addresses below point to
        first = layers[0]
        self._structs = (StackLayerStruct * len(layers))(*[layer.struct() for layer in layers])
        self._config = StackConfigStruct(
            num_layers=len(layers),
            hidden=first.output.outputs,
            intermediate=first.down.inputs,
            eps=first.mlp_norm.eps,
            qk_eps=next((layer.qk_norm.eps for layer in layers if layer.qk_norm is not None), 0.0),
            layers=self._structs,
        )
        self._caches = (ctypes.c_void_p * len(layers))()
        self._cache: KvCache | None = None

    def __call__(
        self, hidden: Tensor, step: Step, kept_rows: Tensor | None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Run hidden [num_tokens, hidden], overwritten, to the rows kept."""
        assert isinstance(step.attention, CppStep)
        operators = prepared()
        if step.cache is not self._cache:
            self._cache = step.cache
            self._caches[:] = [rows.data_ptr() for rows in step.cache.rows[self._cached]]
        gathered = [r.gathered for r in step.rotations]
        rotations = (ctypes.c_void_p * max(1, len(gathered)))(*[t.data_ptr() for t in gathered])
        out = hidden if kept_rows is None else hidden.new_empty(len(kept_rows), hidden.shape[1])
        struct = StackStepStruct(
            tokens=hidden.shape[0],
            num_kept=out.shape[0],
            hidden=hidden.data_ptr(),
            rotations=rotations,
            slots=step.slots.data_ptr(),
            kept=None if kept_rows is None else kept_rows.data_ptr(),
            caches=self._caches,
            out=out.data_ptr(),
            adapters=None if adapters is None else adapters.numbers.data_ptr(),
            paging=step.attention.paging,
        )
        operators.cpp_stack(TYPES[hidden.dtype], self._config, struct)
        return out

    def takes(self, step: Step, hidden: Tensor) -> bool:
        """Whether it can run this step: attention in C++, and a cache of the activations' type."""
        return (
            isinstance(step.attention, CppStep) and step.cache.rows[0].dtype == hidden.dtype and hidden.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """A matrix in parts, the parts' structs, and what adapters add."""

    parts: Sequence[PackedLinear | CodeLinear]
    structs: ctypes.Array[StackMatrixStruct]
    adapters: AdapterPanels | None

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    def struct(self) -> StackMatrixStruct:
        if len(self.parts) > 1:
            return StackMatrixStruct(parts=ctypes.addressof(self.structs), num_parts=len(self.structs))
        struct = self.structs[0]
        if self.adapters is not None:
            struct.adapters = ctypes.cast(self.adapters.structs, ctypes.POINTER(AdapterFactorsStruct))
        return struct


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention
    attention_norm: CppRmsNorm
    mlp_norm: CppRmsNorm
    qk_norm: CppRmsNorm | None
    qkv: _Packed
    output: _Packed
    up: _Packed
    down: _Packed

    def struct(self) -> StackLayerStruct:
        struct = StackLayerStruct(
            attention_norm=self.attention_norm.weight.data_ptr(),
            mlp_norm=self.mlp_norm.weight.data_ptr(),
            qk_norm=None if self.qk_norm is None else self.qk_norm.weight.data_ptr(),
            rope=-1 if self.attention.rope is None else self.attention.rope,
            rotary=self.attention.heads.rotary_dim,
            attention=shape_struct(self.attention.layer, self.attention.kv_shape),
        )
        for name in ("qkv", "output", "up", "down"):
            setattr(struct, name, getattr(self, name).struct())
        return struct


def cpp_stack(blocks: Sequence[Block], world_size: int, first_layer: int = 0) -> CppStack | None:
    """Return the blocks as one stack, if all are x += output(attention(norm(x))), x += down(silu(gate(norm(x))) *
    up(norm(x))).

    Matrices must be packed, RMS norms of one eps, norms of heads alike, without sums over ranks.
    """
    if world_size > 1:
        return None
    layers = [_layer(block) for block in blocks]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers) or not known:
        return None
    eps = {norm.eps for layer in known for norm in (layer.attention_norm, layer.mlp_norm)}
    qk_eps = {layer.qk_norm.eps for layer in known if layer.qk_norm is not None}
    widths = {layer.down.inputs for layer in known}
    return CppStack(known, first_layer) if len(eps) == len(widths) == 1 and len(qk_eps) < 2 else None


def _layer(block: Block) -> _Layer | None:
    if not isinstance(block, SequentialBlock) or block.multiplier != 1.0:
        return None
    if block.attention_post_norm is not None or block.mlp_post_norm is not None:
        return None
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, DenseMlp):
        return None
    if attention.clip is not None or attention.temperature is not None or attention.gate is not None:
        return None
    if not serves(attention.layer, attention.kv_shape) or not isinstance(mlp.activation, CppSiluGated):
        return None
    matrices = [_packed(linear) for linear in (attention.qkv, attention.output, mlp.up, mlp.down)]
    qkv, output, up, down = matrices
    if qkv is None or output is None or up is None or down is None or not whole_panels(down.inputs):
        return None
    if len(up.parts) > 1:
        return None
    norms = block.attention_norm, block.mlp_norm
    if not isinstance(norms[0], CppRmsNorm) or not isinstance(norms[1], CppRmsNorm):
        return None
    qk_norm = attention.qk_norm
    if qk_norm is not None and not (isinstance(qk_norm, CppRmsNorm) and qk_norm.weight.dim() == 2):
        return None
    return _Layer(attention, norms[0], norms[1], qk_norm, qkv, output, up, down)


def _packed(linear: Linear) -> _Packed | None:
    base = base_of(linear)
    adapters = linear.panels if isinstance(linear, AdaptedLinear) else None
    parts = base.parts if isinstance(base, SplitLinear) else (base,)
    packed = [part for part in parts if isinstance(part, PackedLinear | CodeLinear)]
    if len(packed) < len(parts) or (adapters is not None and len(parts) > 1):
        return None
    return _Packed(packed, (StackMatrixStruct * len(packed))(*map(_matrix_struct, packed)), adapters)


def _matrix_struct(matrix: PackedLinear | CodeLinear) -> StackMatrixStruct:
    if isinstance(matrix, CodeLinear):
        return StackMatrixStruct(codes=ctypes.pointer(matrix.struct), outputs=matrix.outputs)
    bias = None if matrix.bias is None else matrix.bias.data_ptr()
    return StackMatrixStruct(panels=matrix.panels.data_ptr(), bias=bias, outputs=matrix.outputs)
