"""The structures of the C interface, field by field as in `source/`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_long, c_void_p


class AttentionShapeStruct(ctypes.Structure):
    """`AttentionShape` of attention.hpp; 0 or null: absent."""

    _fields_ = [
        ("heads", c_long),
        ("kv_heads", c_long),
        ("key_dim", c_long),
        ("value_dim", c_long),
        ("value_offset", c_long),
        ("row_width", c_long),
        ("window", c_long),
        ("chunk", c_long),
        ("scale", c_float),
        ("softcap", c_float),
        ("slopes", c_void_p),
        ("sinks", c_void_p),
        ("stored", c_long),
    ]


class PagingStruct(ctypes.Structure):
    """`Paging` of attention.hpp."""

    _fields_ = [
        ("tables", c_void_p),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("sequences", c_long),
        ("max_blocks", c_long),
        ("block_size", c_long),
        ("last_keys", c_void_p),
        ("first_keys", c_void_p),
        ("single_prompts", c_void_p),
    ]


class HeadLayoutStruct(ctypes.Structure):
    """`HeadLayout` of rows.hpp."""

    _fields_ = [
        ("num_rotated", c_long),
        ("head_dim", c_long),
        ("rotary", c_long),
        ("query_width", c_long),
        ("qkv_width", c_long),
        ("norm", c_void_p),
        ("eps", c_float),
    ]


class CodeShapeStruct(ctypes.Structure):
    """`CodeShape` of code_panels.hpp."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("order", c_void_p),
        ("outputs", c_long),
        ("inputs", c_long),
        ("columns", c_long),
        ("bits", c_long),
        ("group", c_long),
        ("zero", c_long),
        ("is_float8", c_long),
        ("levels", c_void_p),
        ("table", c_void_p),
        ("has_offsets", c_long),
        ("numbers", c_long),
    ]


class AdapterExpansionStruct(ctypes.Structure):
    """`AdapterExpansion` of adapters.hpp."""

    _fields_ = [
        ("panel", c_long),
        ("panels", c_long),
        ("first", c_long),
        ("rank", c_long),
        ("b", c_void_p),
    ]


class AdapterFactorsStruct(ctypes.Structure):
    """`AdapterFactors` of adapters.hpp."""

    _fields_ = [
        ("a", c_void_p),
        ("inner", c_long),
        ("num_expansions", c_long),
        ("expansions", POINTER(AdapterExpansionStruct)),
        ("gain", c_void_p),
        ("shift", c_void_p),
    ]


class StackMatrixStruct(ctypes.Structure):
    """`StackMatrix` of stack.hpp."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("codes", POINTER(CodeShapeStruct)),
        ("adapters", POINTER(AdapterFactorsStruct)),
        ("parts", c_void_p),
        ("num_parts", c_long),
        ("outputs", c_long),
    ]


class SegmentsStruct(ctypes.Structure):
    """`Segments` of convolution.hpp."""

    _fields_ = [
        ("count", c_long),
        ("bounds", c_void_p),
        ("lengths", c_void_p),
        ("slots", c_void_p),
    ]


class CachedInputsStruct(ctypes.Structure):
    """`CachedInputs` of convolution.hpp."""

    _fields_ = [
        ("previous", c_void_p),
        ("missing", c_void_p),
        ("written", c_void_p),
        ("reserved", c_long),
        ("writes_first", c_long),
    ]


class ShortConvolutionStruct(ctypes.Structure):
    """`ShortConvolution` of convolution.hpp."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("width", c_long),
        ("channels", c_long),
    ]


class GatedDeltaStruct(ctypes.Structure):
    """`GatedDelta` of gated_delta.hpp."""

    _fields_ = [
        ("key_heads", c_long),
        ("repeats", c_long),
        ("key_dim", c_long),
        ("value_dim", c_long),
        ("width", c_long),
        ("convolution", c_void_p),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
        ("most_strength", c_float),
        ("by_key", c_long),
        ("sigmoid", c_long),
    ]


class KeptConvolutionStruct(ctypes.Structure):
    """`KeptConvolution` of mamba1.hpp."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("width", c_long),
        ("channels", c_long),
        ("row_width", c_long),
    ]


class Mamba1Struct(ctypes.Structure):
    """`Mamba1` of mamba1.hpp."""

    _fields_ = [
        ("channels", c_long),
        ("state_size", c_long),
        *((name, c_void_p) for name in ("rate", "bias", "skip")),
    ]


class Mamba2Struct(ctypes.Structure):
    """`Mamba2` of mamba2.hpp."""

    _fields_ = [
        ("heads", c_long),
        ("head_dim", c_long),
        ("groups", c_long),
        ("state_size", c_long),
        ("width", c_long),
        ("first", c_long),
        ("heads_per_group", c_long),
        ("convolution", c_void_p),
        ("convolution_bias", c_void_p),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("least", c_float),
        ("most", c_float),
        ("gating", c_long),
        ("norm", c_void_p),
        ("norm_groups", c_long),
        ("eps", c_float),
    ]


class StackPartStruct(ctypes.Structure):
    """`StackPart` of stack_mixers.hpp."""

    _fields_ = [
        ("first", c_long),
        ("segments", SegmentsStruct),
        ("saves", c_void_p),
        ("num_saves", c_long),
    ]


class StackMixerStruct(ctypes.Structure):
    """`StackMixer` of stack_mixers.hpp; kinds: attention, gated delta net, Mamba-2, short convolution."""

    _fields_ = [
        ("kind", c_long),
        ("delta", POINTER(GatedDeltaStruct)),
        ("mamba", POINTER(Mamba2Struct)),
        ("convolution", POINTER(ShortConvolutionStruct)),
    ]


class StackLayerStruct(ctypes.Structure):
    """`StackLayer` of stack.hpp."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", StackMatrixStruct),
        ("output", StackMatrixStruct),
        ("up", StackMatrixStruct),
        ("down", StackMatrixStruct),
        ("qk_norm", c_void_p),
        ("rope", c_long),
        ("rotary", c_long),
        ("attention", AttentionShapeStruct),
        ("gate", StackMatrixStruct),
        ("mixer", StackMixerStruct),
    ]


class StackConfigStruct(ctypes.Structure):
    """`StackConfig` of stack.hpp."""

    _fields_ = [
        ("num_layers", c_long),
        ("hidden", c_long),
        ("intermediate", c_long),
        ("eps", c_float),
        ("qk_eps", c_float),
        ("layers", POINTER(StackLayerStruct)),
    ]


class StackStepStruct(ctypes.Structure):
    """`StackStep` of stack.hpp."""

    _fields_ = [
        ("tokens", c_long),
        ("num_kept", c_long),
        ("hidden", c_void_p),
        ("rotations", POINTER(c_void_p)),
        ("slots", c_void_p),
        ("kept", c_void_p),
        ("caches", POINTER(c_void_p)),
        ("out", c_void_p),
        ("adapters", c_void_p),
        ("paging", PagingStruct),
        ("parts", POINTER(StackPartStruct)),
        ("num_parts", c_long),
        ("segments", POINTER(SegmentsStruct)),
        ("cached", POINTER(CachedInputsStruct)),
        ("inputs", POINTER(c_void_p)),
        ("states", POINTER(c_void_p)),
    ]


class EncoderNormStruct(ctypes.Structure):
    """`EncoderNorm` of encoder_stack.hpp."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
    ]


class EncoderMatrixStruct(ctypes.Structure):
    """`EncoderMatrix` of encoder_stack.hpp."""

    _fields_ = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_long),
        ("inputs", c_long),
    ]


class EncoderLayerStruct(ctypes.Structure):
    """`EncoderLayer` of encoder_stack.hpp."""

    _fields_ = [
        ("attention_norm", EncoderNormStruct),
        ("mlp_norm", EncoderNormStruct),
        ("qkv", EncoderMatrixStruct),
        ("output", EncoderMatrixStruct),
        ("up", EncoderMatrixStruct),
        ("down", EncoderMatrixStruct),
        ("rope", c_long),
        ("rotary", c_long),
        ("paging", c_long),
        ("attention", AttentionShapeStruct),
    ]


class EncoderConfigStruct(ctypes.Structure):
    """`EncoderConfig` of encoder_stack.hpp."""

    _fields_ = [
        ("num_layers", c_long),
        ("hidden", c_long),
        ("intermediate", c_long),
        ("norms_after", c_long),
        ("gated", c_long),
        ("activation", c_long),
        ("eps", c_float),
        ("layers", POINTER(EncoderLayerStruct)),
    ]


class EncoderStepStruct(ctypes.Structure):
    """`EncoderStep` of encoder_stack.hpp."""

    _fields_ = [
        ("tokens", c_long),
        ("num_pagings", c_long),
        ("hidden", c_void_p),
        ("rotations", POINTER(c_void_p)),
        ("slots", c_void_p),
        ("caches", POINTER(c_void_p)),
        ("pagings", POINTER(PagingStruct)),
    ]


WITHOUT_STATUS = ("cpp_sources", "cpp_prepare", "cpp_init", "cpp_panel", "cpp_code_bytes", "cpp_number_kind")
# Arguments of every function of operators.cpp; all others return 0, or 1 where there was no memory.
FUNCTIONS: dict[str, tuple[type, ...]] = {
    "cpp_sources": (),
    "cpp_prepare": (),
    "cpp_init": (c_void_p,) * 4,
    "cpp_panel": (),
    "cpp_set_tile_rows": (c_long,),
    "cpp_set_tile_cache": (c_long,),
    "cpp_pack": (c_long, c_void_p, c_void_p, c_long, c_long),
    "cpp_linear": (c_long, c_void_p, c_void_p, c_long, c_long, c_void_p, c_long, c_long, c_void_p, c_long),
    "cpp_head_linear": (c_long, c_void_p, *[c_long] * 3, c_void_p, *[c_long] * 3, c_void_p, c_long, c_long),
    "cpp_index_scores": (c_long, c_void_p, *[c_long] * 2, *[c_void_p] * 2, *[c_long] * 2, c_void_p),
    "cpp_code_bytes": (POINTER(CodeShapeStruct),),
    "cpp_number_kind": (POINTER(CodeShapeStruct), c_void_p, c_void_p),
    "cpp_pack_codes": (POINTER(CodeShapeStruct), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "cpp_pack_float8": (c_long, POINTER(CodeShapeStruct), c_void_p, c_void_p, c_void_p),
    "cpp_code_linear": (c_long, POINTER(CodeShapeStruct), c_void_p, c_long, c_long, c_void_p, c_long),
    "cpp_rms_norm": (c_long, c_void_p, c_void_p, c_void_p, c_long, c_float, c_void_p, c_long, c_long),
    "cpp_silu_gated": (c_long, c_void_p, c_void_p, c_long, c_long),
    "cpp_rotate_write": (c_long, c_void_p, POINTER(HeadLayoutStruct), c_void_p, c_void_p, c_long, c_void_p, c_long),
    "cpp_attend": (c_long, POINTER(AttentionShapeStruct), POINTER(PagingStruct), c_void_p, c_void_p, c_long, c_void_p),
    "cpp_stack": (c_long, POINTER(StackConfigStruct), POINTER(StackStepStruct)),
    "cpp_encoder_stack": (c_long, POINTER(EncoderConfigStruct), POINTER(EncoderStepStruct)),
    "cpp_short_convolution": (
        c_long,
        POINTER(ShortConvolutionStruct),
        POINTER(SegmentsStruct),
        POINTER(CachedInputsStruct),
        *[c_void_p] * 3,
    ),
    "cpp_gated_delta": (c_long, POINTER(GatedDeltaStruct), POINTER(SegmentsStruct), *[c_void_p] * 4),
    "cpp_kept_convolution": (c_long, POINTER(KeptConvolutionStruct), POINTER(SegmentsStruct), *[c_void_p] * 3),
    "cpp_mamba1": (c_long, POINTER(Mamba1Struct), POINTER(SegmentsStruct), *[c_void_p] * 3),
    "cpp_mamba2": (c_long, POINTER(Mamba2Struct), POINTER(SegmentsStruct), *[c_void_p] * 4),
    "cpp_adapt": (c_long, POINTER(AdapterFactorsStruct), *[c_void_p] * 2, *[c_long] * 3, c_void_p, c_long, c_long),
    "cpp_greedy": (c_void_p, c_long, c_long, c_long, c_void_p, c_void_p, c_void_p),
}
