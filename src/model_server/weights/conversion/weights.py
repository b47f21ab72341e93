"""Pickled weights to safetensors beside them, if the user asks, never while serving.

A process reads each file (`unpickle`); verified results appear together, the index first.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.conversion import clean_process
from model_server.weights.header import read_header
from model_server.weights.locate import INDEX, indexed_files

logger = logging.getLogger(__name__)

PICKLE_INDEX = "pytorch_model.bin.index.json"
# Trainers leave these beside the weights.
_NO_WEIGHTS = ("arguments", "args", "training", "optimizer", "scheduler", "rng_state", "scaler", "adapter_model")
_ADAPTER = "adapter_model.bin"
_PREFIX = "pytorch_"
_UNPICKLE = "model_server.weights.conversion.unpickle"


def is_pickled_weights(name: str) -> bool:
    """Whether a name may be of pickled weights."""
    return name.endswith((".bin", ".pt", ".pth")) and not any(word in name for word in _NO_WEIGHTS)


def pickled_names(names: Sequence[str]) -> list[str]:
    """List the files to convert: `.bin`, else `.pt`, else `.pth`."""
    for suffix in (".bin", ".pt", ".pth"):
        found = sorted(name for name in names if name.endswith(suffix) and is_pickled_weights(name))
        if found:
            return found
    return []


def has_pickled_weights(directory: Path) -> bool:
    return (directory / PICKLE_INDEX).is_file() or any(is_pickled_weights(entry.name) for entry in directory.iterdir())


def pickled_files(directory: Path) -> list[Path]:
    """Return the pickled weights of an index, else by name."""
    index = directory / PICKLE_INDEX
    if index.is_file():
        return indexed_files(directory, index, (".bin",))
    names = pickled_names([entry.name for entry in directory.iterdir() if entry.is_file()])
    if not names:
        raise StartupError(f"{directory} holds no pickled weights to convert")
    return [directory / name for name in names]


def safetensors_name(pickled: str) -> str:
    """`pytorch_model-00001-of-00002.bin` -> `model-00001-of-00002.safetensors`."""
    return Path(pickled).stem.removeprefix(_PREFIX) + ".safetensors"


def convert_adapter(directory: Path) -> None:
    """Convert an adapter pickled by PEFT, if it is."""
    source = directory / _ADAPTER
    if source.is_file() and not any(directory.glob("*.safetensors")):
        convert(directory, [source])


def convert(directory: Path, sources: Sequence[Path] | None = None) -> list[Path]:
    """Convert pickled weights beside them, leaving the directory as it was on failure."""
    sources = pickled_files(directory) if sources is None else sources
    targets = {safetensors_name(source.name): source for source in sources}
    if len(targets) < len(sources):
        raise StartupError(f"{directory}: two files would both become one of {', '.join(sorted(targets))}")
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix=".converting-") as folder:
            for number, (name, source) in enumerate(targets.items(), start=1):
                started = time.perf_counter()
                clean_process.run(_UNPICKLE, source, Path(folder) / name, subject=str(source))
                logger.info("Convert: [%d/%d] %s in %.1f s", number, len(targets), name, time.perf_counter() - started)
            return _publish(directory, Path(folder), list(targets))
    except OSError as error:
        raise StartupError(f"cannot convert the weights in {directory}: {error.strerror}") from error


def _publish(directory: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Move the new files to their places."""
    weight_map: dict[str, str] = {}
    size = 0
    for name in names:
        for tensor, stored in read_header(folder / name).tensors.items():
            if tensor in weight_map:
                raise StartupError(f"Key {tensor} was found in multiple files: {name} and {weight_map[tensor]}")
            weight_map[tensor] = name
            size += stored.end - stored.begin
    if len(names) > 1:
        _write_index(folder / INDEX, weight_map, size)
        os.replace(folder / INDEX, directory / INDEX)
    for name in names:
        os.replace(folder / name, directory / name)
    return [directory / name for name in names]


def _write_index(path: Path, weight_map: Mapping[str, str], size: int) -> None:
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
    with path.open("x") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
