"""Responses' tools as a chat's functions, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.errors import ToolError
from router.schemas.conversations.responses import ResponsesTool

_INPUT = "input"
_CUSTOM_SCHEMA = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}


@dataclass
class ServedTools:
    """The tools shown; OpenAI's own are left out."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    echoed: list[dict[str, Any]] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    """Names of tools whose input is a text; in the chat they are functions with one argument."""
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    """From the name of a function that comes from a namespace to the namespace and its name there."""

    @classmethod
    def of(cls, tools: Sequence[ResponsesTool]) -> ServedTools:
        served = cls()
        outside = {tool.name for tool in tools if tool.type in ("function", "custom")}
        for tool in tools:
            served._add(tool, outside)
        return served

    def name_of(self, name: str, namespace: str | None) -> str:
        """What the model knows a function as."""
        if namespace is None:
            return name
        return next((known for known, place in self.namespaced.items() if place == (namespace, name)), name)

    def choice(self, asked: str | dict[str, Any]) -> dict[str, Any]:
        """The chat's fields for `tool_choice`. Raises ToolError."""
        if isinstance(asked, str):
            return {"tool_choice": asked} if self.functions or asked != "auto" else {}
        if asked.get("type") == "allowed_tools" and isinstance(tools := asked.get("tools"), list):
            named = [
                {"type": "function", "function": {"name": tool.get("name")}} for tool in tools if isinstance(tool, dict)
            ]
            return {
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": asked.get("mode"), "tools": named}}
            }
        name, namespace = asked.get("name"), asked.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str):
            name = self.name_of(name, namespace)
        if asked.get("type") not in ("function", "custom") or not isinstance(name, str):
            text = '`tool_choice` must be auto, none, required or {"type": "function", "name": ...}'
            raise ToolError(text, param="tool_choice")
        return {"tool_choice": {"type": "function", "function": {"name": name}}}

    def _add(self, tool: ResponsesTool, outside: Collection[str | None], namespace: str | None = None) -> None:
        """Add a tool, prefixed by its namespace if its name is `outside`."""
        if tool.type == "namespace" and namespace is None:
            self.echoed.append(_echo(tool))
            for inner in tool.tools:
                self._add(inner, outside, tool.name)
        elif tool.type in ("function", "custom"):
            assert tool.name is not None
            is_custom = tool.type == "custom"
            schema = _CUSTOM_SCHEMA if is_custom else tool.parameters
            is_taken = namespace is not None and (tool.name in outside or tool.name in self.namespaced)
            name = f"{namespace}__{tool.name}" if is_taken else tool.name
            function = {"name": name, "description": tool.description, "parameters": schema}
            self.functions.append({"type": "function", "function": function})
            if is_custom:
                self.custom.add(name)
            if namespace is None:
                self.echoed.append(_echo(tool))
            else:
                self.namespaced[name] = (namespace, tool.name)


def _echo(tool: ResponsesTool) -> dict[str, Any]:
    fields = tool.model_dump(exclude_unset=True)
    return {"strict": False, "parameters": None} | fields if tool.type == "function" else fields


def custom_arguments(text: str) -> str:
    return orjson.dumps({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return a custom tool's input; of a cut call its JSON."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = parsed.get(_INPUT) if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments
