"""The models in the hub cache, by the hub library's own account."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ArgumentValidation
from launcher.planning.model_info import cached_models as names_in_cache
from launcher.planning.model_info import hub_cache
from wire.cli.spelling import closest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_COMMIT_LETTERS = 8


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """One revision of a model."""

    model_id: str
    revision: str
    """Its branches and tags, else the beginning of its commit."""
    commit: str
    # Bytes of its files, which may also belong to other revisions.
    size: int
    # Seconds since 1970.
    used_at: float
    is_whole: bool
    """No transfer of the model, in whichever revision, was cut off."""
    path: Path


def cached_models(environ: Mapping[str, str]) -> list[CachedModel]:
    """By name. Raises ArgumentValidation for a folder that cannot be read."""
    repositories = _models(_scan(environ))
    found = []
    for repository in repositories:
        is_whole = not _unfinished(repository.repo_path)
        for revision in repository.revisions:
            found.append(
                CachedModel(
                    model_id=repository.repo_id,
                    revision=", ".join(sorted(revision.refs)) or revision.commit_hash[:_COMMIT_LETTERS],
                    commit=revision.commit_hash,
                    size=revision.size_on_disk,
                    used_at=repository.last_accessed,
                    is_whole=is_whole,
                    path=revision.snapshot_path,
                )
            )
    whole = {repository.repo_id for repository in repositories}
    begun = [model_id for model_id in names_in_cache(environ) if model_id not in whole]
    found += [one for model_id in begun if (one := _begun(model_id, environ)) is not None]
    return sorted(found, key=lambda model: (model.model_id, model.revision))


def _begun(model_id: str, environ: Mapping[str, str]) -> CachedModel | None:
    """A model of which nothing is complete; the hub library does not count such a folder."""
    folder = _folder(model_id, environ)
    parts = []
    for part in _unfinished(folder):
        with contextlib.suppress(FileNotFoundError):  # a download has just completed it
            parts.append(part.stat())
    if not parts:
        return None
    return CachedModel(
        model_id=model_id, revision="-", commit="", size=sum(part.st_size for part in parts),
        used_at=max(part.st_mtime for part in parts), is_whole=False, path=folder,
    )  # fmt: skip


def _folder(model_id: str, environ: Mapping[str, str]) -> Path:
    return hub_cache(environ) / f"models--{model_id.replace('/', '--')}"


def _unfinished(folder: Path) -> list[Path]:
    """Transfers that were cut off."""
    return list((folder / "blobs").glob("*.incomplete"))


class Removal:
    """What is taken away of one model; nothing is before `execute`. size: bytes that become free."""

    def __init__(self, model_id: str, size: int, work: Callable[[], None], folders: Sequence[Path]) -> None:
        self.size = size
        self._model_id = model_id
        self._work = work
        self._folders = folders

    def execute(self) -> None:
        """Raises ArgumentValidation if something is left."""
        reason = ""
        try:
            self._work()
        except OSError as error:
            reason = f": {error.strerror}"
        # The hub library only warns of what it may not remove.
        left = next((folder for folder in self._folders if folder.exists()), None)
        if left is not None or reason:
            raise ArgumentValidation(f"{self._model_id} could not be removed wholly ({left or 'its files'}){reason}")


def removal(model_id: str, revision: str | None, environ: Mapping[str, str]) -> Removal:
    """Plan the removal of a model, or of one revision."""
    scanned = _scan(environ)
    models = {repository.repo_id: repository for repository in _models(scanned)}
    if scanned is not None and model_id in models:
        chosen = _chosen(models[model_id], revision)
        plan = scanned.delete_revisions(*[one.commit_hash for one in chosen])
        return Removal(model_id, plan.expected_freed_size, plan.execute, [one.snapshot_path for one in chosen])
    begun = _begun(model_id, environ) if model_id in names_in_cache(environ) else None
    if begun is not None:
        return Removal(model_id, begun.size, lambda: shutil.rmtree(begun.path), [begun.path])
    similar = closest(model_id, list(models), letters_per_edit=4)
    hint = f"; did you mean {similar}?" if similar else "; launcher models lists what is there"
    raise ArgumentValidation(f"{model_id} is not in the cache {hub_cache(environ)}{hint}")


def _chosen(repository: CachedRepoInfo, revision: str | None) -> list[CachedRevisionInfo]:
    """Return all revisions, or the one meant: a branch or tag, a commit, or its beginning.

    Raises:
        ArgumentValidation: There is none, or several.
    """
    if revision is None:
        return list(repository.revisions)
    by_name = [one for one in repository.revisions if revision in one.refs]
    by_commit = [one for one in repository.revisions if revision and one.commit_hash.startswith(revision)]
    found = by_name or by_commit
    if len(found) == 1:
        return found
    there = ", ".join(
        sorted(", ".join(sorted(one.refs)) or one.commit_hash[:_COMMIT_LETTERS] for one in repository.revisions)
    )
    what = f"several revisions that begin with {revision}" if found else f"no revision {revision!r} in the cache"
    raise ArgumentValidation(f"{repository.repo_id} has {what} (there: {there})")


def _models(scanned: HFCacheInfo | None) -> list[CachedRepoInfo]:
    return [] if scanned is None else [one for one in scanned.repos if one.repo_type == "model"]


def _scan(environ: Mapping[str, str]) -> HFCacheInfo | None:
    """Read the cache; None if there is no such folder yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    folder = hub_cache(environ)
    try:
        return scan_cache_dir(folder)
    except CacheNotFound:
        return None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ArgumentValidation(f"the hub cache {folder} cannot be read: {reason}") from None
