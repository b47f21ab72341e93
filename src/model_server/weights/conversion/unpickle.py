"""Pickled weights to safetensors: `python -P -m model_server.weights.conversion.unpickle SOURCE TARGET`.

The only place that unpickles, without secrets, only tensors: torch's restricted unpickler, of a safe version, on its
zip format. Prints one line if it refuses.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from model_server.weights.conversion.clean_process import die_with_parent
from model_server.weights.header import read_header
from wire.model_files import open_regular

# CVE-2025-32434: before it, weights_only=True could still be made to run code.
OLDEST_TORCH = (2, 6)
MAX_PICKLE_BYTES = 64 * 2**20
# Tensors may be stored once and shown larger (expanded): what is written may not be much larger than what was read.
MAX_GROWTH_BYTES = 64 * 2**20

_ZIP_MAGIC = b"PK\x03\x04"
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_WRAPPERS = ("state_dict", "model_state_dict")
_HEADS = frozenset({"lm_head", "embed_out", "output", "output_layer", "head"})


class Refused(Exception):
    """Why the file is not converted, in one line."""


def main(source: Path, target: Path) -> int:
    _confine()
    try:
        convert_file(source, target)
    except Refused as refusal:
        sys.stdout.write(f"{refusal}\n")
        return 1
    except OSError as error:
        sys.stdout.write(f"{error.filename or target}: {error.strerror}\n")
        return 1
    return 0


def _confine() -> None:
    """End with the parent, without a core file of the weights."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def convert_file(source: Path, target: Path) -> None:
    """Write the tensors to the new `target`, and verify it.

    Raises:
        Refused: The file, or torch, is not safe to read.
    """
    check_torch(torch.__version__)
    _check_format(source)
    tensors = _tensors_of(source, _load(source))
    kept, dropped = without_duplicates(tensors)
    num_bytes = sum(tensor.nbytes for tensor in kept.values())
    if num_bytes > source.stat().st_size + MAX_GROWTH_BYTES:
        raise Refused(f"{source} would become {num_bytes} bytes of tensors, far more than it holds")
    write(target, kept, {**dropped, "format": "pt"})
    _verify(source, target, kept)


def check_torch(version: str) -> None:
    """Refuse a torch with an unsafe unpickler."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        raise Refused(f"torch {version} cannot read pickled weights safely; install torch >= 2.6")


def _check_format(source: Path) -> None:
    """Accept only torch.save's format since 1.6: an uncompressed zip with one pickle."""
    with open_regular(source, Refused) as file:
        if file.read(4) != _ZIP_MAGIC:
            raise Refused(
                f"{source} is not in torch's zip format: files from before torch 1.6, and bare pickles, are not "
                "converted; load and save it again with a newer torch where you trust it"
            )
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Refused(f"{source} is damaged or incomplete: {_first_line(error)}") from None
    names = {entry.filename.partition("/")[2] for entry in entries}
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        raise Refused(f"{source} is a TorchScript program, not weights")
    pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
        raise Refused(f"{source} is not what torch.save writes of a state dict")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise Refused(f"{source} is compressed, which torch.save never does")


def _load(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:Unsupported (?:global|class|operand)|GLOBAL) ([\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise Refused(f"{source} holds more than tensors{what}: it was not loaded, nothing in it was run") from None
    except OSError:
        raise
    except Exception as error:  # whatever a hostile file makes of torch
        raise Refused(f"{source} is damaged or incomplete: {_first_line(error)}") from None


def _tensors_of(source: Path, value: Any) -> dict[str, Tensor]:
    """Return the state dict, perhaps wrapped once."""
    for name in _WRAPPERS:
        if isinstance(value, Mapping) and isinstance(value.get(name), Mapping):
            value = value[name]
    if not isinstance(value, Mapping) or not value:
        raise Refused(f"{source} holds no state dict")
    tensors: dict[str, Tensor] = {}
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise Refused(f"{source}: entry {name!r:.200} is no tensor but {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _NAMES:
            raise Refused(f"{source}: tensor {name!r:.200} is {tensor.layout}, {tensor.dtype}: not converted")
        if name == "__metadata__":
            raise Refused(f"{source}: no tensor may be called {name}")
        tensors[name] = tensor.detach()
    return tensors


def without_duplicates(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Drop tensors that are others, and map them: kept are `shared`, what is no head, the first."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype)
        key = (*place, tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        groups.setdefault(key, []).append(name)
    kept, dropped = {}, {}
    for names in groups.values():
        first = min(names, key=_rank)
        kept[first] = tensors[first]
        dropped.update({name: first for name in names if name != first})
    return kept, dropped


def _rank(name: str) -> tuple[int, str]:
    parts = name.split(".")
    if "shared" in parts:
        return 0, name
    return (2 if _HEADS.intersection(parts[-2:]) else 1), name


def write(target: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensor by tensor; the library would hold all twice."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(tensors[name]).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _verify(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Compare every byte through the serving library (NaN equals NaN)."""
    header = read_header(target)
    with safe_open(target, framework="pt", device="cpu") as file:
        if set(header.tensors) != set(tensors):
            raise Refused(f"{source}: the converted file does not name the same tensors")
        for name, tensor in tensors.items():
            back = file.get_tensor(name)
            same = back.dtype == tensor.dtype and back.shape == tensor.shape
            if not same or not torch.equal(_bytes_of(back), _bytes_of(tensor)):
                raise Refused(f"{source}: tensor {name!r:.200} is not the same after the conversion")


def _first_line(error: BaseException) -> str:
    return next((line for line in _lines(error) if line.strip()), type(error).__name__)[:300]


def _lines(error: BaseException) -> Iterable[str]:
    return str(error).splitlines()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
