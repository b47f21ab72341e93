"""What `launcher launch` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.cli.options import argument, option

DEFAULT_URL = "http://127.0.0.1:3000"
Client = Literal["claude", "codex", "opencode", "open-webui"]


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One program and one server."""

    client: Client = argument(metavar="CLIENT", help="Program to set up: claude, codex, opencode or open-webui.")
    url: str = option(DEFAULT_URL, env=None, help="Address of the running server.")
    api_key: str | None = option(None, env="API_KEY", header=True, help="Bearer token of the server.")
    model: str | None = option(None, env=None, help="Name of the model. Default: the first that the server lists.")
    print: bool = option(False, env=None, help="Print the settings and write nothing.")
    yes: bool = option(False, env=None, short="y", help="Write without a question.")
