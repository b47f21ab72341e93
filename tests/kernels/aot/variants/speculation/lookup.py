"""What the kernels of `model_server.kernels.speculation.lookup` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.speculation.lookup import _LANES, look_up


def variants() -> list[Variant]:
    """Compile drafts of 3, 5 and 15 tokens."""
    pointers = {"history": "*i32", "lengths": "*i64", "drafts": "*i64", "counts": "*i64"}
    return [
        Variant(
            name=f"look_up_{draft}",
            kernel=look_up,
            signature={**pointers, "stride": "i32", "most": "i32"},
            constants={"LANES": _LANES, "DRAFT": draft},
            divisible=tuple(pointers),
        )
        for draft in (4, 8, 16)
    ]
