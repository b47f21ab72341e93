"""The local hub cache, asked through huggingface_hub without a network."""

from __future__ import annotations

from pathlib import Path

from model_server.errors import StartupError


def snapshot(model_id: str, revision: str | None) -> Path | None:
    """The cached snapshot of `model_id` at `revision` (default: main); None if its config is not cached.

    Raises StartupError if `model_id` cannot be a hub id.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_id, "config.json", revision=revision)
    except HFValidationError as error:
        raise StartupError(f"--model-id {model_id}: neither a directory nor a hub id") from error
    return Path(found).parent if isinstance(found, str) else None
