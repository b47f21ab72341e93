"""What torchao makes through transformers, and its own decoding (`dequantize` of its tensors)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as ao
from tiny import KINDS, Write, logits_of, plain_folder, write_all
from torch import Tensor, nn
from torchao.quantization import MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor


def quantized(
    kind: str,
    config: Callable[..., Any],
    dtype: torch.dtype = torch.bfloat16,
    of_transformers: Mapping[str, Any] | None = None,
    /,
    **fields: Any,
) -> Write:
    """A checkpoint by torchao's config of these fields, with TorchAoConfig's other options."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        from transformers import AutoModelForCausalLM, TorchAoConfig

        plain = plain_folder(folder / "plain", kind, dtype)
        quantization = TorchAoConfig(config(**fields), **(of_transformers or {}))
        made = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=quantization, dtype=dtype, device_map="cpu"
        )
        made.save_pretrained(folder / "model")
        read = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, device_map="cpu")
        for module in read.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if type(parameter.data) is not Tensor and hasattr(parameter, "dequantize"):
                    setattr(module, name, nn.Parameter(decoded(parameter), requires_grad=False))
        return logits_of(read)

    return write


def decoded(parameter: Any) -> Tensor:
    """In float32: most tensors decode to the type that they stand for, and round to it."""
    try:
        return parameter.dequantize(torch.float32).float()  # type: ignore[no-any-return]
    except TypeError:
        wide = parameter.to(torch.float32)
        return (wide if type(wide) is type(parameter) else parameter).dequantize().float()  # type: ignore[no-any-return]


def cases() -> Iterator[tuple[str, Write]]:
    for kind in KINDS:
        yield f"int8-{kind}", quantized(kind, ao.Int8WeightOnlyConfig)
        yield f"int4-groups-32-{kind}", quantized(kind, int4)
        yield f"fp8-{kind}", quantized(kind, ao.Float8WeightOnlyConfig)
    yield from eight_bits()
    yield from fewer_bits()
    yield from floats()
    yield from mixtures()
    yield from prototypes()


def eight_bits() -> Iterator[tuple[str, Write]]:
    rows_and_tensor = {"row": PerRow(), "tensor": PerTensor()}
    for name, granularity in {**rows_and_tensor, "groups-64": PerGroup(64), "groups-32": PerGroup(32)}.items():
        yield f"int8-by-{name}", quantized("llama", ao.Int8WeightOnlyConfig, granularity=granularity)
    inputs = ao.Int8DynamicActivationInt8WeightConfig
    for name, granularity in rows_and_tensor.items():
        yield f"int8-inputs-by-{name}", quantized("qwen2", inputs, granularity=granularity)
    yield "int8-inputs-asymmetric", quantized("llama", inputs, act_mapping_type=MappingType.ASYMMETRIC)
    yield "int8-inputs-decode", quantized("llama", inputs, weight_only_decode=True)
    yield "int8-inputs-reduced", quantized("llama", inputs, reduce_range=True)
    static = partial(ao.Int8StaticActivationInt8WeightConfig, act_quant_scale=torch.tensor([[0.05]]))
    yield "int8-static-inputs", quantized("llama", static, granularity=PerTensor())
    for dtype in (torch.float32, torch.float16):
        yield f"int8-of-{str(dtype).removeprefix('torch.')}", quantized("llama", ao.Int8WeightOnlyConfig, dtype)


def intx(**fields: Any) -> Any:
    return ao.IntxWeightOnlyConfig(**{"granularity": PerGroup(64), **fields})


def int4(**fields: Any) -> Any:
    return intx(**{"weight_dtype": torch.int4, "granularity": PerGroup(32), **fields})


def fewer_bits() -> Iterator[tuple[str, Write]]:
    for bits in range(1, 9):
        for mapping in MappingType:
            fields = {"weight_dtype": getattr(torch, f"int{bits}"), "mapping_type": mapping}
            yield f"int{bits}-{mapping.name.lower()}", quantized("llama", intx, **fields)
    yield "int4-by-axis", quantized("llama", int4, granularity=PerAxis(0))
    yield "int4-scales-float32", quantized("llama", int4, scale_dtype=torch.float32)
    for algorithm in ao.quant_api.IntxChooseQParamsAlgorithm:
        yield f"int4-by-{algorithm.value}", quantized("llama", int4, intx_choose_qparams_algorithm=algorithm)
    inputs = partial(ao.Int8DynamicActivationIntxWeightConfig, weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    for packing in ao.quant_api.IntxPackingFormat:
        yield f"int4-{packing.value}", quantized("llama", int4, intx_packing_format=packing)
        yield f"int4-int8-inputs-{packing.value}", quantized("llama", inputs, intx_packing_format=packing)
    for one in ao.quant_api.Int4PackingFormat:
        tinygemm = partial(ao.Int4WeightOnlyConfig, group_size=32, int4_packing_format=one)
        yield f"int4-tinygemm-{one.value}", quantized("llama", tinygemm)
    for dtype in (torch.float32, torch.float16):
        yield f"int4-of-{str(dtype).removeprefix('torch.')}", quantized("llama", int4, dtype)


def floats() -> Iterator[tuple[str, Write]]:
    inputs = ao.Float8DynamicActivationFloat8WeightConfig
    for name, granularity in {"row": PerRow(), "tensor": PerTensor(), "block": PerBlock([64, 64])}.items():
        yield f"fp8-by-{name}", quantized("llama", ao.Float8WeightOnlyConfig, granularity=granularity)
        both = [PerBlock([1, 128]), PerBlock([128, 128])] if name == "block" else granularity
        yield f"fp8-inputs-by-{name}", quantized("llama", inputs, granularity=both)
    yield "fp8-e5m2", quantized("llama", ao.Float8WeightOnlyConfig, weight_dtype=torch.float8_e5m2)
    static = partial(ao.Float8StaticActivationFloat8WeightConfig, act_quant_scale=torch.tensor(0.05))
    yield "fp8-static-inputs", quantized("llama", static)
    yield "fp8-inputs-int4", quantized("llama", ao.Float8DynamicActivationInt4WeightConfig)


def mixtures() -> Iterator[tuple[str, Write]]:
    int8, fp8 = ao.Int8WeightOnlyConfig(), ao.Float8WeightOnlyConfig()
    skip = {"modules_to_not_convert": ["down_proj", "lm_head"]}
    yield "skip-down", quantized("llama", ao.Int8WeightOnlyConfig, torch.bfloat16, skip)
    ends = {"include_input_output_embeddings": True}
    yield "embedding", quantized("llama", ao.Int8WeightOnlyConfig, torch.bfloat16, ends)
    for name, modules in {
        "module": {"model.layers.0.mlp.down_proj": int8, "_default": int4()},
        "pattern": {r"re:.*q_proj": fp8, "_default": int8},
        "plain": {r"re:.*o_proj": None, "_default": int8},
        "head": {"lm_head": int8},
    }.items():
        kind = "llama" if name == "module" else "qwen2"  # whole numbers of groups are for matrices alone, no biases
        yield f"mixed-by-{name}", quantized(kind, ao.FqnToConfig, fqn_to_config=modules)


def prototypes() -> Iterator[tuple[str, Write]]:
    """Forms that the library calls unfinished."""
    from torchao.prototype import mx_formats as mx

    for weight in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
        both = {"activation_dtype": weight, "weight_dtype": weight}
        name = str(weight).removeprefix("torch.")
        yield f"mx-{name}", quantized("llama", mx.MXDynamicActivationMXWeightConfig, **both)
    yield "nvfp4", quantized("llama", mx.NVFP4DynamicActivationNVFP4WeightConfig)
    yield "nvfp4-weights", quantized("llama", mx.NVFP4WeightOnlyConfig)


if __name__ == "__main__":
    write_all(cases())
