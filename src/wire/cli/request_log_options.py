"""RequestLogOptions: options of the launcher and of the router for a file with a line for each request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.cli.options import option

_PANEL = "Operation"
RequestLogLevel = Literal["usage", "trace", "full"]
DEFAULT_SIZE = 100 << 20


@dataclass(frozen=True, kw_only=True)
class RequestLogOptions:
    """Options of the request log."""

    request_log: Path | None = option(
        None, panel=_PANEL,
        help="File that gets a line of JSON for each POST request: key, route, status, tokens, times; no text of it, "
        "but at the level `full`.",
    )  # fmt: skip
    request_log_level: RequestLogLevel | None = option(
        None, panel=_PANEL,
        help="`trace` adds salted hashes of each prompt's blocks of 64 tokens: which prompts begin alike. "
        "`full` adds bodies and answers, with all that clients send. Default: usage.",
    )  # fmt: skip
    request_log_size: int | None = option(
        None, panel=_PANEL, unit="bytes", minimum=1,
        help="Size at which a new file is begun; the last four are kept as FILE.1 to FILE.4. Default: 100MiB.",
    )  # fmt: skip


REQUEST_LOG_FLAGS = ("request_log", "request_log_level", "request_log_size")
"""Those that the launcher hands on to the router."""


def check_request_log(options: RequestLogOptions, error: type[Exception]) -> None:
    """Refuse options without the file that they are about. Raises `error`."""
    if options.request_log is not None:
        return
    for flag, value in (
        ("--request-log-level", options.request_log_level),
        ("--request-log-size", options.request_log_size),
    ):
        if value is not None:
            raise error(f"`{flag}` needs `--request-log`: name the file")
