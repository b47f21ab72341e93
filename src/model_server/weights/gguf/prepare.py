"""The folder of a GGUF file: JSON configs, and a link (`wire.quantization.gguf`)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_server.errors import StartupError
from model_server.weights.gguf.config import config_of, generation_of
from model_server.weights.gguf.header import read_gguf
from model_server.weights.gguf.names import named_tensors
from wire.quantization.gguf import WEIGHTS, folder_of

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

    header = read_gguf(file)
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
    (folder / WEIGHTS).symlink_to(file.resolve())
    try:
        tokenizer_of(header.metadata, file).save(str(folder / _TOKENIZER))
    except _CONTRADICTIONS as error:
        raise StartupError(f"{file} has a tokenizer that cannot be made: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _publish(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not (target / _TOKENIZER).is_file():  # else another process was first
            raise
