"""What the kernels of `model_server.kernels.norm` are compiled for."""

from __future__ import annotations

from aot.variant import Variant
from model_server.kernels.norm import _tile, norm_rows


def variants() -> list[Variant]:
    """Compile real hidden sizes, heads, latents; a layer norm."""
    return [
        _variant("hidden 2048", "bf16", 2048),
        _variant("hidden 4096 after a sum", "bf16", 4096, add=True),
        _variant("hidden 8192 after a sum", "bf16", 8192, add=True),
        _variant("hidden 16384 after a sum", "fp16", 16384, add=True),
        _variant("hidden 4096 after a sum", "fp32", 4096, add=True),
        _variant("40 heads of 128", "bf16", 128, heads=40),
        _variant("10 heads of 80, a weight for each", "bf16", 80, heads=10, per_head=True),
        _variant("latent of 1536", "bf16", 1536),
        _variant("layer norm of 4544 after a sum", "bf16", 4544, add=True, center=True),
        _variant("layer norm of 80 per head", "fp16", 80, heads=10, per_head=True, center=True),
    ]


def _variant(
    name: str,
    dtype: str,
    size: int,
    *,
    heads: int = 1,
    per_head: bool = False,
    add: bool = False,
    center: bool = False,
) -> Variant:
    block, rows, warps = _tile(size)
    signature = {
        "x": f"*{dtype}", "weight": "*fp32", "out": f"*{dtype}", "num_rows": "i32", "x_stride": "i32",
        "x_head_stride": "i32", "added_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants: dict[str, object] = {
        "HEADS": heads, "SIZE": size, "BLOCK": block, "ROWS": rows, "CENTER": center, "PER_HEAD": per_head,
    }  # fmt: skip
    divisible = ["x", "weight", "out", "x_stride", "x_head_stride", "added_stride"]
    for argument, present, word in (("added", add, f"*{dtype}"), ("bias", center, "*fp32")):
        if present:
            signature[argument] = word
            divisible.append(argument)
        else:
            constants[argument] = None
    return Variant(
        name=f"{name}, {dtype}",
        kernel=norm_rows,
        signature=signature,
        constants=constants,
        divisible=tuple(divisible),
        num_warps=warps,
    )
