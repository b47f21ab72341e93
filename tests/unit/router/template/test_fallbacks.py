"""Chats that a template refuses in transformers' form, in another one that it takes."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from router.template.compiled import CompiledTemplate
from router.template.fallbacks import other_forms
from router.template.messages import Turn
from router.template.sandbox import ChatEnvironment

LOOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '!' ~ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}|{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + LOOP
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + LOOP
ALTERNATE = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + FIRST
)
# As the templates of several thinking models: text joined to what may be null, and arguments joined as text.
JOINS_TEXT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{{ '!' + c.function.name + (c.function.arguments | tojson) }}{% endfor %}|"
    "{% endfor %}"
)
JOINS_ARGUMENTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '!' + c.function.name + c.function.arguments }}{% endfor %}|{% endfor %}"
)
JOINS_BOTH = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '!' + c.function.name + c.function.arguments }}{% endfor %}|{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
    "{{ k }}{% endfor %}{% endfor %}{% endfor %}"
)
USER = Turn(role="user", parts="Hi")


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def rendered(source: str, *turns: Turn) -> str:
    return CompiledTemplate(ChatEnvironment(), source).render(list(turns), None, None, {})


def says(role: str, text: str | list[dict[str, Any]]) -> Turn:
    return Turn(role=role, parts=text)


@pytest.mark.parametrize(
    ("source", "turns", "text"),
    [
        (LOOP, [says("system", "a"), says("system", "b"), USER], "system: a|system: b|user: Hi|"),
        (FIRST, [says("system", "a"), says("system", "b"), USER], "system: a\n\nb|user: Hi|"),
        (FIRST, [says("system", "a"), says("developer", "b"), USER], "system: a\n\nb|user: Hi|"),
        (FIRST, [says("system", "a"), USER, says("system", "b")], "system: a\n\nb|user: Hi|"),
        (FIRST, [USER, says("developer", "b"), says("assistant", "c"), USER], "developer|"),
        (NO_SYSTEM, [says("system", "a"), USER], "user: a\n\nHi|"),
        (NO_SYSTEM, [says("system", "a"), says("assistant", "b"), USER], "user: a|assistant: b|user: Hi|"),
        (ALTERNATE, [says("system", "a"), USER, says("system", "b")], "system: a\n\nb|user: Hi|"),
    ],
)
def test_system_messages_go_where_the_template_takes_them(source: str, turns: list[Turn], text: str) -> None:
    if text == "developer|":
        text = "system: b|user: Hi|assistant: c|user: Hi|"
    assert rendered(source, *turns) == text


def test_parts_stay_parts() -> None:
    loop = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}[{{ p.text }}]{% endfor %}|{% endfor %}"
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + loop
    turns = [says("system", [{"type": "text", "text": "a"}]), says("user", [{"type": "text", "text": "Hi"}])]
    assert rendered(refuses, *turns) == "user:[a][\n\n][Hi]|"


@pytest.mark.parametrize("source", [JOINS_TEXT, JOINS_ARGUMENTS, JOINS_BOTH])
def test_calls_without_text_and_arguments_as_text(source: str) -> None:
    turn = Turn(role="assistant", tool_calls=[call({"city": "Zürich", "n": [1]})])
    expected = 'user: Hi|assistant: !f{"city": "Zürich", "n": [1]}|user: Hi|'
    assert rendered(source, USER, turn, USER) == expected


def test_a_form_that_the_template_takes_is_not_changed() -> None:
    turn = Turn(role="assistant", tool_calls=[call({"a": 1})])
    assert rendered(LOOP, says("system", "s"), turn) == 'system: s|assistant: !f{"a": 1}|'


def test_arguments_that_are_no_object_are_named() -> None:
    turn = Turn(role="assistant", parts="", tool_calls=[call({}), call("{")])
    with pytest.raises(TemplateError, match=r"^`messages\[1\].tool_calls\[1\].function.arguments` must be the JSON"):
        rendered(ITEMS, USER, turn, USER)


def test_what_no_form_mends_has_the_words_of_the_template() -> None:
    turns = [says("system", "a"), says("system", "b"), USER, USER]
    with pytest.raises(TemplateError, match="Roles must alternate"):
        rendered(ALTERNATE, *turns)
    with pytest.raises(TemplateError, match="Roles must alternate"):
        rendered(ALTERNATE, USER, USER)


def test_the_number_of_forms_is_bounded() -> None:
    turns = [says("system", "a"), says("system", "b"), USER, says("system", "c")]
    turns += [Turn(role="assistant", tool_calls=[call({})]), USER]
    assert len(list(other_forms(turns))) == 15
    assert list(other_forms([USER])) == []
