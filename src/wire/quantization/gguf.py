"""A GGUF file's config and tokenizer: a folder of the hub cache with a link to the file, made by `download-weights`.

A file is named by path, or `org/name/FILE.gguf`.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

SUFFIX = ".gguf"
WEIGHTS = "model.gguf"
"""The link; further parts of the file have more."""
_LATER = "model-part-"
_TOKENIZER = "tokenizer.json"
# What is written may change from one version to the next.
_VERSION = 6
_LOCAL = ("/", "./", "../", "~")
_PART = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$", re.IGNORECASE)


def names_file(model_id: str) -> bool:
    """Whether a model id names a GGUF file, which need not exist."""
    return model_id.lower().endswith(SUFFIX) and not os.path.isdir(os.path.expanduser(model_id))


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of a file, which any of them names; of a whole file its own."""
    match = _PART.search(name)
    if match is None:
        return [name]
    count = max(int(match[2]), 1)
    return [f"{name[: match.start()]}-{part:05d}-of-{match[2]}{name[-len(SUFFIX) :]}" for part in range(1, count + 1)]


def stem_of(name: str) -> str | None:
    """Return a file's name without suffix and number of a part; None: another file."""
    match = _PART.search(name)
    return name[: match.start()] if match else name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else None


def without_later_parts(names: Iterable[str]) -> list[str]:
    """Return whole files and first parts, in order."""
    return [name for name in names if parts_of(name)[0] == name]


def links(folder: Path) -> list[Path]:
    """Return the links to the file of a folder that was made of one: to its parts in their order."""
    return [folder / WEIGHTS, *sorted(folder.glob(f"{_LATER}*{SUFFIX}"))]


def link_of(part: int) -> str:
    """Return the name of the link to a part, counted from 1."""
    return WEIGHTS if part == 1 else f"{_LATER}{part:05d}{SUFFIX}"


def first_link(link: Path) -> Path:
    """Return the link to the first part beside one to any part."""
    return link.with_name(WEIGHTS) if link.name.startswith(_LATER) else link


def in_repository(model_id: str) -> tuple[str, str] | None:
    """Return the hub's repository and file, unless local."""
    parts = model_id.split("/")
    is_local = model_id.startswith(_LOCAL) or ".." in parts or os.path.exists(model_id)
    if len(parts) < 3 or is_local or not names_file(model_id):
        return None
    return "/".join(parts[:2]), "/".join(parts[2:])


def file_of(model_id: str, revision: str | None, cache: Path) -> Path | None:
    """Return the local file that a model id names, of several parts the first, if there."""
    asked = in_repository(model_id)
    if asked is None:
        file = Path(os.path.expanduser(model_id))
        file = file.with_name(parts_of(file.name)[0])
    else:
        repository = cache / f"models--{asked[0].replace('/', '--')}"
        try:
            commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            commit = revision or "main"
        file = repository / "snapshots" / commit / parts_of(asked[1])[0]
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
