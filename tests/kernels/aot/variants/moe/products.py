"""What the kernels of `model_server.kernels.moe.products` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from aot.variant import Variant
from model_server.kernels.decoding import Kind
from model_server.kernels.moe.placement import FLOAT32_TILES, TILES, TileConfig
from model_server.kernels.moe.products import _multiply


def variants() -> Sequence[Variant]:
    """Compile Qwen 3 MoE in all tiles and types, biases (GPT-OSS), input scales (Llama 4), some with adapters."""
    found: list[Variant] = []
    for dtype in ("bf16", "fp16"):
        for tiles in TILES:
            found.append(_variant(tiles, dtype, SILU=True))
            found.append(_variant(tiles, dtype, SCALE_OUTPUT=True))
    for tiles in (TILES[0], TILES[-1]):
        found.append(_variant(tiles, "bf16", BIASED=True))
        found.append(_variant(tiles, "bf16", SILU=True, SCALE_INPUT=True))
        found.append(_variant(tiles, "bf16", SILU=True, EVEN=False))
    for tiles in FLOAT32_TILES:
        found.append(_variant(tiles, "fp32", SILU=True))
    stored: list[tuple[Kind, int]] = [
        ("codes4", 128), ("codes4", 32), ("codes8", 0), ("float4", 16), ("float4", 32), ("nvfp4", 16), ("mxfp4", 32),
        ("table4", 64), ("float8", 0), ("float8", 128),
    ]  # fmt: skip
    for tiles in TILES:
        for kind, group in stored:
            whole = group == 0
            groups = 1 if whole else max(tiles.depth // group, 1)
            found.append(_variant(tiles, "bf16", kind, SILU=True, GROUPS=groups, WHOLE_ROWS=whole))
            found.append(_variant(tiles, "bf16", kind, SCALE_OUTPUT=True, GROUPS=groups, WHOLE_ROWS=whole))
        found.append(_variant(tiles, "fp16", "codes4", SILU=True, WHOLE_ROWS=False))
        found.append(_variant(tiles, "bf16", "float8_bits", SILU=True, WHOLE_ROWS=False))
    found += [
        _variant(TILES[0], "bf16", SILU=True, ADAPTED=True, RANK=64),
        _variant(TILES[0], "bf16", BIASED=True, ADAPTED=True, MODULES=2),
        _variant(TILES[-1], "bf16", SCALE_OUTPUT=True, ADAPTED=True, AFFINE=True),
        _variant(TILES[-1], "bf16", "codes4", SILU=True, WHOLE_ROWS=False, ADAPTED=True),
        _variant(FLOAT32_TILES[0], "fp32", SILU=True, ADAPTED=True, AFFINE=True, MODULES=2),
    ]
    return found


def _variant(tiles: TileConfig, dtype: str, kind: Kind = "plain", **given: object) -> Variant:
    constants = {
        "KIND": kind, "GROUPS": 1, "WHOLE_ROWS": True,
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "SILU": False,
        "BIASED": False, "SCALE_INPUT": False, "SCALE_OUTPUT": False, "EVEN": True,
        "ADAPTED": False, "AFFINE": False, "MODULES": 1, "RANK": 16,
    } | given  # fmt: skip
    if constants["SILU"]:
        constants["COLUMNS"] = tiles.columns // 2
    named = "_".join(f"{name.lower()}{value:d}" for name, value in given.items() if isinstance(value, int))
    number = f"*{dtype}"
    weight = {"plain": number, "float8": "*fp8e4nv"}.get(kind, "*u8")
    scale = {"codes4": "*fp16", "codes8": "*fp16", "nvfp4": "*i32", "mxfp4": "*i32"}.get(kind, "*fp32")
    return Variant(
        name=f"moe_{kind}_{dtype}_{tiles.rows}_{named}",
        kernel=_multiply,
        signature={
            "x": number, "weight": weight, "weight_scales": scale,
            "zeros": "*fp32" if kind in ("table4", "nvfp4") else weight,
            "bias": number, "out": number, "slots": "*i32", "experts": "*i32",
            "scales": "*fp32", "num_slots": "i32", "width": "i32", "depth": "i32", "shared_by": "i32",
            "group": "i32", "height": "i32", "num_groups": "i32", "num_scales": "i32",
            "sums": "*fp32", "lora_b": number, "affine": "*fp32", "numbers": "*i32", "top_k": "i32", "num_parts": "i32",
            "values": "i32", "rank": "i32", "num_experts": "i32",
        },
        constants=constants,
        divisible=(
            "x", "weight", "bias", "out", "slots", "experts", "scales", "weight_scales", "zeros", "width", "depth",
            "group", "sums", "lora_b", "affine", "numbers", "values", "rank",
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # Conversions of 8-bit floats: from capability 8.9 on.
        excluded=frozenset({80}) if kind == "float8" else frozenset(),
    )  # fmt: skip
