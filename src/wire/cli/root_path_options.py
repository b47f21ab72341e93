"""The option of launcher and router for a path before all routes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wire.cli.options import option

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, kw_only=True)
class RootPathOptions:
    """Serve below a path."""

    root_path: str | None = option(
        None, panel="HTTP",
        help="Path that a proxy puts before all routes, as /llm; it is cut off where a request has it.",
    )  # fmt: skip


def check_root_path(config: RootPathOptions, error: type[Exception]) -> None:
    """Refuse what is no path, or ends in a slash. Raises `error`."""
    if config.root_path is not None and not _PATH.fullmatch(config.root_path):
        raise error(
            f"`--root-path` {config.root_path} must be a path as /llm or /team/llm: a slash before each part, none at "
            "the end, letters, digits and . _ ~ -"
        )
