"""Whether a download fits and may be written, and what disk errors mean."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from model_server.errors import StartupError
from model_server.weights.download.progress import size

ADVICE = "set HF_HOME (or --huggingface-hub-cache) to a folder"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NotWritable(StartupError):
    """Nothing can be added to the cache, which may do as it is."""


def check_writable(folder: Path) -> None:
    """Raise NotWritable unless files can be made in `folder`, present or not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise NotWritable(str(explained(error, folder))) from error


def check_room(folder: Path, needed: int) -> None:
    """Refuse unless `needed` more bytes fit."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(
            f"the download needs {size(needed)} and the disk of {folder} has {size(free)} free: make room, or {ADVICE} "
            "on a larger disk"
        )


def explained(error: OSError, folder: Path) -> StartupError:
    """Say what to do about an error of the cache's file system."""
    if error.errno in _FULL:
        return StartupError(
            f"the disk of the cache {folder} is full; whole files are kept: make room and start again, or "
            f"{ADVICE} on a larger disk"
        )
    what = error.strerror or type(error).__name__
    return StartupError(f"cannot write the cache {folder} ({what}): {ADVICE} that you may write")
