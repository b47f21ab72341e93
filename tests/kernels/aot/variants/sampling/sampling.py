"""What the kernels of `model_server.kernels.sampling.sampling` are compiled for."""

from __future__ import annotations

from collections.abc import Sequence

import triton

from aot.variant import Variant
from model_server.kernels.sampling.filtered import collect, draw_filtered
from model_server.kernels.sampling.sampling import _CAPACITY, _CHUNK, _TILE
from model_server.kernels.sampling.tiles import draw_unfiltered, finish_greedy, scan, weigh


def variants() -> Sequence[Variant]:
    """Compile vocabularies of Llama 3, Qwen 3, Gemma, and an odd one (GPT-2)."""
    found: list[Variant] = []
    for vocab, divisible in ((128256, True), (151936, True), (262144, True), (50257, False)):
        found += _variants_of(vocab, divisible)
    return found


_POINTERS = {
    "logits": "*fp32", "rows": "*i32", "peaks": "*fp32", "places": "*i32", "sums": "*fp32", "temperatures": "*fp32",
    "top_k": "*i32", "dropped": "*fp64", "min_p": "*fp32", "masses": "*i64", "counted": "*i32", "weighed": "*i64",
    "candidates": "*i32", "num_candidates": "*i32", "seeds": "*i64", "counts": "*i64", "ids": "*i64",
    "packed": "*fp64",
}  # fmt: skip


def _variants_of(vocab: int, divisible: bool) -> list[Variant]:
    bits = 62 - vocab.bit_length()
    given = {
        "SCALE": float(1 << bits),
        "TILE": _TILE,
        "TILES": triton.next_power_of_2(triton.cdiv(vocab, _TILE)),
        "CAPACITY": _CAPACITY,
        "CHUNK": _CHUNK,
    }

    def variant(kernel: triton.JITFunction, label: str, num_warps: int = 4, **more: object) -> Variant:
        constants = {name: value for name, value in (given | more).items() if name in kernel.arg_names}
        arguments = [name for name in kernel.arg_names if name not in constants]
        return Variant(
            name=f"sampling_{label}_{vocab}",
            kernel=kernel,
            signature={name: _POINTERS.get(name, "i32") for name in arguments},
            constants=constants,
            divisible=tuple(
                name for name in arguments if name in _POINTERS or (divisible and name in ("stride", "vocab"))
            ),
            num_warps=num_warps,
        )

    return [
        variant(scan, "scan"),
        variant(finish_greedy, "greedy"),
        variant(weigh, "weigh", FILTERED=False),
        variant(draw_unfiltered, "unfiltered"),
        variant(weigh, "weigh_filtered", FILTERED=True),
        variant(collect, "collect"),
        variant(draw_filtered, "filtered", num_warps=8),
    ]
