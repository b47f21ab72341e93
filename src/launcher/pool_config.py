"""PoolConfig: the options of several models at one address."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ArgumentValidation
from wire.cli.options import option

_PANEL = "Several models"
_U32 = 2**32 - 1
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smh]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Options of models that are started on demand and unloaded when idle."""

    models: Path | None = option(
        None, env="MODELS_FILE", panel=_PANEL,
        help="YAML file of models to serve at one address, each with options of its own: docs/running-for-others.md.",
    )  # fmt: skip
    keep_alive: str | None = option(
        None, panel=_PANEL, metavar="TIME",
        help="Idle time after which a model is unloaded, such as 90s, 30m or 2h; 0 at once, -1 never. Default: -1.",
    )  # fmt: skip
    models_memory: int | None = option(
        None, panel=_PANEL, unit="bytes", minimum=1,
        help="Memory that loaded models may take together, of the host or of each GPU. Default: 80 % of what is free "
        "at the start.",
    )  # fmt: skip
    max_loaded_models: int | None = option(
        None, panel=_PANEL, minimum=1, maximum=_U32, help="Most models that are loaded at the same time."
    )
    default_model: str | None = option(
        None, panel=_PANEL, help="Model of requests that name none. Default: the only one of the route's task."
    )
    no_autoload: bool = option(
        False, panel=_PANEL, help="Load models only by POST /v1/models/load, not because a request needs them."
    )
    model_start_timeout: int | None = option(
        None, panel=_PANEL, minimum=1, maximum=_U32,
        help="Seconds that a request waits for its model to start. Default: 120.",
    )  # fmt: skip
    max_waiting_requests: int | None = option(
        None, panel=_PANEL, minimum=1, maximum=_U32,
        help="Most requests that wait for one model to start; others get 429. Default: 64.",
    )  # fmt: skip


def has_pool(config: PoolConfig) -> bool:
    """Return whether one model is served by this, too, which options alone can say."""
    return config.models is not None or config.keep_alive is not None


def check_pool(config: PoolConfig, *, num_models: int = 1) -> None:
    """Refuse options of several models for one. Raises ArgumentValidation."""
    seconds_of(config.keep_alive, "--keep-alive")
    if has_pool(config) or num_models > 1:
        return
    for flag, is_given in (
        ("--models-memory", config.models_memory is not None),
        ("--max-loaded-models", config.max_loaded_models is not None),
        ("--default-model", config.default_model is not None),
        ("--no-autoload", config.no_autoload),
        ("--model-start-timeout", config.model_start_timeout is not None),
        ("--max-waiting-requests", config.max_waiting_requests is not None),
    ):
        if is_given:
            raise ArgumentValidation(
                f"`{flag}` is for several models: name them (`launcher serve A B`) or give `--models`, `--keep-alive`"
            )


def seconds_of(text: str | None, where: str) -> float | None:
    """Read a time of `keep_alive`; None: never. Raises ArgumentValidation."""
    if text is None or text == "-1":
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise ArgumentValidation(f"`{where}` {text} is no time: give seconds, 90s, 30m, 2h, 0 or -1")
    return float(found[1]) * _SECONDS[found[2]]
