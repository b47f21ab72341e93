"""The model's chat templates, rendered as by transformers, elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from router.errors import StartupError, TemplateError
from router.template.messages import PromptEnding, Turn, iterates_content
from router.template.renderer import Renderer
from router.template.sandbox import ChatEnvironment

NO_TEMPLATE = (
    "template not found: the model has no chat template. Send a prompt to /v1/completions or /generate, or serve a "
    "model made for chats (-Instruct, -it, -chat), or give a template with CHAT_TEMPLATE or --tokenizer-config-path"
)
"""Begins with TGI's words, which clients look for."""


class ChatTemplate:
    """A model's templates; `render` is for the event loop."""

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, str], *, renderer: Renderer | None = None
    ) -> None:
        """Compile the sources; `variables` are named tokens; a given `renderer` stays open."""
        environment = ChatEnvironment()
        self._variables = dict(variables)
        self.sources = dict(sources)
        for name, source in sources.items():
            try:
                environment.compile(source, raw=True)
            except TemplateSyntaxError as error:
                raise StartupError(f"the chat template ({name}) does not compile: {error}") from None
        default = self.sources.get("default")
        self.iterates_content = default is not None and iterates_content(environment.parse(default))
        """Whether the default template shows parts, images among them, or gets one text."""
        self._is_owner = renderer is None
        self._renderer = renderer or Renderer()
        if self._is_owner and sources:
            self._renderer.warm_up()

    async def render(
        self,
        turns: Sequence[Turn],
        tools: list[dict[str, Any]] | None = None,
        *,
        tool_prompt: str | None = None,
        variables: Mapping[str, Any] | None = None,
        ending: PromptEnding = "usual",
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render, with `variables` besides the model's."""
        source = self.sources.get("tool_use") if tools else None
        source = self.sources.get("default") if source is None else source
        if source is None:
            raise TemplateError(NO_TEMPLATE)
        job = {
            "source": source,
            "turns": list(turns),
            "tools": tools,
            "tool_prompt": tool_prompt,
            "variables": {**self._variables, **(variables or {})},
            "ending": ending,
            "documents": documents,
        }
        return await self._renderer.render(job)

    def close(self) -> None:
        if self._is_owner:
            self._renderer.close()
