"""A chat's tools: grammar, template's list, prompt's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.answers.formats.schema_types import without_unknown_types
from router.answers.tgi_form.tool_schema import NO_TOOL, call_schema_in_words
from router.api.chat.schema import ChatBody, FunctionDefinition
from router.errors import ToolError
from router.grammar.checker import AskedGrammar

_MAX_TOOLS = 256
_MAX_NAME = 128
_ALLOWED = "allowed_tools"


@dataclass(frozen=True)
class OfferedTools:
    """Functions to call; `or_none`: or text; `listed`: shown."""

    functions: tuple[FunctionDefinition, ...]
    or_none: bool
    listed: tuple[FunctionDefinition, ...] = ()

    @property
    def only_name(self) -> str | None:
        """Return the one function without choice."""
        return self.functions[0].name if len(self.functions) == 1 and not self.or_none else None

    @property
    def schemas(self) -> dict[str, Any]:
        """Return parameters by name; None: none."""
        return {function.name: function.schema_of_parameters for function in self.functions}

    @property
    def enforced(self) -> dict[str, Any]:
        """Return the parameters that native grammars hold."""
        # A type that does not exist would take the grammar from all functions.
        return {
            function.name: function.schema_of_parameters
            if function.strict
            else without_unknown_types(function.schema_of_parameters)
            for function in self.functions
        }

    @property
    def is_strict(self) -> bool:
        return any(function.strict for function in self.functions)

    @property
    def loose(self) -> tuple[str, ...]:
        """Return schemas that native grammars need not enforce."""
        return tuple(f"tool_{number}" for number, function in enumerate(self.functions) if not function.strict)

    def grammar(self) -> AskedGrammar:
        """Return TGI's grammar of calls."""
        functions = [(function.name, function.schema_of_parameters) for function in self.functions]
        schema, words = call_schema_in_words(functions, or_none=self.or_none)
        return AskedGrammar("json", schema, field="tools", words=words)

    def for_template(self, *, describes: bool = False) -> list[dict[str, Any]]:
        """Return OpenAI's form in trained key order; `describes` fills descriptions."""
        functions = self.listed or self.functions
        return [{"type": "function", "function": _described(function, describes=describes)} for function in functions]


def offered_tools(body: ChatBody) -> OfferedTools | None:
    """Return the answer's tools, if it may use any."""
    functions = tuple(tool.function for tool in body.tools or ())
    _check(body, functions)
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == _ALLOWED:
        return _allowed(body.tool_choice.get(_ALLOWED), functions)
    choice = _choice(body.tool_choice)
    if choice in ("auto", "none") and not functions:
        return None
    if not functions:
        raise ToolError("`tool_choice` asks for a tool, but `tools` is empty", param="tool_choice")
    if choice == "none":
        return None
    if choice == "auto":
        _check_no_tool(functions)
        return OfferedTools(functions, or_none=True)
    if choice == "required":
        return OfferedTools(functions, or_none=False)
    name = choice if isinstance(choice, str) else choice[0]
    named = tuple(function for function in functions if function.name == name)
    if not named:
        raise ToolError(
            f"`tool_choice` names the function `{name[:_MAX_NAME]}`, which is not in `tools`", param="tool_choice"
        )
    return OfferedTools(named, or_none=False)


def _allowed(given: Any, functions: tuple[FunctionDefinition, ...]) -> OfferedTools:
    """Apply OpenAI's `allowed_tools`: all shown, some callable."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise ToolError(
            f"`{_ALLOWED}` must have the `mode` auto or required, and a list of functions in `tools`",
            param="tool_choice",
        )
    names = {_choice(tool)[0] for tool in tools if isinstance(tool, dict)}
    allowed = tuple(function for function in functions if function.name in names)
    if unknown := names - {function.name for function in allowed}:
        raise ToolError(
            f"`tool_choice` names the function `{min(unknown)[:_MAX_NAME]}`, which is not in `tools`",
            param="tool_choice",
        )
    if mode == "auto":
        _check_no_tool(allowed)
    return OfferedTools(allowed, or_none=mode == "auto", listed=functions)


def _check_no_tool(functions: tuple[FunctionDefinition, ...]) -> None:
    if any(function.name == NO_TOOL for function in functions):
        raise ToolError(f"a function cannot be called `{NO_TOOL}` where `tool_choice` is auto", param="tool_choice")


def _check(body: ChatBody, functions: tuple[FunctionDefinition, ...]) -> None:
    if len(functions) > _MAX_TOOLS:
        raise ToolError(f"`tools` supports up to {_MAX_TOOLS} tools. Given: {len(functions)}", param="tools")
    for tool in body.tools or ():
        if tool.type != "function":
            raise ToolError("only tools of type `function` are supported", param="tools")
    names = set()
    for function in functions:
        name = function.name
        if not (0 < len(name) <= _MAX_NAME and name.isprintable() and name.strip() == name):
            raise ToolError(f"function names must have 1 to {_MAX_NAME} printable characters", param="tools")
        if name in names:
            raise ToolError(f"the function `{name}` is listed twice", param="tools")
        names.add(name)
        _check_parameters(name, function.schema_of_parameters)


def _check_parameters(name: str, schema: Any) -> None:
    kind = schema.get("type", "object") if isinstance(schema, dict) else "object" if schema is None else None
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ToolError(f"the parameters of the function `{name}` must be a JSON schema of an object", param="tools")


def _choice(given: str | dict[str, Any] | None) -> str | tuple[str]:
    """Return `auto`, `none`, `required`, a name, or a tuple's name, not a keyword."""
    if given is None:
        return "auto"
    if isinstance(given, str):
        return given
    kind = given.get("type", "function")
    if kind != "function":
        subject = f"`{kind[:_MAX_NAME]}` is" if isinstance(kind, str) else "its type is"
        raise ToolError(
            f"`tool_choice`: {subject} not supported; name a function, or use auto, none or required",
            param="tool_choice",
        )
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ToolError(
            '`tool_choice` must name a function: {"type": "function", "function": {"name": ...}}', param="tool_choice"
        )
    return (name,)


def _described(function: FunctionDefinition, *, describes: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None or describes:
        described["description"] = function.description or ""
    parameters = function.schema_of_parameters
    described["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    return described if function.return_ is None else described | {"return": function.return_}
