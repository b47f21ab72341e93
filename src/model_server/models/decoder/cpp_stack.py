"""All blocks of a decoder in one C++ call, if every one is of Llama's kind, or has a mixer in place of attention.

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
    StackPartStruct,
    StackStepStruct,
)
from model_server.layers.fused.cpp import CppRmsNorm, CppSiluGated
from model_server.layers.linear.code_panels import CodeLinear
from model_server.layers.linear.dequantizing import SplitLinear
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear, whole_panels
from model_server.memory.kv_cache import KvCache
from model_server.models.adapters.linear import AdaptedLinear, base_of
from model_server.models.decoder.attention.multi_head import Attention
from model_server.models.decoder.blocks import Block, SequentialBlock
from model_server.models.decoder.mixers.gated_delta import GatedDelta
from model_server.models.decoder.mixers.mamba2 import Mamba2
from model_server.models.decoder.mixers.short_conv import ShortConv
from model_server.models.decoder.mlp import DenseMlp
from model_server.models.decoder.parts import Step
from model_server.recurrence.cpp import CppDeltaNet, CppMamba2, CppShortConvolution
from model_server.recurrence.states import StatePool

Mixer = GatedDelta | Mamba2 | ShortConv
# MixerKind of stack_mixers.hpp.
_KINDS = {GatedDelta: 1, Mamba2: 2, ShortConv: 3}
# By the fields of StackMixer that point to them.
_NETS: dict[str, type[CppDeltaNet | CppMamba2 | CppShortConvolution]] = {
    "delta": CppDeltaNet, "mamba": CppMamba2, "convolution": CppShortConvolution,
}  # fmt: skip


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
        self._caches, self._inputs, self._states = ((ctypes.c_void_p * len(layers))() for _ in range(3))
        self._cache: KvCache | None = None
        self._pool: tuple[StatePool, int] | None = None
        mixers = [layer.attention for layer in layers]
        # Whose cache has the activations' type.
        self._attends = next((i for i, one in enumerate(mixers, first_layer) if isinstance(one, Attention)), None)
        self._stated = [(i, one.index) for i, one in enumerate(mixers) if isinstance(one, GatedDelta | Mamba2)]
        self._convolution = next((one for one in mixers if isinstance(one, ShortConv)), None)

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
        parts = [] if step.recurrent is None else step.recurrent.parts
        saves = [_pairs(part.saves) for part in parts]
        if step.states is not None and self._pool != (step.states, step.states.num_slots):
            self._pool = step.states, step.states.num_slots
            for number, index in self._stated:
                layer = step.states.layer(index)
                self._inputs[number], self._states[number] = layer.inputs.data_ptr(), layer.state.data_ptr()
        segments = cached = None
        if self._convolution is not None:
            assert step.segments is not None and self._convolution.kv_shape.newest is not None
            segments = ctypes.pointer(step.segments.struct)
            plan = step.segments.convolution(self._convolution.width, self._convolution.kv_shape.newest)
            cached = ctypes.pointer(plan.struct)
        struct = StackStepStruct(
            parts=(StackPartStruct * max(1, len(parts)))(
                *[
                    StackPartStruct(part.first, part.segments.struct, ctypes.addressof(pairs), len(part.saves))
                    for part, pairs in zip(parts, saves, strict=True)
                ]
            ),
            num_parts=len(parts),
            segments=segments,
            cached=cached,
            inputs=self._inputs,
            states=self._states,
            tokens=hidden.shape[0],
            num_kept=out.shape[0],
            hidden=hidden.data_ptr(),
            rotations=rotations,
            slots=step.slots.data_ptr(),
            kept=None if kept_rows is None else kept_rows.data_ptr(),
            caches=self._caches,
            out=out.data_ptr(),
            adapters=None if adapters is None else adapters.all.numbers.data_ptr(),
            paging=step.attention.paging,
        )
        operators.cpp_stack(TYPES[hidden.dtype], self._config, struct)
        return out

    def takes(self, step: Step, hidden: Tensor) -> bool:
        """Whether it can run this step: attention in C++, and a cache of the activations' type."""
        stored = hidden.dtype if self._attends is None else step.cache.rows[self._attends].dtype
        return isinstance(step.attention, CppStep) and stored == hidden.dtype and hidden.is_contiguous()


def _pairs(saves: Sequence[tuple[int, int]]) -> ctypes.Array[ctypes.c_int64]:
    """Return slots, from and to, of each copy."""
    return (ctypes.c_int64 * (2 * len(saves)))(*[slot for pair in saves for slot in pair])


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
    attention: Attention | Mixer
    attention_norm: CppRmsNorm
    mlp_norm: CppRmsNorm
    qkv: _Packed
    gate: _Packed | None
    output: _Packed
    up: _Packed
    down: _Packed

    @property
    def qk_norm(self) -> CppRmsNorm | None:
        norm = self.attention.qk_norm if isinstance(self.attention, Attention) else None
        assert norm is None or isinstance(norm, CppRmsNorm)
        return norm

    def struct(self) -> StackLayerStruct:
        struct = StackLayerStruct(
            attention_norm=self.attention_norm.weight.data_ptr(),
            mlp_norm=self.mlp_norm.weight.data_ptr(),
            qk_norm=None if self.qk_norm is None else self.qk_norm.weight.data_ptr(),
        )
        for name in ("qkv", "gate", "output", "up", "down"):
            matrix = getattr(self, name)
            if matrix is not None:
                setattr(struct, name, matrix.struct())
        part = self.attention
        if isinstance(part, Attention):
            struct.rope = -1 if part.rope is None else part.rope
            struct.rotary = part.heads.rotary_dim
            struct.attention = shape_struct(part.layer, part.kv_shape)
            return struct
        struct.mixer.kind = _KINDS[type(part)]
        net = part.convolution if isinstance(part, ShortConv) else part.net
        for name, known in _NETS.items():
            if isinstance(net, known):
                setattr(struct.mixer, name, ctypes.pointer(net.struct))
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
    taps = {part.width for part in (layer.attention for layer in known) if isinstance(part, ShortConv)}
    are_alike = len(eps) == len(widths) == 1 and len(qk_eps) < 2 and len(taps) < 2
    return CppStack(known, first_layer) if are_alike else None


def _layer(block: Block) -> _Layer | None:
    if not isinstance(block, SequentialBlock) or block.multiplier != 1.0:
        return None
    if block.attention_post_norm is not None or block.mlp_post_norm is not None:
        return None
    part, mlp = block.attention, block.mlp
    if isinstance(part, Attention):
        is_known, inner, gate = _serves_attention(part), part.qkv, part.gate
    elif isinstance(part, GatedDelta | Mamba2 | ShortConv):
        is_known, inner, gate = _serves_mixer(part), part.project, None
    else:
        return None
    if not is_known or not isinstance(mlp, DenseMlp) or not isinstance(mlp.activation, CppSiluGated):
        return None
    qkv, output, up, down = (_packed(linear) for linear in (inner, part.output, mlp.up, mlp.down))
    packed_gate = None if gate is None else _packed(gate)
    if qkv is None or output is None or up is None or down is None or not whole_panels(down.inputs):
        return None
    if len(up.parts) > 1 or (gate is not None and packed_gate is None):
        return None
    norms = block.attention_norm, block.mlp_norm
    if not isinstance(norms[0], CppRmsNorm) or not isinstance(norms[1], CppRmsNorm):
        return None
    return _Layer(part, norms[0], norms[1], qkv, packed_gate, output, up, down)


def _serves_attention(part: Attention) -> bool:
    if part.clip is not None or part.temperature is not None or part.value_norm is not None or part.is_shared:
        return False
    norm = part.qk_norm
    has_norm = norm is None or (isinstance(norm, CppRmsNorm) and norm.weight.dim() == 2)
    return has_norm and serves(part.layer, part.kv_shape)


def _serves_mixer(part: Mixer) -> bool:
    if isinstance(part, GatedDelta):
        return isinstance(part.net, CppDeltaNet)
    if isinstance(part, ShortConv):
        return isinstance(part.convolution, CppShortConvolution)
    is_plain = part.input_factor == 1.0 and part.factors is None and part.gating is None
    return is_plain and isinstance(part.net, CppMamba2)


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
