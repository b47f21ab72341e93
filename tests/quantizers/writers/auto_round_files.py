"""What auto-round makes, and what its own linear layers on a CPU multiply by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny import KINDS, Write, logits_of, plain_folder, texts, with_plain_matrices, write_all
from torch import Tensor, nn

# Rounded to the nearest: it is the form that counts.
ROUNDING = {
    "iters": 0, "disable_opt_rtn": True, "nsamples": 4, "seqlen": 16, "batch_size": 2, "device_map": "cpu",
    "disable_model_free": True, "enable_torch_compile": False,
}  # fmt: skip


def quantized(kind: str, form: str, scheme: str = "W4A16", /, **options: Any) -> Write:
    """A checkpoint in one of the library's formats, by one of its schemes."""

    def write(folder: Path) -> Callable[[Tensor], Tensor]:
        from auto_round import AutoRound
        from transformers import AutoModelForCausalLM, AutoRoundConfig

        plain = plain_folder(folder / "plain", kind, torch.float16)
        made = AutoRound(str(plain), scheme=scheme, dataset=texts(4, 24), **{**ROUNDING, **options})
        _, written = made.quantize_and_save(str(folder / "made"), format=form)
        Path(written if isinstance(written, str) else written[0]).rename(folder / "model")
        if "awq" in (folder / "model/config.json").read_text():
            return logits_of(decoded_awq(folder, AutoModelForCausalLM))
        # Its own linear layers for files of other libraries, too.
        reading = {"quantization_config": AutoRoundConfig()} if form == "auto_gptq" else {}
        read = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, device_map="cpu", **reading)
        if any(type(module).__name__ == "FakeActQuantLinear" for module in read.modules()):
            raise RuntimeError("the library does not read this on a CPU")
        for module in read.modules():
            module.quantization_enabled = False  # of compressed-tensors: it rounds activations
        return with_plain_matrices(read, is_quantized)

    return write


def decoded_awq(folder: Path, auto: Any) -> Any:
    """The plain model with the matrices that the library's function decodes; none of its layers on a CPU takes them."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    said = json.loads((folder / "model/config.json").read_text())["quantization_config"]
    model = auto.from_pretrained(folder / "plain", dtype=torch.float32)
    stored = {name: t for file in (folder / "model").glob("*.safetensors") for name, t in load_file(file).items()}
    model.load_state_dict(stored, strict=False)
    for name in [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]:
        tensors = [stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")]
        group = len(tensors[0]) // len(tensors[2])
        weight = dequantize_gemm(tensors[0], tensors[1], tensors[2].float(), said["bits"], group)
        with torch.no_grad():
            model.get_submodule(name).weight.copy_(weight.T)
    return model


def is_quantized(module: nn.Module) -> bool:
    return type(module) is not nn.Linear and hasattr(module, "in_features")


def cases() -> Iterator[tuple[str, Write]]:
    for kind in KINDS:
        for form in ("auto_round", "auto_gptq", "auto_awq"):
            yield f"{form}-{kind}", quantized(kind, form, group_size=32)
    yield from whole_numbers()
    yield from other_schemes()
    yield from mixtures()


def whole_numbers() -> Iterator[tuple[str, Write]]:
    for form in ("auto_round", "auto_round:gptqmodel", "auto_round:auto_awq", "auto_gptq", "auto_awq"):
        for bits in (2, 3, 4, 5, 6, 7, 8):
            for sym in (True, False):
                name = f"{form.replace(':', '-')}-{bits}-bits-{'sym' if sym else 'asym'}"
                yield name, quantized("llama", form, f"W{bits}A16", sym=sym, group_size=64)
        for group in (-1, 32):
            yield f"{form.replace(':', '-')}-group-{group}", quantized("llama", form, group_size=group, sym=False)
    yield "auto_round-tuned", quantized("llama", "auto_round", iters=2, sym=False)
    yield "auto_gptq-optimal-rounding", quantized("llama", "auto_gptq", disable_opt_rtn=False)


def other_schemes() -> Iterator[tuple[str, Write]]:
    schemes = (
        "MXFP4", "MXFP4_RCEIL", "MXFP8", "MXFP8_RCEIL", "MXFP6", "MXINT4", "NVFP4", "NVFP4_E5M3", "FPW8A16",
        "FP8_STATIC", "FP8_BLOCK", "INT8_W8A8", "INT4", "W4A16_MIXED",
    )  # fmt: skip
    for form in ("auto_round", "llm_compressor"):
        for scheme in schemes:
            if (form, scheme) == ("llm_compressor", "FP8_STATIC"):
                continue  # read, its plain head is multiplied by scales that nothing has set
            yield f"{form}-{scheme.lower()}", quantized("llama", form, scheme)
    for bits in (2, 3, 4, 8):
        yield f"llm_compressor-{bits}-bits", quantized("llama", "llm_compressor", f"W{bits}A16", group_size=64)
        yield (
            f"llm_compressor-{bits}-bits-asym",
            quantized("llama", "llm_compressor", f"W{bits}A16", group_size=64, sym=False),
        )
    yield "fp8-fp8_block", quantized("llama", "fp8", "FP8_BLOCK")
    yield "auto_round-mlx", quantized("llama", "auto_round:mlx")
    yield "mlx", quantized("llama", "mlx")
    for scheme in ("MXFP4", "NVFP4", "FP8_STATIC", "MXFP8"):
        yield f"auto_round-{scheme.lower()}-qwen3_moe", quantized("qwen3_moe", "auto_round", scheme)


def mixtures() -> Iterator[tuple[str, Write]]:
    eight = {"model.layers.0.mlp.down_proj": {"bits": 8}, "model.layers.1.self_attn.q_proj": {"bits": 16}}
    for form in ("auto_round", "auto_gptq", "llm_compressor"):
        yield f"{form}-mixed", quantized("llama", form, layer_config=eight)
    yield "auto_round-cache", quantized("llama", "auto_round", "FP8_STATIC", static_kv_dtype="fp8")
    yield "auto_round-rotated", quantized("llama", "auto_round", "MXFP4", rotation_config="default")


if __name__ == "__main__":
    write_all(cases())
