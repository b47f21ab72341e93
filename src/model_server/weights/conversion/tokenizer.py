"""A tokenizer.json made once by transformers, for models without one, beside them or in the hub cache
(`wire.tokenizer_file`).
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.conversion import clean_process
from wire import tokenizer_file

logger = logging.getLogger(__name__)

_KINDS = "tokenizer.model, vocab.json with merges.txt, vocab.txt"
_BUILD = "model_server.weights.conversion.build_tokenizer"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "TOKENIZERS_PARALLELISM": "false"}


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a tokenizer.json, or its material."""
    if tokenizer_file.find(directory) is not None:
        return True
    return bool(tokenizer_file.sources(path.name for path in directory.iterdir()))


def ensure_tokenizer(directory: Path) -> Path:
    """Return the model's tokenizer.json, made if absent."""
    found = tokenizer_file.find(directory)
    if found is not None:
        return found
    sources = tokenizer_file.sources(path.name for path in directory.iterdir())
    if not sources:
        raise StartupError(nothing_found(str(directory)))
    started = time.perf_counter()
    logger.info("No tokenizer.json: making one of %s", " and ".join(sources))
    path = _converted(directory)
    logger.info("Wrote %s in %.1f s", path, time.perf_counter() - started)
    return path


def nothing_found(where: str) -> str:
    return f"{where} has no tokenizer.json, and nothing to make one of ({_KINDS})"


def _converted(directory: Path) -> Path:
    error: OSError | None = None
    for target in (directory / tokenizer_file.NAME, tokenizer_file.converted_copy(directory)):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as folder:
                draft = Path(folder) / tokenizer_file.NAME
                _run(directory, draft)
                os.replace(draft, target)
        except OSError as caught:
            error = caught
            continue
        return target
    assert error is not None
    raise StartupError(
        f"cannot write a tokenizer.json for {directory} ({error.strerror}): set HF_HOME (or --huggingface-hub-cache) "
        "to a folder that you may write"
    ) from error


def _run(source: Path, target: Path) -> None:
    subject = f"the tokenizer of {source}"
    clean_process.run(_BUILD, source, target, subject=subject, passed_on=("HOME",), environment=_OFFLINE)
