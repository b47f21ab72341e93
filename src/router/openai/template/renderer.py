"""Renders chat templates in a worker process, `router.openai.template.worker`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from router.errors import TemplateError
from router.worker.process import WorkerEndedError, WorkerProcess

logger = logging.getLogger(__name__)

# The process gives up by itself after one second, unless it is inside of a step that cannot be interrupted.
KILL_AFTER_S = 2.0


class Renderer:
    """Renders one job at a time. The process is started with the first one, or before by `warm_up`."""

    def __init__(self) -> None:
        self._process = WorkerProcess("router.openai.template.worker")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._lock = threading.Lock()
        self._current: Mapping[str, Any] | None = None

    async def render(self, job: Mapping[str, Any]) -> str:
        """The prompt. Raises TemplateError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._exchange, job)
        except asyncio.CancelledError:
            self._interrupt(job)  # its client has left, and the next one needs the process
            raise

    def warm_up(self) -> None:
        """Starts the process; does not wait for it."""
        self._thread.submit(self._start)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._thread.submit(self._process.end)
        self._thread.shutdown()

    def _exchange(self, job: Mapping[str, Any]) -> str:
        try:
            data = orjson.dumps(job)
        except TypeError:
            raise TemplateError("the messages are nested too deeply") from None
        with self._lock:
            self._current = job
        try:
            reply = orjson.loads(self._process.exchange(data, KILL_AFTER_S))
        except TimeoutError:
            logger.warning("the chat template could not be interrupted: its process is replaced")
            raise TemplateError("the template runs for too long") from None
        except WorkerEndedError:
            logger.warning("the chat template has ended the process that renders it")
            raise TemplateError("the template takes too much memory") from None
        except OSError as error:
            raise _does_not_start(error) from None
        finally:
            with self._lock:
                self._current = None
        if "text" not in reply:
            raise TemplateError(reply["fault"])
        text: str = reply["text"]
        return text

    def _start(self) -> None:
        try:
            self._process.start()
        except OSError as error:
            _does_not_start(error)

    def _interrupt(self, job: Mapping[str, Any]) -> None:
        with self._lock:
            pid = self._process.pid
            if self._current is job and pid is not None:
                os.kill(pid, signal.SIGALRM)


def _does_not_start(error: OSError) -> TemplateError:
    logger.error("the process that renders chat templates does not start: %s", error)
    return TemplateError("it cannot be rendered at the moment")
