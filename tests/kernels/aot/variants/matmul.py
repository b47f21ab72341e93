"""What the kernels of `model_server.kernels.matmul` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

import triton

from aot.variant import Variant
from model_server.kernels.matmul import (
    _ADDED,
    INVARIANT_ROWS,
    INVARIANT_TILES,
    STREAM_TILES,
    VECTOR_TILES,
    TileConfig,
    _add_parts,
    _stream,
    _vector,
)


def variants() -> Sequence[Variant]:
    """Compile all tiles in both types, split and whole; one with a bias and an odd depth."""
    found = []
    for dtype in ("bf16", "fp16"):
        for tiles in VECTOR_TILES:
            found.append(_variant(_vector, tiles, dtype))
            found.append(_variant(_vector, tiles, dtype, out="fp32"))
        for tiles in STREAM_TILES:
            for rows in (16, 32):
                found.append(_variant(_stream, tiles, dtype, ROWS=rows))
                found.append(_variant(_stream, tiles, dtype, out="fp32", ROWS=rows))
        found.append(_variant(_stream, INVARIANT_TILES, dtype, ROWS=INVARIANT_ROWS))
        found.append(_variant(_stream, INVARIANT_TILES, dtype, out="fp32", ROWS=INVARIANT_ROWS))
        found.append(_variant(_add_parts, VECTOR_TILES[0], dtype, ADDED=_ADDED))
        found.append(_variant(_add_parts, VECTOR_TILES[0], dtype, out="fp32", ADDED=_ADDED))
    found.append(_variant(_vector, VECTOR_TILES[0], "bf16", BIASED=True, EVEN=False))
    found.append(_variant(_stream, STREAM_TILES[0], "bf16", ROWS=16, BIASED=True, EVEN=False))
    found.append(_variant(_stream, INVARIANT_TILES, "bf16", ROWS=INVARIANT_ROWS, BIASED=True, EVEN=False))
    return found


def _variant(
    kernel: triton.JITFunction, tiles: TileConfig, dtype: str, out: str | None = None, **given: object
) -> Variant:
    constants = {"COLUMNS": tiles.columns, "DEPTH": tiles.depth, "BIASED": False, "EVEN": True} | given
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = {"x": dtype, "weight": dtype, "bias": dtype, "out": out or dtype, "sums": "fp32"}
    arguments = [p.name for p in kernel.params if not p.is_constexpr]
    named = "_".join(f"{name.lower()}{value}" for name, value in constants.items())
    return Variant(
        name=f"matmul{kernel.__name__}_{dtype}_{out or dtype}_{named}",
        kernel=kernel,
        signature={name: f"*{pointers[name]}" if name in pointers else "i32" for name in arguments},
        constants=constants,
        divisible=tuple(name for name in arguments if name not in ("num_rows", "num_parts")),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages if kernel is _stream else 1,
    )
