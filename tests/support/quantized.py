"""Quantized matrices and checkpoints as gptq's and awq's libraries write them, bit by bit in Python's integers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Numbers:
    """codes [out, in], zeros [out, groups] (both int64), scales [out, groups] float16, index [in]: the groups."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    index: Tensor
    bits: int

    def exact(self) -> Tensor:
        """[out, in] float32."""
        return (self.codes - self.zeros[:, self.index]).float() * self.scales.float()[:, self.index]


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool = False, index: Tensor | None = None) -> Numbers:
    """`weight` [out, in] to the nearest codes. group: -1: a whole row."""
    num_columns = weight.shape[1]
    group = num_columns if group == -1 else group
    index = torch.arange(num_columns) // group if index is None else index
    most = 2**bits - 1
    scales, zeros = [], []
    for number in range(int(index.max()) + 1):
        part = weight[:, index == number]
        if symmetric:
            scales.append((2 * part.abs().amax(1) / most).half())
            zeros.append(torch.full((len(part),), 2 ** (bits - 1)))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append(((high - low) / most).half())
            zeros.append((-low / scales[-1].float()).round().clamp(1, most).long())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = ((weight / scale.float()[:, index]).round().long() + zero[:, index]).clamp(0, most)
    return Numbers(codes, zero, scale, index, bits)


def shuffled_index(num_columns: int, group: int, seed: int = 0) -> Tensor:
    """The groups of columns in an order of activations."""
    return (torch.arange(num_columns) // group)[
        torch.randperm(num_columns, generator=torch.Generator().manual_seed(seed))
    ]


def stream(codes: Sequence[int], bits: int) -> list[int]:
    """Words of 32 bits as signed integers, the first code in the lowest bits."""
    whole = sum(code << bits * i for i, code in enumerate(codes))
    words = [(whole >> 32 * i) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def streams(codes: Tensor, bits: int) -> Tensor:
    """[n, count] -> [n, words] int32."""
    return torch.tensor([stream(row, bits) for row in codes.tolist()], dtype=torch.int32)


def gptq_tensors(numbers: Numbers, *, version: int = 1, with_index: bool = True) -> dict[str, Tensor]:
    """By name below the module."""
    zeros = numbers.zeros - 1 if version == 1 else numbers.zeros
    tensors = {
        "qweight": streams(numbers.codes, numbers.bits).t().contiguous(),
        "qzeros": streams(zeros.t(), numbers.bits),
        "scales": numbers.scales.t().contiguous(),
    }
    return {**tensors, "g_idx": numbers.index.int()} if with_index else tensors


def awq_tensors(numbers: Numbers) -> dict[str, Tensor]:
    """By name below the module."""

    def words(of_outputs: Tensor) -> Tensor:
        shuffled = of_outputs.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
        return streams(shuffled, 4)

    return {
        "qweight": words(numbers.codes.t()),
        "qzeros": words(numbers.zeros.t()),
        "scales": numbers.scales.t().contiguous(),
    }


def quantize_folder(
    source: Path,
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 32,
    act_order: bool = False,
    also: Sequence[str] = (),
    transposed: bool = False,
) -> Path:
    """A copy of `source` with all matrices of its layers quantized, and those whose names end as in `also`.

    transposed: plain matrices are [in, out].

    Beside it, under `plain`, one with the numbers that these stand for.
    """  # fmt: skip
    plain = folder / "plain"
    for copy in (folder / "quantized", plain):
        shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    stored, exact = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        chosen = any(part in name for part in (".layers.", ".h.", ".blocks.")) and not module.endswith(
            (".gate", "norm")
        )
        if tensor.dim() != 2 or not (chosen or module.endswith(tuple(also) or "\0")):
            stored[name] = exact[name] = tensor
            continue
        weight = tensor.float().t() if transposed else tensor.float()
        index = shuffled_index(weight.shape[1], group) if act_order else None
        numbers = rounded(weight, bits, group, symmetric=method == "gptq", index=index)
        made = awq_tensors(numbers) if method == "awq" else gptq_tensors(numbers)
        stored.update({f"{module}.{key}": value for key, value in made.items()})
        exact[name] = numbers.exact().t().contiguous() if transposed else numbers.exact()
    save_file(stored, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    config = folder / "quantized" / "config.json"
    block = {"quant_method": method, "bits": bits, "group_size": group}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": block}))
    return folder / "quantized"
