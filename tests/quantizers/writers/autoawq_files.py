"""What autoawq makes, and what its own linear layers on a CPU multiply by; with the last transformers that it knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from tiny import Write, plain_folder, texts, with_plain_matrices, write_all
from torch import Tensor, nn

KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "starcoder2": {}, "gpt_neox": {"num_key_value_heads": 4}, "phi3": {}, "mistral": {},
    "stablelm": {}, "cohere": {},
}  # fmt: skip
"""Starcoder 2 has scales of an activation. The library's code for other types does not know this transformers."""


def quantized(kind: str, /, **options: Any) -> Write:
    """A checkpoint by the library's options."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        from transformers import AutoTokenizer

        plain = plain_folder(folder / "plain", kind, torch.float16, **KINDS[kind])
        made = AutoAWQForCausalLM.from_pretrained(str(plain), device_map="cpu", safetensors=True)
        config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", **options}
        made.quantize(
            AutoTokenizer.from_pretrained(plain), quant_config=config, calib_data=texts(8, 64), max_calib_seq_len=64,
            max_calib_samples=8, n_parallel_calib_samples=1,
        )  # fmt: skip
        made.save_quantized(str(folder / "model"))
        return with_plain_matrices(made.model, is_quantized)

    return write


def is_quantized(module: nn.Module) -> bool:
    return type(module).__name__.startswith("WQLinear")


def cases() -> Iterator[tuple[str, Write]]:
    for kind in KINDS:
        yield kind, quantized(kind)
    for group in (64, 128):
        yield f"group-{group}", quantized("llama", q_group_size=group)


if __name__ == "__main__":
    write_all(cases())
