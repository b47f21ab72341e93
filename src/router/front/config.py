"""FrontConfig: the options of the router's port, and those of several models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.config import RouterConfig
from wire.cli.options import option


@dataclass(frozen=True, kw_only=True)
class FrontConfig(RouterConfig):
    """Options of the front; of the router's only those of its port count."""

    control: Path | None = option(None, help="Socket of the launcher.")
    default_model: str | None = option(None, help="Model of requests that name none.")
    no_autoload: bool = option(False, help="Requests load no model.")
    model_start_timeout: int = option(120, minimum=1, help="Seconds that a request waits for its model.")
    max_waiting_requests: int = option(64, minimum=1, help="Most requests that wait for one model.")
