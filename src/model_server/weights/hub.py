"""The hub and its local cache: the only file that speaks to huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from model_server.errors import StartupError


class Hub(Protocol):
    """What the download needs of a model repository. `model_id` and `revision` are the hub's words."""

    def files(self, model_id: str, revision: str | None) -> list[str]:
        """Paths of all files in the repository."""

    def fetch(self, model_id: str, file: str, revision: str | None) -> Path:
        """Bring one file into the cache, resuming a partial one, and return its path there."""


class Unreachable(Exception):
    """The network failed: another try may help."""


class HuggingFaceHub:
    """The real one. Raises Unreachable, or StartupError for what no retry mends (unknown or gated repository)."""

    def files(self, model_id: str, revision: str | None) -> list[str]:
        from huggingface_hub import HfApi

        with _translated(model_id, revision):
            return HfApi().list_repo_files(model_id, revision=revision)

    def fetch(self, model_id: str, file: str, revision: str | None) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # our log carries the progress
        with _translated(model_id, revision):
            return Path(hf_hub_download(model_id, file, revision=revision))


class _translated:
    """Inside, huggingface_hub's exceptions become ours."""

    def __init__(self, model_id: str, revision: str | None) -> None:
        self._revision = revision
        self._name = model_id if revision is None else f"{model_id}@{revision}"
        self._where = f"--model-id {model_id}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            raise StartupError(f"--model-id {self._name}: neither a directory nor a hub id") from error
        if isinstance(error, errors.GatedRepoError):
            raise StartupError(
                f"--model-id {self._name}: access is gated; ask for it on the hub, then set HF_TOKEN"
            ) from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise StartupError(
                f"{self._where}: the repository has no revision {self._revision!r}; --revision takes a branch, a tag "
                "or a full commit"
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise StartupError(
                f"{self._where}: the hub has no such model, or it is private: check the id; for a private one set "
                "HF_TOKEN"
            ) from error
        # The transport's own errors have the base that the hub's HTTP error has; its package changes with versions.
        if isinstance(error, (OSError, *errors.HfHubHTTPError.__bases__)):
            raise Unreachable((str(error).splitlines() or [type(error).__name__])[0]) from error


def snapshot(model_id: str, revision: str | None) -> Path | None:
    """The cached snapshot of `model_id` at `revision` (default: main); None if its config is not cached.

    Raises StartupError if `model_id` cannot be a hub id.
    """
    from huggingface_hub import try_to_load_from_cache

    with _translated(model_id, revision):
        found = try_to_load_from_cache(model_id, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None
