"""The folder of a GGUF file: JSON configs, and a link (`wire.quantization.gguf`)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.config import config_of, generation_of
from model_server.weights.gguf.header import GgufHeader, read_gguf
from model_server.weights.gguf.names import FACTORS, named_tensors
from wire.quantization.gguf import folder_of, link_of, parts_of

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
_CONTRADICTIONS = (ArithmeticError, LookupError, TypeError, ValueError)
"""What values of wrong types and sizes come to, here and in the tokenizers library."""


def prepare(file: Path, cache: Path) -> Path:
    """Return the folder in the hub cache, made if absent.

    Raises:
        StartupError: The file is not served, or the cache not writable.
        OSError: There is no file.
    """
    target = folder_of(file, cache)
    if (target / _TOKENIZER).is_file():
        return target
    started = time.perf_counter()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as unfinished:
            folder = Path(unfinished) / "made"
            folder.mkdir()
            _write(file, folder)
            _publish(folder, target)
    except OSError as error:
        raise StartupError(
            f"cannot write the config and tokenizer of {file} to {target.parent} ({error.strerror}): set HF_HOME (or "
            "--huggingface-hub-cache) to a folder that you may write"
        ) from error
    logger.info("Wrote config and tokenizer of %s to %s in %.1f s", file, target, time.perf_counter() - started)
    return target


def _write(file: Path, folder: Path) -> None:
    # Imported here: only for files that are new.
    from model_server.weights.gguf.tokenizer import tokenizer_config_of, tokenizer_of

    parts = [file.with_name(name) for name in parts_of(file.name)]
    header = _joined(parts)
    try:
        config = config_of(header, file)
        named_tensors(header, file)
        objects: Mapping[str, Mapping[str, Any]] = {
            "config.json": config,
            "generation_config.json": generation_of(header.metadata),
            "tokenizer_config.json": tokenizer_config_of(header.metadata),
        }
    except _CONTRADICTIONS as error:
        raise StartupError(f"{file} has metadata that contradicts itself: {_line(error)}") from error
    for name, value in objects.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for number, part in enumerate(parts, 1):
        (folder / link_of(number)).symlink_to(part.resolve())
    try:
        tokenizer_of(header.metadata, file).save(str(folder / _TOKENIZER))
    except _CONTRADICTIONS as error:
        raise StartupError(f"{file} has a tokenizer that cannot be made: {_line(error)}") from error


def _joined(parts: Sequence[Path]) -> GgufHeader:
    """Return the metadata of the first part with the tensors of all.

    Raises:
        StartupError: A part is missing, is of another file, or lacks tensors.
    """
    if missing := [part.name for part in parts if not part.is_file()]:
        raise StartupError(f"{parts[0]} is one of {len(parts)} parts, of which there is no {missing[0]} beside it")
    headers = [read_gguf(part) for part in parts]
    metadata, tensors = headers[0].metadata, dict(headers[0].tensors)
    if (count := metadata.get("split.count", 0) or 1) != len(parts):
        raise StartupError(
            f"{parts[0]} is one of {count!r:.40} parts: they must keep the names that they had, "
            "`NAME-00001-of-00003.gguf` and so on, in one folder"
        )
    for part, header in zip(parts[1:], headers[1:], strict=True):
        if header.metadata.get("split.no") != parts.index(part) or header.metadata.get("split.count") != count:
            raise StartupError(f"{part} is not the part of {parts[0]} that its name says")
        if twice := tensors.keys() & header.tensors.keys() or header.tensors.keys() & set(FACTORS):
            raise StartupError(f"{part} holds the tensor {min(twice)!r:.200}, which belongs into another part")
        tensors |= header.tensors
    if (expected := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise StartupError(f"the parts of {parts[0]} hold {len(tensors)} tensors of {expected!r:.40}")
    return GgufHeader(metadata, tensors)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _publish(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not (target / _TOKENIZER).is_file():  # else another process was first
            raise
