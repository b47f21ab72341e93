"""Responses' tools as a chat's functions, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.api.responses.input_items import AdditionalToolsItem, Item, ResponsesTool, SearchOutputItem
from router.errors import ToolError

ADDING = (AdditionalToolsItem, SearchOutputItem)
"""Items with tools beside a body's."""
_INPUT = "input"
SEARCH = "tool_search"
_CUSTOM_SCHEMA = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}


@dataclass
class ServedTools:
    """The tools shown; OpenAI's own are left out."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    echoed: list[dict[str, Any]] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)
    """Names of tools whose input is a text; in the chat they are functions with one argument."""
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    """From the name of a tool that comes from a namespace to the namespace and its name there."""
    search: str = ""
    """Name of the client's search for tools, if there is one."""
    _places: dict[tuple[str, str], str] = field(default_factory=dict)
    """The opposite of `namespaced`."""
    _names: set[str] = field(default_factory=set)
    """Of `functions`."""

    @classmethod
    def of(cls, tools: Sequence[ResponsesTool], items: Iterable[Item] = ()) -> ServedTools:
        """Take a body's tools, and those that `items` add."""
        served = cls()
        added = [tool for item in items if isinstance(item, ADDING) for tool in item.tools]
        outside = {tool.name for tool in (*tools, *added) if tool.type in ("function", "custom")}
        for tool in _without_deferred(tools) if any(_is_search(tool) for tool in tools) else tools:
            served._add(tool, outside)
        served.echoed = [_echo(tool) for tool in tools if _is_served(tool)]
        for tool in added:
            if tool.type == "namespace" or tool.name not in served._names:
                served._add(tool, outside)
        return served

    def name_of(self, name: str, namespace: str | None) -> str:
        """What the model knows a function as."""
        if namespace is None:
            return name
        return self._places.get((namespace, name), name)

    def found(self, output: SearchOutputItem) -> str:
        """Return what the model reads of a search: the names of tools it has now."""
        names: list[str] = []
        for tool in output.tools:
            is_space = tool.type == "namespace"
            inner, namespace = (tool.tools, tool.name) if is_space else ([tool], None)
            names += [self.name_of(one.name, namespace) for one in inner if one.name]
        return orjson.dumps({"tools": names}).decode()

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
            for inner in tool.tools:
                self._add(inner, outside, tool.name)
        elif tool.type in ("function", "custom"):
            assert tool.name is not None
            if namespace is not None and (namespace, tool.name) in self._places:
                return  # found by two searches
            is_custom = tool.type == "custom"
            is_taken = namespace is not None and (tool.name in outside or tool.name in self.namespaced)
            name = f"{namespace}__{tool.name}" if is_taken else tool.name
            self._show(name, tool, _CUSTOM_SCHEMA if is_custom else tool.parameters)
            if is_custom:
                self.custom.add(name)
            if namespace is not None:
                self.namespaced[name] = (namespace, tool.name)
                self._places[namespace, tool.name] = name
        elif _is_search(tool) and not self.search:
            self.search = SEARCH
            self._show(SEARCH, tool, tool.parameters)

    def _show(self, name: str, tool: ResponsesTool, schema: dict[str, Any] | None) -> None:
        self._names.add(name)
        function = {"name": name, "description": tool.description, "parameters": schema, "strict": tool.strict}
        self.functions.append({"type": "function", "function": function | {"return": tool.output_schema}})


def count(tools: Iterable[ResponsesTool]) -> int:
    """Count tools with those inside of them."""
    return sum(1 + len(tool.tools) for tool in tools)


def _is_served(tool: ResponsesTool) -> bool:
    """Whether a body's tool is shown to the model."""
    return tool.type in ("function", "custom", "namespace") or _is_search(tool)


def _without_deferred(tools: Sequence[ResponsesTool]) -> list[ResponsesTool]:
    """Leave out what the client's search has yet to find."""
    shown = [tool for tool in tools if not tool.defer_loading]
    return [tool.model_copy(update={"tools": _without_deferred(tool.tools)}) if tool.tools else tool for tool in shown]


def _is_search(tool: ResponsesTool) -> bool:
    return (tool.type, tool.execution) == (SEARCH, "client")


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


def searched(arguments: str) -> dict[str, Any]:
    """Return the arguments of a search; of a cut call none."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
