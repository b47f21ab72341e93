"""What the precisions `int8` and `int4` of a shape are, and the checkpoint that int4 is read from.

int8: the plain checkpoint with `--quantize eetq`. int4: the same weights rounded to 4 bits in groups of 128 inputs, as
gptq's writers store them (v1, symmetric, columns in order). Embedding and head stay bfloat16 in both, as in the
checkpoints that people download; so does the arithmetic around the products. q8_0 and q4_k_m: GGUF files that
llama.cpp's tools make (`servers`), head and embedding as these leave them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peers.checkpoints import FOLDER, checkpoint

GROUP = 128
# Bits that a weight of a layer takes, with its share of scales (float16) and zero points.
BITS = {"int8": 8.0, "int4": 4 + (16 + 4) / GROUP, "q8_0": 8.5, "q4_k_m": 4.85}
# Of these all servers read the same GGUF file.
GGUF_TYPES = {"q8_0": "Q8_0", "q4_k_m": "Q4_K_M"}
# Of a precision whose quantized weights are multiplied as float32.
_WIDE = "-float32"
_CODES_PER_WORD = 8
_MIDDLE = 8


def stored(shape: str, precision: str) -> Path:
    """The folder that Tercet reads a precision of a shape from, made at the first call."""
    return gptq_checkpoint(checkpoint(shape), FOLDER / f"{shape}-gptq") if precision == "int4" else checkpoint(shape)


def quantize_flag(precision: str) -> str | None:
    """`--quantize` of a precision."""
    return "eetq" if precision == "int8" else None


def weights_of(precision: str) -> str:
    """What a server is compared with: servers of the same quantization, or of any plain type."""
    kind = precision.removesuffix(_WIDE)
    return kind if kind in BITS else "plain"


def arithmetic(precision: str) -> str:
    """The type in which a precision computes."""
    if precision in BITS:
        return "bfloat16"
    return "float32" if precision.endswith(_WIDE) else precision


def gptq_checkpoint(plain: Path, folder: Path) -> Path:
    """`folder`, with the matrices of the layers of `plain` in 4 bits; made unless it is there."""
    finished = folder / "model.safetensors"
    if finished.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    with safe_open(plain / "model.safetensors", framework="pt") as source:
        for name in source.keys():  # noqa: SIM118  (it is no dictionary)
            tensor = source.get_tensor(name)
            if tensor.dim() == 2 and ".layers." in name:
                module = name.removesuffix(".weight")
                tensors.update({f"{module}.{part}": t for part, t in gptq_tensors(tensor).items()})
            else:
                tensors[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
        "desc_act": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(plain / file, folder / file)
    partial = folder / "partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(finished)
    return folder


def gptq_tensors(weight: Tensor) -> dict[str, Tensor]:
    """The stored tensors of a matrix [out, in], each weight rounded to the nearest; in is a multiple of 8."""
    num_rows, num_columns = weight.shape
    num_groups = -(-num_columns // GROUP)
    values = F.pad(weight.float(), (0, num_groups * GROUP - num_columns)).view(num_rows, num_groups, GROUP)
    scales = (values.abs().amax(2) * 2 / 15).half()  # [out, groups]
    divisors = torch.where(scales > 0, scales, 1).float().unsqueeze(2)
    codes = (values / divisors).round_().add_(_MIDDLE).clamp_(0, 15).view(num_rows, -1)[:, :num_columns]
    words = codes.int().t().reshape(num_columns // _CODES_PER_WORD, _CODES_PER_WORD, num_rows)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, -1, 1)
    return {
        "qweight": (words << shifts).sum(1).int(),  # the sum is of 64 bits, of which the lower ones stay
        "qzeros": torch.full((num_groups, num_rows // _CODES_PER_WORD), 0x77777777, dtype=torch.int32),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(num_columns, dtype=torch.int32) // GROUP,
    }
