"""What the kernels of `model_server.kernels.attention.decode_plan` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.attention.decode_plan import _ITEMS_PER_PROGRAM, _SEQUENCES_AT_ONCE, ITEM_WIDTH, plan_kernel
from model_server.kernels.attention.parts import REACH_ALL, REACH_WINDOW


def variants() -> list[Variant]:
    """With and without a window."""
    pointers = ("kv_lengths", "cu_seqlens", "items", "arrivals")
    numbers = ("num_seqs", "num_items", "num_arrivals", "target", "min_keys", "max_splits", "reach")
    return [
        Variant(
            name=name,
            kernel=plan_kernel,
            signature={**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(numbers, "i32")},
            constants={
                "REACH": reach,
                "UNIT": 64,
                "SEQUENCES": _SEQUENCES_AT_ONCE,
                "ITEMS": _ITEMS_PER_PROGRAM,
                "WIDTH": ITEM_WIDTH,
            },
            divisible=pointers,
        )
        for name, reach in (("all keys", REACH_ALL), ("window", REACH_WINDOW))
    ]
