"""Adapters that are registered when the server starts: the sub-folders of `--lora-root`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from pathlib import Path

from router.errors import StartupError
from router.lora.registry import AdapterLost, AdapterRefused, AdapterRegistry
from wire.adapters import check_name
from wire.lora.merged import ADAPTER_CONFIG

logger = logging.getLogger(__name__)

# Whose headers are read at the same time.
_AT_ONCE = 8


def _names(root: str) -> list[str]:
    with os.scandir(os.path.expanduser(root)) as entries:
        return sorted(entry.name for entry in entries if (Path(entry.path) / ADAPTER_CONFIG).is_file())


async def register_folders(registry: AdapterRegistry, root: str, *, taken: Collection[str]) -> int:
    """Each sub-folder with an adapter's config under its own name; how many they are. taken: names of the base model.

    A folder whose name is invalid or taken, and one with what is not served, is left out with a warning. Raises
    StartupError for a root that cannot be read, and for shards that are lost.
    """
    try:
        names = _names(root)
    except OSError as error:
        raise StartupError(f"--lora-root {root} cannot be read: {error.strerror}") from None
    places = asyncio.Semaphore(_AT_ONCE)

    async def register(name: str) -> bool:
        async with places:
            try:
                check_name(name, AdapterRefused, taken=(*taken, *registry.names))
                await registry.register(name, name)
            except AdapterRefused as error:
                logger.warning("A folder of --lora-root is left out: %s", error)
                return False
        return True

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(register(name)) for name in names]
    except* AdapterLost as errors:
        raise StartupError(str(errors.exceptions[0])) from None
    return sum(task.result() for task in tasks)
