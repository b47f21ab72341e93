"""Adapters that are registered when the server starts: the sub-folders of `--lora-root`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

from router.errors import StartupError
from router.lora.registry import AdapterLost, AdapterRefused, AdapterRegistry
from wire.adapters import check_name
from wire.lora.merged import ADAPTER_CONFIG

# Whose headers are read at the same time.
_AT_ONCE = 8


def _names(root: str) -> list[str]:
    with os.scandir(os.path.expanduser(root)) as entries:
        return sorted(entry.name for entry in entries if (Path(entry.path) / ADAPTER_CONFIG).is_file())


async def register_folders(registry: AdapterRegistry, root: str, *, taken: Collection[str]) -> int:
    """Each sub-folder with an adapter's config under its own name; how many they are. taken: names of the base model.

    Raises StartupError for a root that cannot be read, a name that is invalid or taken, and what is not served.
    """
    try:
        names = _names(root)
    except OSError as error:
        raise StartupError(f"--lora-root {root} cannot be read: {error.strerror}") from None
    for name in names:
        check_name(name, StartupError, taken=(*taken, *registry.names))
    places = asyncio.Semaphore(_AT_ONCE)

    async def register(name: str) -> None:
        async with places:
            await registry.register(name, name)

    try:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(register(name))
    except* (AdapterRefused, AdapterLost) as errors:
        raise StartupError(str(errors.exceptions[0])) from None
    return len(names)
