"""What the kernels of `model_server.kernels.quantized` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from aot.variant import Variant
from model_server.kernels.quantized import TILES, TileConfig, _decode_multiply


def variants() -> Sequence[Variant]:
    """Compile all kinds, tiles and types; small groups, parts, a bias and an odd depth."""
    found = []
    for tiles in TILES:
        for dtype in ("bf16", "fp16"):
            found.append(_variant(tiles, dtype, "codes4", group=128))
            found.append(_variant(tiles, dtype, "codes8", group=None))
            found.append(_variant(tiles, dtype, "float4", group=16))
            found.append(_variant(tiles, dtype, "nvfp4", group=16))
            found.append(_variant(tiles, dtype, "mxfp4", group=32))
            found.append(_variant(tiles, dtype, "table4", group=64))
            found.append(_variant(tiles, dtype, "float8", group=None))
        found.append(_variant(tiles, "bf16", "codes4", group=32))
        found.append(_variant(tiles, "bf16", "codes8", group=128))
        found.append(_variant(tiles, "bf16", "float4", group=32))
        found.append(_variant(tiles, "bf16", "float8", group=128))
        found.append(_variant(tiles, "bf16", "float8_bits", group=None))
        found.append(_variant(tiles, "bf16", "codes4", group=128, BIASED=True, EVEN=False))
    for tiles in TILES[:2]:
        found.append(_variant(tiles, "bf16", "codes4", group=128, out="fp32"))
        found.append(_variant(tiles, "bf16", "codes4", group=16, out="fp32"))
        found.append(_variant(tiles, "bf16", "float8", group=None, out="fp32"))
    return found


def _variant(
    tiles: TileConfig, dtype: str, kind: str, *, group: int | None, out: str | None = None, **given: bool
) -> Variant:
    within = tiles.depth if group is None else min(group, tiles.depth)
    constants = {
        "KIND": kind, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth,
        "GROUPS": tiles.depth // within, "WHOLE_ROWS": group is None, "BIASED": False, "EVEN": True,
    } | given  # fmt: skip
    codes = kind.startswith("codes")
    number = f"*{dtype}"
    named = "".join(f"_{name.lower()}" for name, value in given.items() if value)
    return Variant(
        name=f"{kind}_{dtype}_{out or dtype}_{tiles.rows}_group{group or 'row'}{named}",
        kernel=_decode_multiply,
        signature={
            "x": number, "numbers": "*fp8e4nv" if kind == "float8" else "*u8", "bias": number,
            "scales": "*fp16" if codes else "*i32" if kind in ("nvfp4", "mxfp4") else "*fp32",
            "zeros": {"float8": "*fp8e4nv", "table4": "*fp32", "nvfp4": "*fp32"}.get(kind, "*u8"),
            "out": f"*{out or dtype}", "num_rows": "i32", "width": "i32", "depth": "i32", "share": "i32",
            "group": "i32", "height": "i32", "num_scales": "i32",
        },
        constants=constants,
        divisible=("x", "numbers", "scales", "zeros", "bias", "out", "width", "depth", "share", "group", "num_scales"),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        # Conversions of 8-bit floats: from capability 8.9 on.
        excluded=frozenset({80}) if kind == "float8" else frozenset(),
    )  # fmt: skip
