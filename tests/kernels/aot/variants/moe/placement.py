"""What the kernels of `model_server.kernels.moe.placement` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

from aot.variant import Variant
from model_server.kernels.moe.placement import _CHUNK, _CHUNKS, _WALK, _count, _list, _place, _reserve


def variants() -> Sequence[Variant]:
    """Compile both ways up to 255 experts, three steps for 512."""
    found = []
    for rows in (16, 128):
        found.append(
            Variant(
                name=f"moe_place_{rows}",
                kernel=_place,
                signature={
                    "chosen": "*i64",
                    "slots": "*i32",
                    "experts": "*i32",
                    "num_slots": "i32",
                    "num_tiles": "i32",
                },
                constants={"ROWS": rows, "EXPERTS": 256, "CHUNK": _WALK},
                divisible=("chosen", "slots", "experts"),
            )
        )
    for size in (256, 1024):
        found += [
            Variant(
                name=f"moe_count_{size}",
                kernel=_count,
                signature={"chosen": "*i64", "counts": "*i32", "num_slots": "i32", "num_experts": "i32"},
                constants={"EXPERTS": size, "CHUNK": _CHUNK},
                divisible=("chosen", "counts", "num_experts"),
            ),
            Variant(
                name=f"moe_reserve_{size}",
                kernel=_reserve,
                signature={
                    "counts": "*i32", "places": "*i32", "slots": "*i32", "experts": "*i32", "num_slots": "i32",
                    "num_tiles": "i32", "num_chunks": "i32",
                },
                constants={"ROWS": 128, "EXPERTS": size, "CHUNKS": _CHUNKS},
                divisible=("counts", "places", "slots", "experts"),
            ),
        ]  # fmt: skip
    found.append(
        Variant(
            name="moe_list",
            kernel=_list,
            signature={
                "chosen": "*i64", "places": "*i32", "slots": "*i32", "num_slots": "i32", "num_experts": "i32",
            },
            constants={"CHUNK": _CHUNK},
            divisible=("chosen", "places", "slots", "num_experts"),
        )
    )  # fmt: skip
    return found
