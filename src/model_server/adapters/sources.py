"""From `--lora-adapters` to folders on this machine. Reads the disk only."""

from __future__ import annotations

from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.hub_cache import snapshot
from wire.adapters import AdapterSource, adapter_sources
from wire.lora.merged import ADAPTER_CONFIG


def adapter_folders(value: str | None) -> dict[str, Path]:
    """Return the folders of `--lora-adapters` by name, in order."""
    return {source.name: _folder(source) for source in adapter_sources(value, StartupError)}


def _folder(source: AdapterSource) -> Path:
    if source.is_folder:
        return Path(source.place).expanduser()
    found = snapshot(source.place, source.revision, ADAPTER_CONFIG)
    if found is None:
        raise StartupError(
            f"LoRA adapter `{source.name}`: {source.place} is not in the local hub cache; fetch it there with "
            f"`hf download {source.place}`, or give a folder"
        )
    return found
