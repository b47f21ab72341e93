"""Registers the sub-folders of `--lora-root` at the start."""

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
    """Register each adapter's sub-folder; skip invalid, taken or unserved ones with a warning.

    Raises:
        StartupError: The root cannot be read, or shards are lost.
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
