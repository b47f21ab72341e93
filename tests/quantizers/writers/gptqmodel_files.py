"""What gptqmodel makes, and what its own linear layers on a CPU multiply by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Its own choice on a machine of two cores is one, which it then refuses.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import config as configs
from tiny import KINDS, Write, numbers, plain_folder, with_plain_matrices, write_all
from torch import Tensor, nn

FORMAT, METHOD = configs.FORMAT, configs.METHOD


def quantized(
    kind: str, config: Callable[..., Any] = QuantizeConfig, backend: str = "torch", /, **fields: Any
) -> Write:
    """A checkpoint by one of the library's configs. backend: what reads it."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        plain = plain_folder(folder / "plain", kind, torch.float16)
        made = GPTQModel.load(str(plain), config(**fields, device="cpu", offload_to_disk=False))
        made.quantize(numbers(8, 32), batch_size=2)
        made.save(str(folder / "model"))
        read = GPTQModel.load(str(folder / "model"), device="cpu", backend=BACKEND(backend), dtype=torch.float16)
        return with_plain_matrices(read.model, is_quantized)

    return write


def is_quantized(module: nn.Module) -> bool:
    return type(module) is not nn.Linear and hasattr(module, "in_features")


def cases() -> Iterator[tuple[str, Write]]:
    for kind in KINDS:
        yield f"gptq-{kind}", quantized(kind)
        yield f"gptq-asym-{kind}", quantized(kind, sym=False, desc_act=True, group_size=32)
    yield from gptq()
    yield from others()


def gptq() -> Iterator[tuple[str, Write]]:
    for form in (FORMAT.GPTQ, FORMAT.GPTQ_V2, FORMAT.GPTQ_P):
        for bits in range(2, 9):
            for sym in (True, False):
                name = f"{form.value}-{bits}-bits-{'sym' if sym else 'asym'}"
                yield name, quantized("llama", format=form, bits=bits, sym=sym, group_size=64, desc_act=False)
    for group in (-1, 16, 32, 64, 128):
        for ordered in (False, True):
            fields = {"group_size": group, "desc_act": ordered, "sym": False}
            yield f"group-{group}{'-desc-act' if ordered else ''}", quantized("llama", **fields)
    for form in (FORMAT.MARLIN, FORMAT.BITBLAS):
        yield f"gptq-{form.value}", quantized("llama", format=form, desc_act=False)
    dynamic = {r"+:.*layers\.0\..*down_proj.*": {"bits": 8, "group_size": 64}, r"-:.*layers\.1\..*q_proj.*": {}}
    yield "gptq-dynamic", quantized("llama", dynamic=dynamic)
    yield "gptq-head", quantized("llama", lm_head=True)
    yield "gptq-not-sequential", quantized("llama", true_sequential=False)
    own = configs.GPTQConfig
    yield "gptq-static-groups", quantized("llama", own, static_groups=True, desc_act=True, group_size=32)
    yield "gptq-act-group-aware", quantized("llama", own, act_group_aware=True, desc_act=False, group_size=32)
    yield "gptq-mse", quantized("llama", own, mse=2.0)
    yield "gptaq", quantized("llama", own, gptaq=configs.GPTAQConfig())
    yield "foem", quantized("llama", own, foem=configs.FOEMConfig())
    for rotation in ("hadamard", "random"):
        yield f"gptq-rotated-{rotation}", quantized("llama", rotation=rotation)


def others() -> Iterator[tuple[str, Write]]:
    awq = configs.AWQConfig
    for form in (FORMAT.GEMM, FORMAT.GEMV, FORMAT.GEMV_FAST, FORMAT.LLM_AWQ, FORMAT.MARLIN):
        for sym in (True, False):
            name = f"awq-{form.value}-{'sym' if sym else 'asym'}"
            yield name, quantized("llama", awq, "torch_awq", format=form, sym=sym, group_size=64)
    for kind in KINDS:
        yield f"awq-{kind}", quantized(kind, awq, "torch_awq", sym=False, group_size=64)
    for bits in (4, 8):
        yield f"rtn-{bits}-bits", quantized("llama", configs.RTNConfig, bits=bits, group_size=32)
    fp8 = configs.FP8Config
    for method in ("row", "tensor"):
        yield f"fp8-by-{method}", quantized("llama", fp8, "fp8_torch", weight_scale_method=method)
    yield "fp8-by-block", quantized("llama", fp8, "fp8_torch", weight_scale_method="block", weight_block_size=[64, 64])
    yield "fp8-e5m2", quantized("llama", fp8, "fp8_torch", format="float8_e5m2")
    for bits in ("q2_0", "q4_0", "q8_0", "q4_k_m", "q5_k_m", "q6_k"):
        yield f"gguf-{bits}", quantized("llama", configs.GGUFConfig, "gguf_torch", bits=bits)
    yield "qqq", quantized("llama", configs.QQQConfig, "qqq_torch")
    yield "exl3", quantized("llama", configs.EXL3Config, "exl3_torch")
    yield "bitsandbytes", quantized("llama", configs.BitsAndBytesConfig, "bitsandbytes")


if __name__ == "__main__":
    write_all(cases())
