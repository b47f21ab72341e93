"""Renders chat templates in worker processes, `router.template.worker`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from router.errors import TemplateError
from router.worker.pair import WorkerPair
from wire.worker.process import WorkerEndedError

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 1.0


class Renderer:
    """Renders quick and slow jobs, one each at a time."""

    def __init__(self) -> None:
        self.workers = WorkerPair("router.template.worker", limit_s=TIME_LIMIT_S)

    async def render(self, job: Mapping[str, Any]) -> str:
        """Render, unless too much waits."""
        try:
            data = orjson.dumps(job)
        except TypeError:
            raise TemplateError("the messages are nested too deeply") from None
        try:
            reply = orjson.loads(await self.workers.ask(data))
        except TimeoutError:
            raise TemplateError("the template runs for too long") from None
        except WorkerEndedError:
            logger.warning("the chat template has ended the process that renders it")
            raise TemplateError("the template takes too much memory") from None
        except OSError as error:
            logger.error("the process that renders chat templates cannot be started: %s", error)
            raise TemplateError("it cannot be rendered at the moment") from None
        if "text" not in reply:
            raise TemplateError(reply["fault"], param=reply["field"])
        text: str = reply["text"]
        return text

    def warm_up(self) -> None:
        """Start the quick process, without waiting."""
        self.workers.warm_up()

    def close(self) -> None:
        """Ends the processes, whatever they do."""
        self.workers.close()
