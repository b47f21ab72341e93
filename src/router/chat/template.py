"""Renders the model's chat template exactly as transformers renders it, on a worker thread and within bounds.

What goes in is normalised first (`Turn` → the dictionaries that a template sees): parts are flattened unless the
template iterates content, tool arguments are objects, roles that the template does not know are mapped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.exceptions import TemplateSyntaxError

from router.chat.sandbox import BoundedRun, ChatEnvironment
from router.errors import StartupError, TemplateError

RENDER_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message. `parts` is the content as sent: None, a text, or the dictionaries of a list of parts."""

    role: str
    parts: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI form, arguments as objects
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text; an image becomes TGI's marker."""
        if self.parts is None or isinstance(self.parts, str):
            return self.parts or ""
        return "".join(_part_text(part) for part in self.parts)


def _part_text(part: dict[str, Any]) -> str:
    return part["text"] if part["type"] == "text" else f"![]({part['image_url']['url']})"


class CompiledTemplate:
    """One template and what its source says about the messages that it expects."""

    def __init__(self, environment: ChatEnvironment, source: str) -> None:
        self._template: Template = environment.from_string(source)
        tree = environment.parse(source)
        self.iterates_content = _iterates_content(tree)
        self.knows_tool_calls = "tool_calls" in source
        self.knows_developer = "developer" in source

    def render(self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> str:
        messages = [self._message(turn) for turn in turns]
        text = self._template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=True, **variables
        )
        return _cut_after_last_turn(text, turns[-1]) if turns[-1].role == "assistant" else text

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Absent keys stay absent: that is how transformers passes null."""
        role = "system" if turn.role == "developer" and not self.knows_developer else turn.role
        message: dict[str, Any] = {"role": role}
        if turn.tool_calls and not self.knows_tool_calls:
            message["content"] = turn.text or orjson.dumps(turn.tool_calls).decode()
        elif turn.parts is not None or not turn.tool_calls:
            is_list = isinstance(turn.parts, list) and self.iterates_content
            message["content"] = turn.parts if is_list else turn.text
        if turn.tool_calls and self.knows_tool_calls:
            message["tool_calls"] = turn.tool_calls
        if turn.tool_call_id is not None:
            message["tool_call_id"] = turn.tool_call_id
        if turn.name is not None:
            message["name"] = turn.name
        return message


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

    async def render(self, turns: Sequence[Turn], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt. Raises router.errors.TemplateError."""
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise TemplateError("template not found")
        chosen = template
        run = BoundedRun(lambda: chosen.render(turns, tools, self._variables))
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


def _cut_after_last_turn(text: str, turn: Turn) -> str:
    """TGI's rule for continuing the assistant's turn: end right after its text, without trailing white space."""
    content = turn.text
    position = text.rfind(content) if content else -1
    return text[: position + len(content)].rstrip() if position >= 0 else text


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether a template reads parts of `content`: loops over it, or indexes into it."""
    aliases = {
        target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(target := assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    loops = any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))
    indexed = any(
        _is_content(item.node, set()) and isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, int)
        for item in tree.find_all(nodes.Getitem)
    )
    return loops or indexed


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    """Whether an expression is some message's content, through filters too."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
