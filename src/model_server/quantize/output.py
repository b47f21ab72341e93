"""The quantized checkpoint in gptq's first format, which TGI, vLLM and transformers read."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantization.formats.common.words import WORD
from model_server.quantize.progress import Progress, new_file, writing
from model_server.quantize.solver import Rounded, Rounding
from model_server.weights.checkpoint import Checkpoint
from model_server.weights.header import read_headers
from model_server.weights.locate import INDEX, stays_inside
from wire.model_files import open_regular
from wire.text.counting import counted

logger = logging.getLogger(__name__)

# Held in memory while it is written.
MOST_FILE_BYTES = 2 * 2**30
# Of the checkpoint's folder, beside the weights: tokenizer, templates, settings of generation.
_COPIED = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.md", "LICENSE*")
_NOT_COPIED = ("config.json", INDEX, "quantize_config.json", "quant_config.json")


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [n, count] into int32 words, the first lowest."""
    per_word = WORD // bits
    shifts = torch.arange(per_word, device=codes.device) * bits
    words = (codes.view(len(codes), -1, per_word).long() << shifts).sum(dim=2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def tensors_of(module: str, rounded: Rounded, bits: int) -> dict[str, Tensor]:
    """Return a module's tensors; zero points are stored less one."""
    num_groups, num_rows = rounded.scales.shape
    zeros = torch.full((num_groups, num_rows), rounded.middle - 1, dtype=torch.uint8)
    found = {
        "qweight": packed(rounded.codes.cpu(), bits).t(),
        "qzeros": packed(zeros, bits),
        "scales": rounded.scales.cpu(),
        "g_idx": rounded.groups.cpu(),
    }
    return {f"{module}.{name}": tensor for name, tensor in found.items()}


def copies(directory: Path) -> list[Path]:
    """List the files to copy beside the weights.

    Raises:
        StartupError: One is not regular, or a link out of the folder, by which any file could be uploaded.
    """
    found = sorted({path for pattern in _COPIED for path in directory.glob(pattern) if path.name not in _NOT_COPIED})
    for path in found:
        if not stays_inside(directory, Path(os.path.realpath(path))):
            raise StartupError(f"{path} is a link that leads out of its folder: put the file there, or remove the link")
        try:
            open_regular(path, StartupError).close()
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}") from error
    return found


def write(checkpoint: Checkpoint, output: Path, progress: Progress, how: Rounding, copied: Sequence[Path]) -> None:
    """Write a whole model folder over what is there."""
    quantized = read_headers([progress.layer(number) for number in range(progress.num_done)])
    removed = {name.rpartition(".")[0] + ".weight" for header in quantized.values() for name in header.tensors}
    sources: dict[str, tuple[Path, int]] = {}
    for path, header in {**checkpoint.headers, **quantized}.items():
        for name, stored in header.tensors.items():
            if name not in removed:
                sources[name] = (path, stored.end - stored.begin)
    with writing(output):
        _write_config(checkpoint, output, how)
        _write_tensors(sources, output)
        for path in copied:
            with open_regular(path, StartupError) as source, new_file(output / path.name) as target:
                shutil.copyfileobj(source, target)


def upload(folder: Path, model_id: str) -> None:
    """Upload to a hub repository, made if absent."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(model_id, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=model_id, commit_message="Quantized weights")
    except (OSError, ValueError) as error:  # the hub's errors are among them
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartupError(f"--upload-to-model-id {model_id}: {reason}; {folder} is whole") from error


def _write_tensors(sources: Mapping[str, tuple[Path, int]], output: Path) -> None:
    """Write one result file at a time, from tensors' sources and sizes."""
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(sources):
        if files[-1] and size + sources[name][1] > MOST_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += sources[name][1]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name: _tensor(sources[name][0], name) for name in names}
        # Of several entries the library writes any first, and the same run is to give the same bytes.
        save_file(tensors, output / file, {"format": "pt"})
        (output / file).chmod((output / "config.json").stat().st_mode)  # the library's files are for their owner alone
        weight_map |= dict.fromkeys(names, file)
        logger.info("Wrote %s: %s", file, counted(len(names), "tensor"))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(size for _, size in sources.values())}, "weight_map": weight_map}
        _write_object(output / INDEX, index)


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt", device="cpu") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def _write_config(checkpoint: Checkpoint, output: Path, how: Rounding) -> None:
    said = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": how.bits,
        "group_size": how.group,
        "desc_act": how.by_activation,
        "damp_percent": how.damping,
        "static_groups": False,
        "sym": True,
    }
    fields = {**checkpoint.fields, "quantization_config": said}
    _write_object(output / "config.json", fields)


def _write_object(path: Path, fields: Mapping[str, object]) -> None:
    with new_file(path) as file:
        file.write(json.dumps(fields, indent=2).encode() + b"\n")
