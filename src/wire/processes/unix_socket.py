"""The path of a unix socket: which file there may be replaced."""

from __future__ import annotations

import os
import socket
import stat

LONGEST_PATH = 107
"""Bytes: sun_path holds 108 with its final zero."""

_ANSWER_TIMEOUT_S = 1.0


class PathTakenError(Exception):
    """One sentence that names the path and says what is there."""


def make_way(path: str) -> None:
    """Removes a socket of this user on which no process listens; any other file stays. Raises PathTakenError."""
    try:
        if not _is_there(path):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ANSWER_TIMEOUT_S)
            probe.connect(path)
    except FileNotFoundError:  # gone in the meantime
        return
    except ConnectionRefusedError:
        _remove(path)
    except OSError as error:
        raise PathTakenError(f"{path} cannot be used as a socket: {error.strerror or error}") from None
    else:
        raise PathTakenError(f"a process is listening on {path}")


def _is_there(path: str) -> bool:
    """Whether a socket of this user is there. Raises PathTakenError for anything else, and OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise PathTakenError(f"{path} exists and is not a socket")
    if found.st_uid != os.geteuid():
        raise PathTakenError(f"{path} is a socket of another user")
    return True


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PathTakenError(f"{path} is a stale socket that cannot be removed: {error.strerror}") from None
