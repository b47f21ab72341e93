"""What bitsandbytes makes through transformers, and its own decoding (`dequantize`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import KINDS, Write, logits_of, plain_folder, write_all
from torch import Tensor


def quantized(kind: str, dtype: torch.dtype = torch.bfloat16, /, **options: Any) -> Write:
    """A checkpoint of BitsAndBytesConfig's options, of a plain model of `dtype`."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        plain = plain_folder(folder / "plain", kind, dtype)
        made = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=BitsAndBytesConfig(**options), dtype=dtype, device_map="cpu"
        )
        made.save_pretrained(folder / "model")
        read = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, device_map="cpu")
        for parameter in read.parameters():
            if state := getattr(parameter, "quant_state", None):
                state.dtype = torch.float32  # else numbers are rounded to the type of the plain model
        return logits_of(read.dequantize())

    return write


def cases() -> Iterator[tuple[str, Write]]:
    four = {"load_in_4bit": True}
    for kind in KINDS:
        yield f"int8-{kind}", quantized(kind, torch.float16, load_in_8bit=True)
        yield f"nf4-{kind}", quantized(kind, **four, bnb_4bit_quant_type="nf4")
        yield f"fp4-double-{kind}", quantized(kind, **four, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
    yield "fp4", quantized("llama", **four)
    yield "nf4-double", quantized("llama", **four, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield (
            f"nf4-of-{str(dtype).removeprefix('torch.')}",
            quantized("qwen2", dtype, **four, bnb_4bit_quant_type="nf4"),
        )
    for storage in ("bfloat16", "float16", "float32"):
        double = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        yield f"nf4-in-{storage}", quantized("llama", **four, **double, bnb_4bit_quant_storage=storage)
    yield "nf4-compute-float32", quantized("llama", **four, bnb_4bit_compute_dtype="float32")
    for bits in ("load_in_4bit", "load_in_8bit"):
        yield f"{bits}-skip-down", quantized("llama", **{bits: True}, llm_int8_skip_modules=["down_proj", "lm_head"])
        yield f"{bits}-skip-none", quantized("llama", **{bits: True}, llm_int8_skip_modules=[])
        yield f"{bits}-skip-layer", quantized("llama", **{bits: True}, llm_int8_skip_modules=["layers.0", "lm_head"])
    yield "int8-threshold-0", quantized("llama", load_in_8bit=True, llm_int8_threshold=0.0)
    yield "int8-threshold-1", quantized("llama", load_in_8bit=True, llm_int8_threshold=1.0)
    yield "int8-float16-weight", quantized("llama", torch.float16, load_in_8bit=True, llm_int8_has_fp16_weight=True)


if __name__ == "__main__":
    write_all(cases())
