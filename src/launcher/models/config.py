"""What `launcher models`, `launcher pull` and `launcher rm` were asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wire.cli.options import argument, option

_CACHE_HELP = "Folder of downloaded models. Default: the hub library's own."


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """A list of what is there."""

    huggingface_hub_cache: Path | None = option(None, help=_CACHE_HELP)
    json: bool = option(False, env=None, help="Print JSON instead of a table.")


@dataclass(frozen=True, kw_only=True)
class PullConfig:
    """One download."""

    model_id: str = argument(
        metavar="MODEL", has_flag=True, help="Hub id: `org/name`, or `org/name-GGUF:Q4_K_M` for one file."
    )
    revision: str | None = option(None, env="REVISION", help="Branch, tag or commit. Default: main.")
    huggingface_hub_cache: Path | None = option(None, help=_CACHE_HELP)


@dataclass(frozen=True, kw_only=True)
class RemoveConfig:
    """One model, or one revision of it."""

    model_id: str = argument(metavar="MODEL", has_flag=True, help="Hub id of the model.")
    revision: str | None = option(
        None, env=None, help="Only this branch, tag or commit (its first letters are enough). Default: all."
    )
    yes: bool = option(False, env=None, help="Remove without a question.")
    huggingface_hub_cache: Path | None = option(None, help=_CACHE_HELP)
