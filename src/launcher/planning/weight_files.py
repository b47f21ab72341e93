"""The weight files of a model on disk: their size, and what the headers of safetensors files say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wire.model_files import MAX_BYTES, most_stored, open_regular, read_object
from wire.quantization import gguf
from wire.quantization.config import SCALES, WORDS

_POINTER, _PAGES = b"version https://git-lfs", (b"<!doctype html", b"<html")


def pretended(file: Path) -> str | None:
    """Say what a download wrote instead of a file, and what to do."""
    try:
        with open_regular(file, OSError) as opened:
            start = opened.read(64).lstrip().lower()
    except OSError:
        return None
    if start.startswith(_POINTER):
        return "a pointer of Git LFS and not the file: run `git lfs pull` in its folder"
    if start.startswith(_PAGES):
        return "a web page and not the file: its link has /resolve/ where the page's has /blob/"
    return None


def type_in(path: Path) -> str | None:
    """Return the type of most safetensors weights in a folder, if any can be read."""
    return most_stored(
        (str(entry.get("dtype")), entry["data_offsets"][1] - entry["data_offsets"][0])
        for file in path.glob("*.safetensors")
        for entry in _entries(file).values()
        if isinstance(entry, dict) and _are_offsets(entry.get("data_offsets"))
    )


def _are_offsets(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(type(offset) is int for offset in found)


def tensors_of_codes(path: Path) -> dict[str, Sequence[int]]:
    """Return the shapes of the tensors that identify gptq and awq, from headers that name one."""
    shapes: dict[str, Sequence[int]] = {}
    for file in path.glob("*.safetensors"):
        stored = shapes_in(file, naming=f'{WORDS}"')
        shapes.update({name: shape for name, shape in stored.items() if name.endswith((WORDS, SCALES))})
    return shapes


def shapes_in(file: Path, naming: str = "") -> dict[str, Sequence[int]]:
    """Read the shapes in a safetensors header that contains the text `naming`."""
    found = ((name, entry.get("shape")) for name, entry in _entries(file, naming).items() if isinstance(entry, dict))
    return {
        name: shape
        for name, shape in found
        if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    }


def _entries(file: Path, naming: str = "") -> dict[str, Any]:
    """The header of a safetensors file as `shapes_in` reads it."""
    entries: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError), open_regular(file, ValueError) as opened:
        text = opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_BYTES))
        entries = json.loads(text) if naming.encode() in text else {}
    return entries if isinstance(entries, dict) else {}


def weight_bytes(path: Path) -> int | None:
    try:
        if (path / gguf.WEIGHTS).is_file():
            return sum(link.stat().st_size for link in gguf.links(path))
        return weights_among({file.name: file.stat().st_size for file in path.glob("*.safetensors")})
    except OSError:
        return None


def has_all_weights(path: Path) -> bool:
    """Whether every file that the index in `path` names is there."""
    try:
        files = read_object(path / "model.safetensors.index.json", ValueError).get("weight_map")
    except ValueError:
        return True
    if (path / "model.safetensors").is_file():  # the whole model, or the shards refuse it
        return True
    names = {str(name) for name in files.values()} if isinstance(files, dict) else set()
    return all((path / name).is_file() for name in names)


def weights_among(sizes: Mapping[str, int]) -> int | None:
    """Bytes of the files that a shard would read, near enough: Mistral's second copy (`consolidated`) is left out."""
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors") and "/" not in name}
    first = [size for name, size in weights.items() if not name.startswith("consolidated")]
    return sum(first or weights.values()) or None
