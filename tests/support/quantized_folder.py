"""Checkpoints that libraries have quantized, each beside a plain one of the weights that the library reads from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]
# A module's name and weight -> its tensors by the end of their names, and the weight as the library reads it.
Store = Callable[[str, Tensor], tuple[Stored, Tensor] | None]

PLAIN = (
    "embed", "lm_head", "norm", "router", "mlp.gate.", "block_sparse_moe.gate.", "wte", "wpe", "mixer.gate.",
    "feed_forward.gate.", "shared_expert_gate", "in_proj_a.", "in_proj_b.", "in_proj_ba.",
    "self_attn.b_proj.", "linear_attn.a_proj.", "linear_attn.b_proj.",
)  # fmt: skip


def quantize_folder(plain: Path, folder: Path, store: Store, config: Mapping[str, Any]) -> tuple[Path, Path]:
    """(quantized, decoded): copies of `plain`, every matrix of a layer stored by `store` where that gives anything."""
    quantized, decoded = folder / "quantized", folder / "decoded"
    for copy in (quantized, decoded):
        shutil.copytree(plain, copy)
    tensors, plain_tensors = load_file(plain / "model.safetensors"), {}
    stored: Stored = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        made = None
        if tensor.dim() == 2 and module != name and not any(part in name for part in PLAIN):
            made = store(module, tensor)
        if made is None:
            stored[name] = plain_tensors[name] = tensor
        else:
            stored |= {f"{module}.{end}": part.contiguous() for end, part in made[0].items()}
            plain_tensors[name] = made[1].to(tensor.dtype).contiguous()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(plain_tensors, decoded / "model.safetensors", metadata={"format": "pt"})
    file = quantized / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dict(config)}))
    return quantized, decoded


def block_fp8(block: int) -> tuple[Store, dict[str, Any]]:
    """As transformers writes its fine-grained fp8: matrices that the blocks do not divide stay plain."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=(block, block))
    quantizer: Any = type("Quantizer", (), {"quantization_config": config})()

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor] | None:
        made = Fp8Quantize(quantizer)._quantize_one(f"{module}.weight", weight)
        if len(made) == 1:
            return None
        read = Fp8Dequantize(quantizer)._dequantize_one(*made.values(), torch.float32)
        return {name.rpartition(".")[2]: tensor for name, tensor in made.items()}, read

    return store, json.loads(json.dumps(config.to_dict(), default=list))


def row_fp8() -> tuple[Store, dict[str, Any]]:
    """As fbgemm stores it: a scale for each row, and the bound of activations, which nothing here reads."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, codes.float() * scale

    return store, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}


def scalar_fp8() -> tuple[Store, dict[str, Any]]:
    """As modelopt stores it: one scale for the matrix, one for activations."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, codes.float() * scale

    return store, {"quant_method": "modelopt", "quant_algo": "FP8"}


def compressed(name: str, *schemes: Mapping[str, Any]) -> tuple[Store, dict[str, Any]]:
    """As compressed-tensors writes it: the first scheme that a module's name matches; `format` is that of the files.

    schemes: targets and weights of its QuantizationScheme, and the format of the modules that it is for.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from compressed_tensors.utils.match import match_name

    known = [QuantizationScheme(**scheme) for scheme in schemes]

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scheme = next(s for s in known if any(t == "Linear" or match_name(module, t) for t in s.targets))
        args = scheme.weights
        assert args is not None
        pieces = weight.view(len(weight), -1, args.group_size or weight.shape[1])
        least, most = pieces.amin(2), pieces.amax(2)
        if args.strategy == "tensor":
            least, most = weight.min(), weight.max()
        scale, zero_point = calculate_qparams(least, most, args)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = largest = generate_gparam(weight.min(), weight.max())
            state["weight_scale"] = calculate_qparams(least, most, args, global_scale=largest)[0]
        stored = compressor.compress(state, scheme)
        if args.strategy == "tensor_group":  # which the library reads in bfloat16
            return dict(stored), float4(stored["weight_packed"], stored["weight_scale"].float() / largest)
        return dict(stored), compressor.decompress(stored, scheme)["weight"]

    groups = {f"group_{i}": scheme.model_dump(mode="json") for i, scheme in enumerate(known)}
    return store, {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["lm_head"],
    }  # fmt: skip


def float4(numbers: Tensor, scales: Tensor) -> Tensor:
    """The library's numbers of 4 bits [out, in / 2], by their scales [out, groups]: float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    num_rows, num_bytes = numbers.shape
    values = unpack_fp4_from_uint8(numbers, num_rows, 2 * num_bytes, torch.float32)
    return values * scales.repeat_interleave(2 * num_bytes // scales.shape[1], 1)


def modelopt_nvfp4() -> tuple[Store, dict[str, Any]]:
    """As modelopt stores NVFP4: the scale of the matrix multiplies those of the groups."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

        groups = weight.view(len(weight), -1, 16)
        one = weight.abs().max() / (6 * 448)
        scales = (groups.abs().amax(2) / 6 / one).to(torch.float8_e4m3fn)
        steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        sizes = (groups / (scales.float() * one).unsqueeze(2)).abs().unsqueeze(3)
        nearest = steps[(sizes - steps).abs().argmin(3)].copysign(groups).view_as(weight)
        numbers = pack_fp4_to_uint8(nearest)
        stored = {"weight": numbers, "weight_scale": scales, "weight_scale_2": one, "input_scale": torch.tensor(0.1)}
        return stored, float4(numbers, scales.float() * one)

    return store, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
