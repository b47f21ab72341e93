"""What `launcher doctor` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.cli.options import option


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """The address of a server, and where it would keep its models."""

    hostname: str = option("0.0.0.0", help="Address that the server would listen on.")
    port: int = option(3000, minimum=1, maximum=65535, help="Port that the server would listen on.")
    huggingface_hub_cache: Path | None = option(None, help="Folder of downloaded models.")
    json: bool = option(False, env=None, help="Print JSON instead of lines.")
