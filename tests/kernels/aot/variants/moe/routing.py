"""What the kernels of `model_server.kernels.moe.routing` are compiled for."""

from __future__ import annotations

from typing import Any

from aot.variant import Variant
from model_server.kernels.moe.routing import _route, _sizes


def variants() -> list[Variant]:
    """Routers of published models."""
    return [
        _variant("mixtral", 8, 2, "bf16", SOFTMAX=True, NORM=1),
        _variant("gpt_oss", 128, 4, "bf16", SOFTMAX=True, NORM=1),
        _variant("qwen3_moe", 128, 8, "bf16", SOFTMAX=True, NORM=1),
        _variant("qwen2_moe", 60, 4, "fp16", SOFTMAX=True),
        _variant("dbrx", 16, 4, "bf16", SOFTMAX=True, NORM=2),
        _variant("llama4", 128, 1, "bf16"),
        _variant("deepseek_v2", 160, 6, "fp32", SOFTMAX=True, NUM_GROUPS=8, TOP_GROUPS=3),
        _variant("deepseek_v3", 256, 8, "fp32", NUM_GROUPS=8, TOP_GROUPS=4, BEST_TWO=True, CORRECTED=True, NORM=1),
        _variant("1024 experts", 1024, 8, "fp32", SOFTMAX=True, NORM=1),
    ]


def _variant(name: str, num_experts: int, top_k: int, dtype: str, **given: Any) -> Variant:
    constants = {
        "SOFTMAX": False, "CORRECTED": False, "BEST_TWO": False, "NORM": 0, "NUM_GROUPS": 1, "TOP_GROUPS": 1,
        "NUM_EXPERTS": num_experts, "TOP_K": top_k,
    } | given  # fmt: skip
    sizes = _sizes(num_experts, constants["NUM_GROUPS"], top_k)
    num_warps = sizes.pop("num_warps")
    return Variant(
        name=f"moe_route_{name}",
        kernel=_route,
        signature={
            "logits": f"*{dtype}", "correction": "*fp32" if constants["CORRECTED"] else f"*{dtype}",
            "weights": "*fp32", "chosen": "*i64", "scaling": "fp32",
        },
        constants=constants | sizes,
        divisible=("logits", "correction", "weights", "chosen"),
        num_warps=num_warps,
    )  # fmt: skip
