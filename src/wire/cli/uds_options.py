"""Options of launcher and router for HTTP on a unix socket."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from wire.cli.options import option
from wire.processes.unix_socket import LONGEST_PATH

UDS_FLAGS = ("uds", "uds_mode")


@dataclass(frozen=True, kw_only=True)
class UdsOptions:
    """Take HTTP on a unix socket instead of a port."""

    uds: Path | None = option(None, panel="HTTP", help="Path of a unix socket to serve HTTP on, instead of a port.")
    uds_mode: str = option("0600", panel="HTTP", help="Permissions of that socket's file, in octal digits.")


def check_uds(config: UdsOptions, certfile: object, error: type[Exception]) -> None:
    """Refuse a path or a mode that no socket can have, and TLS on it."""
    if not re.fullmatch(r"0?[0-7]{3}", config.uds_mode):
        raise error(f"`--uds-mode` {config.uds_mode} must be three octal digits, such as 0660")
    if config.uds is None:
        if config.uds_mode != "0600":
            raise error("`--uds-mode` is for `--uds`: give that too, or leave it out")
        return
    if certfile is not None:
        raise error("`--uds` and `--ssl-certfile` exclude each other: a unix socket has no TLS")
    if len(os.fsencode(os.path.abspath(config.uds))) > LONGEST_PATH:
        raise error(f"`--uds` {config.uds} is too long for a socket; use a shorter path")
