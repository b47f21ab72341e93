"""BatchOptions: options of the launcher and of the router for `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.cli.options import option

_PANEL = "Operation"
DEFAULT_FILE_SIZE = 200 << 20
DEFAULT_STORAGE = 10 << 30
UNFINISHED = "unfinished"
"""Name of a file in `--batch-dir` that is there while a batch has not ended: the launcher keeps its model loaded."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of OpenAI's Batch API."""

    batch_dir: Path | None = option(
        None, panel=_PANEL,
        help="Folder for the files and batches of OpenAI's Batch API, which is served if it is given. A restart "
        "continues batches. Their requests have `priority` 1: others come first.",
    )  # fmt: skip
    batch_file_size: int | None = option(
        None, panel=_PANEL, unit="bytes", minimum=1, help="Largest file of requests. Default: 200MiB."
    )
    batch_storage: int | None = option(
        None, panel=_PANEL, unit="bytes", minimum=1,
        help="Bytes of files beyond which an API key may upload no more; without --keys-file of all clients. Default: "
        "10GiB.",
    )  # fmt: skip


BATCH_FLAGS = ("batch_dir", "batch_file_size", "batch_storage")
"""Those that the launcher hands on to the router."""


def check_batches(options: BatchOptions, error: type[Exception]) -> None:
    """Refuse options without the folder that they are about. Raises `error`."""
    if options.batch_dir is not None:
        return
    for flag, value in (("--batch-file-size", options.batch_file_size), ("--batch-storage", options.batch_storage)):
        if value is not None:
            raise error(f"`{flag}` needs `--batch-dir`: name the folder")
