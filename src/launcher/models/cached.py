"""The models in the hub cache, by the hub library's own account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ArgumentValidation
from launcher.planning.model_info import hub_cache
from wire.cli.spelling import closest

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, DeleteCacheStrategy, HFCacheInfo

_COMMIT_LETTERS = 8


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """One revision of a model. size: bytes of its files, some of them perhaps also of others.

    used_at: seconds since 1970.
    """

    model_id: str
    revision: str
    """Its branches and tags, else the beginning of its commit."""
    commit: str
    size: int
    used_at: float
    is_whole: bool
    """No transfer of the model was cut off."""
    path: Path


def cached_models(environ: Mapping[str, str]) -> list[CachedModel]:
    """By name. Raises ArgumentValidation for a folder that cannot be read."""
    found = []
    for repository in _models(_scan(environ)):
        is_whole = not any((repository.repo_path / "blobs").glob("*.incomplete"))
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
    return sorted(found, key=lambda model: (model.model_id, model.revision))


def removal(model_id: str, revision: str | None, environ: Mapping[str, str]) -> DeleteCacheStrategy:
    """What removing a model, or one revision of it, takes away; nothing is removed yet. Raises ArgumentValidation."""
    scanned = _scan(environ)
    models = {repository.repo_id: repository for repository in _models(scanned)}
    if scanned is None or model_id not in models:
        similar = closest(model_id, list(models), letters_per_edit=4)
        hint = f"; did you mean {similar}?" if similar else "; launcher models lists what is there"
        raise ArgumentValidation(f"{model_id} is not in the cache {hub_cache(environ)}{hint}")
    return scanned.delete_revisions(*_commits(models[model_id], revision))


def _commits(repository: CachedRepoInfo, revision: str | None) -> list[str]:
    """Raises ArgumentValidation for a revision that is not there."""
    commits = [
        one.commit_hash
        for one in repository.revisions
        if revision is None or revision in one.refs or one.commit_hash.startswith(revision)
    ]
    if not commits:
        there = ", ".join(sorted(ref for one in repository.revisions for ref in one.refs)) or "commits only"
        raise ArgumentValidation(f"{repository.repo_id} has no revision {revision} in the cache (there: {there})")
    return commits


def _models(scanned: HFCacheInfo | None) -> list[CachedRepoInfo]:
    return [] if scanned is None else [one for one in scanned.repos if one.repo_type == "model"]


def _scan(environ: Mapping[str, str]) -> HFCacheInfo | None:
    """None: there is no such folder yet. Raises ArgumentValidation."""
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
