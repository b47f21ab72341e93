"""Renders the model's chat template exactly as transformers renders it, on a worker thread and within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.exceptions import TemplateSyntaxError

from router.chat.messages import Traits, Turn, message, with_tools
from router.chat.sandbox import BoundedRun, ChatEnvironment
from router.errors import StartupError, TemplateError

RENDER_TIMEOUT_S = 1.0
_END_MARK = "End-Of-The-Last-Turn"


class CompiledTemplate:
    """One template and what its source says about the messages that it expects."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        self._template: Template = environment.from_string(source)
        self._traits = Traits.of(environment, source)

    def render(
        self,
        turns: Sequence[Turn],
        tools: list[dict[str, Any]] | None,
        tool_prompt: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        if tools:
            turns = with_tools(turns, tools, tool_prompt, self._traits)
        if turns[-1].is_open and (text := self._continued(turns, tools, variables)) is not None:
            return text
        return self._render(turns, tools, variables)

    def _render(self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        messages = [message(turn, self._traits) for turn in turns]
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._template.render({**own, **variables})

    def _continued(
        self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """Up to the end of the last turn's text, so that the model goes on with it; None if it is not in the text.

        A mark shows where it ends, as in transformers: the text itself may occur behind it again. White space at its
        end is cut off, as in TGI.
        """
        text = self._render([*turns[:-1], turns[-1].followed_by(_END_MARK)], tools, variables)
        position = text.rfind(_END_MARK)
        return text[:position].rstrip() if position >= 0 else None


class ChatTemplate:
    """The templates of a model. `render` may be called from the event loop."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """Raises StartupError if a template does not compile."""
        environment = ChatEnvironment()
        self._variables = dict(variables)
        self._templates: dict[str, CompiledTemplate] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = CompiledTemplate(environment, source)
            except TemplateSyntaxError as error:
                raise StartupError(f"the chat template ({name}) does not compile: {error}") from None
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="chat-template")

    async def render(
        self,
        turns: Sequence[Turn],
        tools: list[dict[str, Any]] | None = None,
        *,
        tool_prompt: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `tools` in OpenAI's form; `variables` besides the model's own. Raises TemplateError."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError("template not found")
        chosen = template
        given = {**self._variables, **(variables or {})}
        run = BoundedRun(lambda: chosen.render(turns, tools, tool_prompt, given))
        loop = asyncio.get_running_loop()
        watchdog = _Watchdog(run, loop)
        try:
            return await loop.run_in_executor(self._workers, run)
        except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError) as error:
            # What jinja raises, and what Python raises inside of a template for messages that it did not expect.
            detail = str(error) if isinstance(error, JinjaError) else f"{type(error).__name__}: {error}"
            raise TemplateError(detail[:1000]) from None
        except asyncio.CancelledError:
            run.interrupt()  # nobody waits for it any more, and the next one needs its worker
            raise
        finally:
            watchdog.cancel()

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)


class _Watchdog:
    """Interrupts a run when the template, not the queue before it, has taken too long."""

    def __init__(self, run: BoundedRun, loop: asyncio.AbstractEventLoop) -> None:
        self._run = run
        self._loop = loop
        self._timer = loop.call_later(RENDER_TIMEOUT_S, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = RENDER_TIMEOUT_S - self._run.elapsed_s
        if left_s <= 0:
            self._run.interrupt()
        else:
            self._timer = self._loop.call_later(left_s, self._look)
