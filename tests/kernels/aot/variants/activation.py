"""What the kernels of `model_server.kernels.activation` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.activation import BLOCK, KINDS, gated_rows


def variants() -> list[Variant]:
    """Compile every activation in bfloat16, the most common in all types."""
    kinds = [*dict.fromkeys(KINDS.values()), "clamped_swiglu"]
    return [_variant(kind, "bf16") for kind in kinds] + [_variant("silu", "fp16"), _variant("silu", "fp32")]


def _variant(kind: str, dtype: str) -> Variant:
    return Variant(
        name=f"{kind}, {dtype}",
        kernel=gated_rows,
        signature={
            "gate_up": f"*{dtype}", "out": f"*{dtype}", "size": "i32", "stride": "i32", "alpha": "fp32", "limit": "fp32"
        },
        constants={"KIND": kind, "BLOCK": BLOCK},
        divisible=("gate_up", "out", "size", "stride"),
    )  # fmt: skip
