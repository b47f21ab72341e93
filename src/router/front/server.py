"""From the front's options to its server: start, end, exit status."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Self

from router.api.errors import ErrorAnswers
from router.errors import StartupError
from router.front.app import Front, create_app
from router.front.config import FrontConfig
from router.front.link import Link
from router.front.metrics import FrontMetrics
from router.front.models import Models
from router.front.routes import OwnRoutes
from router.keys.accounts import Accounts
from router.keys.charges import charging
from router.server.serving import serve_application
from router.server.sockets import http_listener, warn_without_key
from router.server.stop import Stop, run_until_stopped


class _Requests:
    """What a drain waits for: requests that wait or run."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @property
    def is_draining(self) -> bool:
        return self._models.is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        self._models.is_draining = value

    @property
    def permit_pool(self) -> Self:
        return self

    @property
    def num_taken(self) -> int:
        return self._models.num_active

    def end(self) -> None:
        """Do nothing: requests end with their connections."""


async def serve(config: FrontConfig) -> int:
    """Run the front; return the exit status."""
    return await run_until_stopped(partial(_serve, config))


async def _serve(config: FrontConfig, stop: Stop) -> int:
    if config.control is None:
        raise StartupError("the launcher starts the front: launcher serve A B")
    with contextlib.ExitStack() as resources:
        listener = resources.enter_context(http_listener(config))
        if config.api_key is None and config.keys_file is None:
            warn_without_key(listener)
        metrics = FrontMetrics()
        models = Models(
            metrics,
            start_timeout_s=config.model_start_timeout,
            max_waiting=config.max_waiting_requests,
            autoload=not config.no_autoload,
        )
        link = Link(config.control, models)
        errors = ErrorAnswers(config.error_format, metrics)
        accounts = Accounts.of_file(config.keys_file, metrics, resources, part="front")
        if accounts is not None and config.front_uds is not None:
            charges = await charging(config.front_uds, accounts)
            resources.callback(charges.close)
        front = Front(config, models, OwnRoutes(models, link, metrics, playground=not config.no_playground), errors)
        app = create_app(
            front,
            models,
            errors,
            api_key=config.api_key,
            accounts=accounts,
            allow_origins=config.cors_allow_origin,
        )
        return await serve_application(app, config, _Requests(models), link, stop, listener, None, metrics)
