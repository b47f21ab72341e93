"""The local hub cache: files and commits of models."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from pathlib import Path

from model_server.weights.hub_errors import Unreachable, translated

_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache() -> Path:
    """Return HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, or `hub` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def entry(model_id: str) -> Path:
    """Return a model's folder in the cache, present or not."""
    return cache() / f"models--{model_id.replace('/', '--')}"


def snapshot_of(model_id: str, commit: str) -> Path:
    return entry(model_id) / "snapshots" / commit


def discard(model_id: str, path: Path) -> None:
    """Remove a file and its blob, to be fetched again."""
    if path.is_symlink():
        # One step only: the library may have made the blob a link into a store that other models share.
        blob = Path(os.path.normpath(path.parent / path.readlink()))
        if blob.parent == Path(os.path.normpath(entry(model_id) / "blobs")):
            blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def is_commit(revision: str | None) -> bool:
    """Whether `revision` can never mean anything else."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def is_complete(model_id: str, revision: str | None) -> bool:
    """Whether `revision` is a wholly fetched commit."""
    return revision is not None and is_commit(revision) and _mark(model_id, revision).is_file()


def _mark(model_id: str, commit: str) -> Path:
    return entry(model_id) / "complete" / commit


def record_commit(model_id: str, revision: str | None, commit: str) -> None:
    """Make the branch or tag mean this commit, done last; a commit's own name is marked complete."""
    name = revision or "main"
    if name == commit:
        with contextlib.suppress(OSError):  # of a cache that can only be read the hub is asked again
            _mark(model_id, commit).parent.mkdir(parents=True, exist_ok=True)
            _mark(model_id, commit).touch()
        return
    path = entry(model_id) / "refs" / name
    if path.is_file() and path.read_text() == commit:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process' number: containers that share a cache have the same ones.
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    draft.write_text(commit)
    os.replace(draft, path)


def snapshot(model_id: str, revision: str | None, config: str = "config.json") -> Path | None:
    """Return the cached snapshot at `revision`, if its `config` is there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        with translated(model_id, revision):
            found = try_to_load_from_cache(model_id, config, revision=revision)
    except Unreachable:
        return None
    return Path(found).parent if isinstance(found, str) else None
