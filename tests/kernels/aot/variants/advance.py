"""What the kernels of `model_server.kernels.advance` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.advance import _ROWS, advance


def variants() -> list[Variant]:
    """Compile for our block sizes and flash-attn's."""
    pointers = {"positions": "*i64", "tables": "*i32", "kv_lengths": "*i32", "slots": "*i64"}
    return [
        Variant(
            name=f"advance_{block}",
            kernel=advance,
            signature={**pointers, "count": "i32", "stride": "i32"},
            constants={"BLOCK": block, "ROWS": _ROWS},
            divisible=tuple(pointers),
        )
        for block in (16, 256)
    ]
