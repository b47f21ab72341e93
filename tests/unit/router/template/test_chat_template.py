"""Our renderer against transformers' own, what is normalised before it, and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.errors import StartupError, TemplateError
from router.template.fallbacks import other_forms
from router.template.messages import Turn
from router.template.renderer import Renderer
from router.template.template import ChatTemplate

CHATML = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}\n"
    "{%- if tools %}\n{%- for tool in tools %}\n{{- '\\n' }}{{- tool | tojson }}\n{%- endfor %}\n{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role in ('user', 'tool') or (message.role == 'assistant' and not message.tool_calls) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- elif message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>' + message.role }}\n"
    "        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}\n"
    "        {%- for call in message.tool_calls %}\n"
    "            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}\n"
    "            {{- '\\n{\"name\": \"' ~ call.name ~ '\", \"arguments\": ' ~ call.arguments | tojson ~ '}' }}\n"
    "        {%- endfor %}\n"
    "        {{- '<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
LLAMA = (
    "{{- bos_token }}\n{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}\n"
    "{%- set ns = namespace(system='', first=true) %}\n"
    "{%- for m in messages if m['role'] == 'system' %}{%- set ns.system = m['content'] | trim %}{%- endfor %}\n"
    "{{- '<|h|>system\\n\\n' ~ ns.system ~ '<|eot|>' }}\n"
    "{%- for message in messages %}\n"
    "  {%- if message.role == 'system' %}{%- continue %}{%- endif %}\n"
    "  {{- '<|h|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|h|>assistant\\n\\n' }}\n{%- endif %}\n"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<turn>' + role + '\n' + message['content'] | trim + '<end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'text' %}[{{ item['text'] }}]{% else %}<image>{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}"
)
EVERYTHING = (
    "{% macro line(x) %}<{{ x }}>{% endmacro %}"
    "{% generation %}{{ line(messages | length) }}{% endgeneration %}\n"
    "{{ messages | map(attribute='role') | join(',') }} {{ messages[::-1][0].content[:3] }}\n"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    " {{ 'a,b'.split(',') | reject('equalto', 'a') | list }}\n"
    "{{ {'b': 1, 'a': ['é', none, 1.5, true]} | tojson }} {{ {'a': 1} | tojson(indent=2) }} {{ dict(x=1) }}\n"
    "{% set x %}{{ 'block' | upper }}{% endset %}{{ x ~ 1 ~ none ~ undefined_thing }}\n"
    "{% for k, v in {'p': 1}.items() %}{{ k }}={{ v }}{% break %}{% endfor %}"
    " {{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }}\n"
    "{{ '%05d|%s' | format(7, 'x') }} {{ 'a{}'.format(1) }}"
    " {{ '{{\"a\": \"{}\"}} 12345 %d 10000'.format(2) }} {{ '%d 10000' % 5 }}"
    " {{ 'x'.center(7, '*') }} {{ 'a b' | replace('a', 'cc') }}\n"
    "  {%- if false %}{% endif %}  {# comment #}\n"
    "{{ '<&\"' | e }} {{ '<' }} {{ 'a\nb' | indent(2) }} {{ 3 | string + 'x' }}\n"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zoo",
            "description": "é <b>",
            "parameters": {"type": "object", "properties": {"z": {}, "a": {}}},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "zoo", "arguments": {"z": "é", "a": [1, None]}}}
SYSTEM, USER, ASSISTANT = (Turn(role=role, parts=f" {role} says <é>\n") for role in ("system", "user", "assistant"))
CHATS: list[list[Turn]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
    [USER, Turn(role="assistant", tool_calls=[CALL]), Turn(role="tool", parts="4", tool_call_id="1"), USER],
    [Turn(role="user", parts=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def by_transformers(template: str, messages: Sequence[Any], tools: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[list(messages)], tools=tools, chat_template=template, add_generation_prompt=True, **VARIABLES
    )
    return str(rendered[0])


def dictionary(turn: Turn, source: str) -> dict[str, Any]:
    """What a user of transformers would pass; it leaves out what is null. Calls are text if the template lacks them."""
    content = turn.text if source != PARTS and turn.parts is not None else turn.parts
    knows_calls = "tool_calls" in source
    if turn.tool_calls and not knows_calls:
        content = orjson.dumps(turn.tool_calls).decode()
    fields = {
        "role": turn.role,
        "content": content,
        "tool_calls": turn.tool_calls if knows_calls else None,
        "tool_call_id": turn.tool_call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture
def templates(renderer: Renderer) -> Any:
    def make(source: str | dict[str, str]) -> ChatTemplate:
        named = {"default": source} if isinstance(source, str) else source
        return ChatTemplate(named, VARIABLES, renderer=renderer)

    return make


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA, GEMMA, PARTS, EVERYTHING], ids=["chatml", "llama", "gemma", "parts", "all"]
)
async def test_the_same_text_as_transformers(templates: Any, source: str) -> None:
    template = templates(source)
    num_equal = 0
    for turns in CHATS:
        for tools in (None, TOOLS) if "tools" in source else (None,):
            expected, error = "", ""
            for form in (turns, *other_forms(turns)):
                try:
                    expected = by_transformers(source, [dictionary(turn, source) for turn in form], tools)
                    break
                except Exception as refused:
                    error = error or str(refused)
            if expected:
                assert await template.render(turns, tools) == expected
                num_equal += 1
                continue
            with pytest.raises(TemplateError) as caught:
                await template.render(turns, tools)
            assert error in str(caught.value)
    assert num_equal >= 3


async def test_parts_are_flattened_unless_the_template_iterates_them(templates: Any) -> None:
    image = {"type": "image", "marker": "<image>"}
    turn = Turn(role="user", parts=[{"type": "text", "text": "a"}, image])
    assert await templates("{{ messages[0].content }}").render([turn]) == "a<image>"
    for loop in (
        "{% for part in messages[0].content %}",
        "{% for part in messages[0]['content'] | list %}",
        "{% set c = messages[0]['content'] %}{% for part in c %}",
    ):
        assert await templates(loop + "{{ part.type }};{% endfor %}").render([turn]) == "text;image;"
    assert await templates("{{ messages[0]['content'][0]['text'] }}").render([turn]) == "a"
    shown = await templates("{% for part in messages[0].content %}{{ part | tojson }}{% endfor %}").render([turn])
    assert shown.endswith('{"type": "image"}')


async def test_developer_is_system_where_the_template_does_not_know_it(templates: Any) -> None:
    turn = Turn(role="developer", parts="x")
    assert await templates("{{ messages[0].role }}").render([turn]) == "system"
    assert await templates("{{ messages[0].role }}{# developer #}").render([turn]) == "developer"


async def test_tool_calls_are_text_where_the_template_does_not_know_them(templates: Any) -> None:
    turns = [Turn(role="assistant", tool_calls=[CALL]), USER]
    expected = '[{"id":"1","type":"function","function":{"name":"zoo","arguments":{"z":"é","a":[1,null]}}}]'
    assert await templates("{{ messages[0].content }}").render(turns) == expected


async def test_named_templates(templates: Any) -> None:
    template = templates({"default": "d", "tool_use": "t"})
    assert await template.render([USER]) == "d"
    assert await template.render([USER], TOOLS) == "t"
    with pytest.raises(TemplateError, match="template not found"):
        await templates({"rag": "r"}).render([USER])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("So far", "user:q;assistant:So far"),
        ("So far  \n", "user:q;assistant:So far"),
        ("", "user:q;assistant:;assistant:"),
    ],
)
async def test_the_assistants_turn_is_continued(templates: Any, content: str, expected: str) -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    turns = [Turn(role="user", parts="q"), Turn(role="assistant", parts=content)]
    assert await templates(source).render(turns) == expected


async def test_a_text_that_occurs_again_behind_the_turn(templates: Any) -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    assert await templates(source).render([Turn(role="assistant", parts="s")]) == "assistant:s"


async def test_a_turn_the_template_changes_is_left_as_it_is(templates: Any) -> None:
    turns = [Turn(role="assistant", parts="abc")]
    assert await templates("{{ messages[0].content | upper }}!").render(turns) == "ABC!"


async def test_messages_are_data_not_templates(templates: Any) -> None:
    turn = Turn(role="user", parts="{{ 7 * 7 }}{% raw %}")
    assert await templates("{{ messages[0].content }}").render([turn]) == "{{ 7 * 7 }}{% raw %}"


def test_a_template_that_does_not_compile_is_found_at_start() -> None:
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate({"default": "{% if %}"}, {})
