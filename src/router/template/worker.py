"""Renders chat templates for the router: `python -m router.template.worker`, in 512 MiB and limited time."""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import orjson
from jinja2.exceptions import TemplateError as JinjaError

from router.template.compiled import CompiledTemplate, UnreadFieldError
from router.template.messages import Turn
from router.template.sandbox import ChatEnvironment
from wire.worker.frames import LATE
from wire.worker.main import serve

T = TypeVar("T")

MEMORY_LIMIT = 512 << 20
COMPILE_LIMIT_S = 1.0
_CPU_LIMIT_S = 5
_MAX_COMPILED = 32
_LONGEST_FAULT = 1000


class TemplateTimeoutError(BaseException):
    """A template runs too long; no Exception, so that it cannot catch it."""


class Worker:
    """Answers jobs, remembering compiled templates."""

    def __init__(self) -> None:
        self._environment = ChatEnvironment()
        self._compiled: OrderedDict[str, CompiledTemplate] = OrderedDict()
        self._is_running = False
        signal.signal(signal.SIGALRM, self._alarm)

    def answer(self, asked: bytes, limit_s: float) -> bytes:
        """Return `{"text": prompt}`, `{"fault": sentence, "field": ours or null}`, or LATE.

        New templates have COMPILE_LIMIT_S.
        """
        job = orjson.loads(asked)
        try:
            # Once for a template: never cut short for the sake of other jobs.
            template = self._bounded(lambda: self._template(job["source"]), COMPILE_LIMIT_S)
            return orjson.dumps({"text": self._bounded(lambda: _render(template, job), limit_s)})
        except TemplateTimeoutError:
            return LATE
        except JinjaError as error:
            fault, field = str(error), error.field if isinstance(error, UnreadFieldError) else None
        except Exception as error:  # what Python raises inside of a template for messages that it did not expect
            fault, field = f"{type(error).__name__}: {error}", None
        return orjson.dumps({"fault": fault[:_LONGEST_FAULT], "field": field})

    def _template(self, source: str) -> CompiledTemplate:
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = CompiledTemplate(self._environment, source)
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return template

    def _bounded(self, run: Callable[[], T], limit_s: float) -> T:
        """Raises TemplateTimeoutError."""
        try:
            self._is_running = True
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            try:
                return run()
            finally:
                self._stop()
        except TemplateTimeoutError:
            self._stop()  # it may have come just before the first one
            raise

    def _stop(self) -> None:
        self._is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        """Interrupt by timer, or for a disconnected client."""
        if self._is_running:
            self._is_running = False
            raise TemplateTimeoutError


def _render(template: CompiledTemplate, job: dict[str, Any]) -> str:
    turns = [Turn(**fields) for fields in job["turns"]]
    return template.render(turns, job["tools"], job["tool_prompt"], job["variables"], job["ending"], job["documents"])


def main() -> None:
    """Serve until the router closes the pipe."""
    serve(Worker().answer, memory_limit=MEMORY_LIMIT, cpu_limit_s=_CPU_LIMIT_S)


if __name__ == "__main__":
    main()
