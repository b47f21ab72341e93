"""From turns to a template's messages, normalised once: parts flattened, calls as objects or text, known roles.

What is absent stays absent, as transformers passes null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson
from jinja2 import Environment, meta, nodes

TOOL_PROMPT = (
    "\nThe functions above are at your disposal. Reply with a single JSON object that names the function which answers "
    "the request best and gives its arguments as literal values.\n"
)
"""What follows the tools in the last message of a chat whose template cannot show tools."""

PromptEnding = Literal["usual", "prompted", "continued", "closed"]
"""`prompted`: with the beginning of an answer. `continued`: in the middle of the last turn. `closed`: behind it.
`usual`: continued if the last turn is an answer with text, else prompted."""

_CHECKS_ID_LENGTH = re.compile(r"length\s*!=\s*9\b")
_ID_LENGTH = 9


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message; `parts` is the content as sent, texts or `{"type": "image", "marker": ...}`."""

    role: str
    parts: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None  # OpenAI form, arguments as objects
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None  # of an earlier answer

    @property
    def text(self) -> str:
        """Return one text, with images' markers."""
        if self.parts is None or isinstance(self.parts, str):
            return self.parts or ""
        return "".join(_part_text(part) for part in self.parts)

    @property
    def is_open(self) -> bool:
        """Whether it is a last answer to be continued."""
        return self.role == "assistant" and not self.tool_calls and bool(self.text.strip())

    def followed_by(self, text: str) -> Turn:
        """With more text at its end."""
        if isinstance(self.parts, list):
            return replace(self, parts=[*self.parts, {"type": "text", "text": text}])
        return replace(self, parts=(self.parts or "") + text)


def _part_text(part: dict[str, Any]) -> str:
    text: str = part["text"] if part["type"] == "text" else part["marker"]
    return text


def _shown_part(part: dict[str, Any] | str) -> dict[str, Any] | str:
    """Show that there is an image, not its address."""
    return {"type": "image"} if isinstance(part, dict) and part["type"] == "image" else part


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a template expects of messages."""

    iterates_content: bool
    knows_tool_calls: bool
    knows_developer: bool
    reads_tools: bool
    reads_documents: bool
    wants_short_ids: bool  # Mistral's: nine letters and digits, anything else is refused

    @classmethod
    def of(cls, environment: Environment, source: str) -> Traits:
        tree = environment.parse(source)
        variables = meta.find_undeclared_variables(tree)
        return cls(
            iterates_content=iterates_content(tree),
            knows_tool_calls="tool_calls" in source,
            knows_developer="developer" in source,
            reads_tools="tools" in variables,
            reads_documents="documents" in variables,
            wants_short_ids=_CHECKS_ID_LENGTH.search(source) is not None,
        )


def with_tools(
    turns: Sequence[Turn], tools: list[dict[str, Any]], tool_prompt: str | None, traits: Traits
) -> list[Turn]:
    """Add unshown tools, and the client's text, to the last turn."""
    added = "" if traits.reads_tools else f"{orjson.dumps(tools).decode()}\n{tool_prompt or TOOL_PROMPT}"
    added = added or tool_prompt or ""
    return [*turns[:-1], turns[-1].followed_by(f"\n---\n{added}")] if added else list(turns)


def message(turn: Turn, traits: Traits) -> dict[str, Any]:
    """What the template gets for a turn."""
    role = "system" if turn.role == "developer" and not traits.knows_developer else turn.role
    fields: dict[str, Any] = {"role": role}
    calls = turn.tool_calls or []
    if calls and not traits.knows_tool_calls:
        fields["content"] = "\n".join(filter(None, (turn.text, orjson.dumps(calls).decode())))
    elif turn.parts is not None or not calls:
        is_list = isinstance(turn.parts, list) and traits.iterates_content
        fields["content"] = [_shown_part(part) for part in turn.parts or ()] if is_list else turn.text
    if calls and traits.knows_tool_calls:
        fields["tool_calls"] = [_with_short_id(call) for call in calls] if traits.wants_short_ids else calls
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = _short_id(turn.tool_call_id) if traits.wants_short_ids else turn.tool_call_id
    if turn.name is not None:
        fields["name"] = turn.name
    if turn.reasoning is not None:
        # Under the names that transformers gives it.
        fields = {"thinking": turn.reasoning, **fields, "reasoning_content": turn.reasoning}
    return fields


def _with_short_id(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"id": _short_id(call["id"])} if "id" in call else call


def _short_id(identifier: str) -> str:
    """Return an id's distinguishing end."""
    letters = "".join(letter for letter in identifier if letter.isascii() and letter.isalnum())
    return letters[-_ID_LENGTH:].zfill(_ID_LENGTH)


def iterates_content(tree: nodes.Template) -> bool:
    """Whether a template loops over or indexes `content`."""
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
    """Whether an expression is a message's content."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
