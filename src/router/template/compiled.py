"""A compiled chat template, in `router.template.worker`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError

from router.template.fallbacks import fault_in, other_forms
from router.template.messages import PromptEnding, Traits, Turn, message, with_tools
from router.template.sandbox import ChatEnvironment

_END_MARK = "End-Of-The-Last-Turn"


class UnreadFieldError(TemplateError):
    """The template has no use for a field of the request."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class CompiledTemplate:
    """A template, and what it expects of messages."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        self._template: Template = environment.from_string(source)
        self._traits = Traits.of(environment, source)

    def render(
        self,
        turns: Sequence[Turn],
        tools: list[dict[str, Any]] | None,
        tool_prompt: str | None,
        variables: Mapping[str, Any],
        ending: PromptEnding = "usual",
        documents: list[dict[str, Any]] | None = None,
    ) -> str:
        """Render the prompt; raises the template's faults."""
        if documents and not self._traits.reads_documents:
            raise UnreadFieldError("it does not read `documents`: put them into the messages", "documents")
        if documents:
            variables = {**variables, "documents": documents}
        if tools:
            turns = with_tools(turns, tools, tool_prompt, self._traits)
        is_continued = ending == "continued" or (ending == "usual" and turns[-1].is_open)
        if is_continued and (text := self._continued(turns, tools, variables)) is not None:
            return text
        return self._render(turns, tools, {**variables, "add_generation_prompt": ending != "closed"})

    def _render(self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        """Render a chat in any form the template takes."""
        try:
            return self._render_as(turns, tools, variables)
        except (MemoryError, SecurityError):
            raise
        except Exception:
            for form in other_forms(turns):
                with suppress(Exception):
                    return self._render_as(form, tools, variables)
            if (fault := fault_in(turns)) is not None:
                raise TemplateError(fault) from None
            raise

    def _render_as(
        self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        messages = [message(turn, self._traits) for turn in turns]
        own = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._template.render({**own, **variables})

    def _continued(
        self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str | None:
        """Render up to the end of the last turn, to be continued, found by a mark, as transformers; trailing space is
        cut, as TGI.
        """
        text = self._render([*turns[:-1], turns[-1].followed_by(_END_MARK)], tools, variables)
        position = text.rfind(_END_MARK)
        return text[:position].rstrip() if position >= 0 else None
