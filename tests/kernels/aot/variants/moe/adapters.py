"""What the kernels of `model_server.kernels.moe.adapters` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from aot.variant import Variant
from model_server.kernels.moe.adapters import _INNER, _shrink
from model_server.kernels.moe.placement import FLOAT32_TILES, TILES, TileConfig


def variants() -> Sequence[Variant]:
    """Compile tiles of decode and prompts, scaled inputs, and an odd depth."""
    found = [_variant(tiles, "bf16") for tiles in TILES]
    found += [_variant(TILES[0], "fp16"), _variant(FLOAT32_TILES[-1], "fp32")]
    found += [_variant(TILES[0], "bf16", scaled=True), _variant(TILES[-1], "bf16", even=False)]
    return found


def _variant(tiles: TileConfig, dtype: str, *, scaled: bool = False, even: bool = True) -> Variant:
    return Variant(
        name=f"moe_adapters_shrink_{dtype}_{tiles.rows}" + ("_scaled" if scaled else "") + ("" if even else "_uneven"),
        kernel=_shrink,
        signature={
            "x": f"*{dtype}", "a": f"*{dtype}", "sums": "*fp32", "pairs": "*i32", "experts": "*i32", "numbers": "*i32",
            "scales": "*fp32" if scaled else f"*{dtype}", "num_pairs": "i32", "shared_by": "i32", "top_k": "i32",
            "num_experts": "i32", "inner": "i32", "depth": "i32", "share": "i32", "num_parts": "i32",
        },
        constants={"ROWS": tiles.rows, "INNER": _INNER, "DEPTH": tiles.depth, "SCALED": scaled, "EVEN": even},
        divisible=("x", "a", "sums", "pairs", "experts", "numbers", "scales", "inner", "share",
                   *(("depth",) if even else ())),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
