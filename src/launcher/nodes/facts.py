"""What must be equal on all nodes: versions of libraries, and the model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from wire.lora.merged import ADAPTER_CONFIG

_LIBRARIES = ("tercet", "torch", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json")
_WEIGHTS = "*.safetensors"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute together."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def digests(directory: Path, adapters: Mapping[str, Path]) -> dict[str, str]:
    """Hash small files and adapters by content, weights by names and sizes."""
    found = {}
    for name in _FILES:
        path = directory / name
        if path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    sizes = sorted((path.name, path.stat().st_size) for path in directory.glob(_WEIGHTS))
    found["the weight files"] = hashlib.sha256(repr(sizes).encode()).hexdigest()
    for name, folder in adapters.items():
        found[f"LoRA adapter `{name}`"] = _content(folder)
    return found


def _content(folder: Path) -> str:
    """Hash what a shard reads of an adapter."""
    files = sorted(path for path in (folder / ADAPTER_CONFIG, *folder.glob(_WEIGHTS)) if path.is_file())
    parts = []
    for path in files:
        with path.open("rb") as file:
            parts.append((path.name, hashlib.file_digest(file, "sha256").hexdigest()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The first name, in the order of ours, whose value differs; None if all are the same."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)
