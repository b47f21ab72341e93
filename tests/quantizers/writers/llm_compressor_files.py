"""What llm-compressor makes, and what compressed-tensors decompresses from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import MagnitudePruningModifier, SparseGPTModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import AWQModifier, QuIPModifier, SpinQuantModifier
from tiny import Write, logits_of, numbers, plain_folder, write_all
from torch import Tensor

IGNORE = ["lm_head", "re:.*mlp.gate$"]


def quantized(kind: str, recipe: Callable[[], Any], /, **saving: Any) -> Write:
    """A checkpoint by a recipe. saving: options of save_pretrained."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, CompressedTensorsConfig

        plain = plain_folder(folder / "plain", kind)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        data = Dataset.from_list(numbers(8, 32))
        oneshot(model=model, recipe=recipe(), dataset=data, num_calibration_samples=8, max_seq_length=32)
        rounded = copy.deepcopy(model)
        model.save_pretrained(folder / "model", **{"save_compressed": True, **saving})
        is_quantized = "quantization_config" in (folder / "model/config.json").read_text()
        reading = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if is_quantized else {}
        read = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **reading)
        return logits_of(without_rounded_inputs(rounded if has_small_floats(rounded) else read))

    return write


def has_small_floats(model: Any) -> bool:
    """Whether matrices have 4-bit floats: read, they are rounded to bfloat16, and experts lose their scales."""
    schemes = [scheme for module in model.modules() if (scheme := getattr(module, "quantization_scheme", None))]
    return any(s.weights is not None and (s.weights.type, s.weights.num_bits) == ("float", 4) for s in schemes)


def without_rounded_inputs(model: Any) -> Any:
    """The model, which rounds its matrices if they are not rounded yet, and nothing else."""
    rounds = has_small_floats(model)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            module.quantization_enabled = rounds and scheme.weights is not None
            module.quantization_scheme = scheme.model_copy(
                update={"input_activations": None, "output_activations": None}
            )
    return model


def by_scheme(scheme: Any, ignore: list[str] | None = None, **fields: Any) -> Callable[[], Any]:
    return lambda: QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore or IGNORE, **fields)


def by_weights(inputs: dict[str, Any] | None = None, /, **weights: Any) -> Callable[[], Any]:
    """One group of these arguments."""
    group = {"targets": ["Linear"], "weights": weights, **({"input_activations": inputs} if inputs else {})}
    return lambda: QuantizationModifier(config_groups={"group_0": group}, ignore=IGNORE)


def cases() -> Iterator[tuple[str, Write]]:
    for scheme in PRESET_SCHEMES:
        yield scheme.lower(), quantized("llama", by_scheme(scheme))
    for kind in ("qwen2", "qwen3_moe", "starcoder2"):
        for scheme in ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4"):
            yield f"{scheme.lower()}-{kind}", quantized(kind, by_scheme(scheme))
    yield from arguments()
    yield from other_recipes()


def arguments() -> Iterator[tuple[str, Write]]:
    for bits in range(2, 9):
        for symmetric in (True, False):
            fields = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 32}
            yield f"int{bits}-groups-32-{'sym' if symmetric else 'asym'}", quantized("llama", by_weights(**fields))
    for kind, bits in (("int", 8), ("int", 4), ("float", 8), ("float", 4)):
        for strategy in ("tensor", "channel", "block"):
            block = {"block_structure": [64, 64]} if strategy == "block" else {}
            fields = {"num_bits": bits, "type": kind, "strategy": strategy, **block}
            yield f"{kind}{bits}-by-{strategy}", quantized("llama", by_weights(**fields))
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}
    yield (
        "w8a8-static-asym",
        quantized("llama", by_weights(inputs, num_bits=8, type="int", strategy="channel", symmetric=False)),
    )
    ordered = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    for order in ("group", "weight", "static", "dynamic"):
        group = {"targets": ["Linear"], "weights": {**ordered, "actorder": order}}
        recipe = _gptq(config_groups={"group_0": group})
        yield f"gptq-actorder-{order}", quantized("llama", recipe)


def _gptq(**fields: Any) -> Callable[[], Any]:
    return lambda: GPTQModifier(**{"ignore": IGNORE, **fields})


def other_recipes() -> Iterator[tuple[str, Write]]:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    yield "cache", quantized("llama", by_scheme("FP8_DYNAMIC", kv_cache_scheme=cache))
    heads = {**cache, "strategy": "attn_head"}
    yield "cache-by-head", quantized("llama", by_scheme("FP8_DYNAMIC", kv_cache_scheme=heads))
    yield "cache-alone", quantized("llama", lambda: QuantizationModifier(kv_cache_scheme=cache))
    yield (
        "attention",
        quantized(
            "llama",
            lambda: QuantizationModifier(
                config_groups={"group_0": {"targets": ["LlamaAttention"], "input_activations": cache}}
            ),
        ),
    )
    mixed = {
        "group_0": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "group_1": {
            "targets": ["re:.*(q|k|v|o)_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        },
    }  # fmt: skip
    yield "mixed", quantized("llama", lambda: QuantizationModifier(config_groups=mixed, ignore=IGNORE))
    floats = {"num_bits": 8, "type": "float", "strategy": "channel"}
    mixed_types = {**mixed, "group_0": {"targets": ["re:.*down_proj"], "weights": floats}}
    yield "mixed-types", quantized("llama", lambda: QuantizationModifier(config_groups=mixed_types, ignore=IGNORE))
    yield "head", quantized("llama", by_scheme("W8A16", ["re:.*embed"]))
    yield (
        "embedding",
        quantized(
            "llama", lambda: QuantizationModifier(targets=["Linear", "Embedding"], scheme="W8A16", ignore=["lm_head"])
        ),
    )
    yield "gptq", quantized("qwen2", _gptq(targets="Linear", scheme="W4A16"))
    yield "awq", quantized("llama", lambda: [AWQModifier(), by_scheme("W4A16_ASYM")()])
    yield "smoothquant", quantized("llama", lambda: [SmoothQuantModifier(smoothing_strength=0.8), by_scheme("W8A8")()])
    yield (
        "spinquant",
        quantized(
            "llama",
            lambda: [SpinQuantModifier(rotations=["R1", "R2"], transform_type="hadamard"), by_scheme("W4A16")()],
        ),
    )
    yield (
        "spinquant-online",
        quantized(
            "llama", lambda: [SpinQuantModifier(rotations=["R4"], transform_type="hadamard"), by_scheme("W4A16")()]
        ),
    )
    yield (
        "quip",
        quantized(
            "llama", lambda: [QuIPModifier(targets="Linear", transform_type="random-hadamard"), by_scheme("W4A16")()]
        ),
    )
    for structure in ("2:4", "0:0"):
        sparse = {"sparsity": 0.5, "mask_structure": structure}
        yield f"sparse-{structure.replace(':', '-')}", quantized("llama", lambda s=sparse: SparseGPTModifier(**s))
        yield (
            f"sparse-{structure.replace(':', '-')}-fp8",
            quantized("llama", lambda s=sparse: [SparseGPTModifier(**s), by_scheme("FP8_DYNAMIC")()]),
        )
    yield (
        "pruned",
        quantized(
            "llama",
            lambda: MagnitudePruningModifier(
                init_sparsity=0.0, final_sparsity=0.5, start=0, end=1, targets="__ALL_PRUNABLE__"
            ),
        ),
    )
    for form in ("dense", "naive-quantized", "int-quantized", "pack-quantized"):
        yield f"w8a16-as-{form}", quantized("llama", by_scheme("W8A16"), quantization_format=form)
    yield "fp8-not-compressed", quantized("llama", by_scheme("FP8"), save_compressed=False)


if __name__ == "__main__":
    write_all(cases())
