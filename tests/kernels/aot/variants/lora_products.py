"""What the kernels of `model_server.kernels.lora_products` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aot.variant import Variant
from model_server.kernels.lora_products import _FORMS, _INNER, COLUMNS, _expand, _shrink, rank_step


def variants() -> Sequence[Variant]:
    """Compile tiles of decode and prompts, in all types, for full and partial ranks."""
    found = [_shrink_variant(rows, dtype) for rows in _FORMS for dtype in ("bf16", "fp16", "fp32")]
    found.append(_shrink_variant(16, "bf16", even=False))
    for rows in _FORMS:
        for dtype in ("bf16", "fp16", "fp32"):
            found.extend(_expand_variant(rows, dtype, dtype, rank, affine=False) for rank in (8, 16, 32, 64))
            found.append(_expand_variant(rows, dtype, "fp32", 64, affine=True))
    return found


def _shrink_variant(rows: int, dtype: str, *, even: bool = True) -> Variant:
    form = _FORMS[rows]
    return Variant(
        name=f"lora_shrink_{dtype}_rows{rows}" + ("" if even else "_uneven"),
        kernel=_shrink,
        signature={
            "x": f"*{dtype}", "a": f"*{dtype}", "sums": "*fp32", "tiles": "*i32", "x_stride": "i32", "inner": "i32",
            "depth": "i32", "share": "i32", "num_parts": "i32",
        },
        constants={
            "ROWS": rows, "INNER": _INNER, "DEPTH": form.depth // 2 if dtype == "fp32" else form.depth, "EVEN": even,
        },
        divisible=("x", "a", "sums", "tiles", "x_stride", "inner", "share", *(("depth",) if even else ())),
        num_warps=form.num_warps,
        num_stages=form.num_stages,
    )  # fmt: skip


def _expand_variant(rows: int, dtype: str, out: str, rank: int, *, affine: bool) -> Variant:
    constants: dict[str, Any] = {"ROWS": rows, "COLUMNS": COLUMNS, "RANK": rank_step(rank), "AFFINE": affine}
    return Variant(
        name=f"lora_expand_{dtype}_{out}_rows{rows}_rank{rank}" + ("_affine" if affine else ""),
        kernel=_expand,
        signature={
            "sums": "*fp32", "b": f"*{dtype}", "affine": "*fp32" if affine else f"*{dtype}", "out": f"*{out}",
            "tiles": "*i32", "columns": "*i32", "num_tiles": "i32", "inner": "i32", "kept": "i32", "rank": "i32",
            "num_columns": "i32", "out_stride": "i32", "num_parts": "i32",
        },
        constants=constants,
        divisible=("sums", "b", "affine", "out", "tiles", "columns", "kept", "out_stride",
                   *(("inner", "rank") if rank % 16 == 0 else ())),
        num_warps=4,
        num_stages=2,
    )  # fmt: skip
