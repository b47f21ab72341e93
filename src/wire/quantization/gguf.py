"""A GGUF file's config and tokenizer: a folder of the hub cache with a link to the file, made by `download-weights`.

A file is named by path, or `org/name/FILE.gguf`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUFFIX = ".gguf"
WEIGHTS = "model.gguf"
"""The link."""
_TOKENIZER = "tokenizer.json"
# What is written may change from one version to the next.
_VERSION = 6
_LOCAL = ("/", "./", "../", "~")


def names_file(model_id: str) -> bool:
    """Whether a model id names a GGUF file, which need not exist."""
    return model_id.lower().endswith(SUFFIX) and not os.path.isdir(os.path.expanduser(model_id))


def in_repository(model_id: str) -> tuple[str, str] | None:
    """Return the hub's repository and file, unless local."""
    parts = model_id.split("/")
    is_local = model_id.startswith(_LOCAL) or ".." in parts or os.path.exists(model_id)
    if len(parts) < 3 or is_local or not names_file(model_id):
        return None
    return "/".join(parts[:2]), "/".join(parts[2:])


def file_of(model_id: str, revision: str | None, cache: Path) -> Path | None:
    """Return the local file that a model id names, if there."""
    asked = in_repository(model_id)
    if asked is None:
        file = Path(os.path.expanduser(model_id))
    else:
        repository = cache / f"models--{asked[0].replace('/', '--')}"
        try:
            commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = revision or "main"
        file = repository / "snapshots" / commit / asked[1]
    return file if file.is_file() else None


def folder_of(file: Path, cache: Path) -> Path:
    """Return the folder of a file's files, perhaps absent; changes with its size and time."""
    facts, path = file.stat(), file.resolve()
    key = f"{_VERSION}\0{path}\0{facts.st_size}\0{facts.st_mtime_ns}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return cache / ".tercet" / f"gguf-{digest[:32]}"


def found_folder(model_id: str, revision: str | None, cache: Path) -> Path | None:
    """The folder made of the file that a model id names, if it is there."""
    file = file_of(model_id, revision, cache)
    folder = None if file is None else folder_of(file, cache)
    return folder if folder is not None and (folder / _TOKENIZER).is_file() else None
