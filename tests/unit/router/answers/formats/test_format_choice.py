"""Which format is found in a chat template, and that its calls are read back before it is believed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.format_outputs import OUTPUTS
from support.format_templates import STYLES as OWN_STYLES
from support.format_templates import template_of

from router.answers.formats.choice import ModelFormat, choose
from router.answers.formats.reasoning import STYLES, ReasoningStyle
from router.answers.formats.table import FORMATS
from router.errors import StartupError
from router.template.renderer import Renderer
from router.template.template import ChatTemplate

FOLDER = Path(__file__).parents[2] / "template/templates"
HERMES = (FOLDER / "qwen2_5_tools.jinja").read_text()


async def chosen(
    renderer: Renderer, source: str, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> ModelFormat:
    template = ChatTemplate(
        {"default": source} if source else {}, {"bos_token": "<s>", "eos_token": "</s>"}, renderer=renderer
    )
    return await choose(template, {}, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("qwen2_5_tools", "hermes", "none"),
        ("qwen3_thinking", "hermes", "think"),
        ("hermes_tools", "hermes", "none"),
        ("harmony", "harmony", "harmony"),
        ("llama3_1_tools", "llama_json", "none"),
        ("mistral_nemo_tools", "mistral_json", "none"),
        ("deepseek_v3", "deepseek_v3", "think"),
        ("chatml", "tgi", "none"),
        ("gemma3", "tgi", "none"),
    ],
)
async def test_a_template_shows_its_format(renderer: Renderer, template: str, calls: str, reasoning: str) -> None:
    found = await chosen(renderer, (FOLDER / f"{template}.jinja").read_text())
    assert (found.tool_call_parser, found.reasoning_parser) == (calls, reasoning)
    if found.format is not None:
        assert found.format.is_one == (calls in ("harmony", "llama_json", "deepseek_v3"))


@pytest.mark.parametrize("name", OWN_STYLES)
async def test_calls_come_back_from_a_template_in_the_style_of_each_format(renderer: Renderer, name: str) -> None:
    """Two in one answer; and one changed mark is noticed."""
    style = OWN_STYLES[name]
    found = await chosen(renderer, style.template)
    assert found.tool_call_parser == name and found.has_one_call == FORMATS[name].is_one
    mark, other = style.wrong
    changed = style.template.replace(mark, other)
    assert changed != style.template and (await chosen(renderer, changed)).tool_call_parser != name


PAIRS = [
    pytest.param(name, style, id=f"{name}-{style.name}", marks=[] if (row + column) % 8 == 0 else [pytest.mark.long])
    for row, name in enumerate(OWN_STYLES)
    for column, style in enumerate(STYLES)
]


@pytest.mark.parametrize(("name", "style"), PAIRS)
async def test_prompts_may_end_in_reasoning(renderer: Renderer, name: str, style: ReasoningStyle) -> None:
    """Its marks may begin like those of calls; and templates may refuse calls without text."""
    for thought in (style.opens, f"{style.opens}\n", f"{style.opens}{style.closes}"):
        prompt = "<|user|>assistant: {% endif %}"
        source = OWN_STYLES[name].template.replace(prompt, prompt.replace("{%", thought + "{%"))
        source = source.replace("{{ m.content or '' }}", "{{ m.content.split('" + style.closes + "')[-1] }}")
        source = source.replace("<|user|>{{ m.role }}: ", "<|user|>{{ m.role + ': ' }}")
        found = await chosen(renderer, source)
        assert found.tool_call_parser == name and found.has_one_call == FORMATS[name].is_one


@pytest.mark.parametrize("before", ["{{ messages | length }} messages. ", "{{ strftime_now('%H:%M:%S.%f') }}"])
@pytest.mark.parametrize("name", ["llama_json", "xlam", "hermes"])
async def test_what_stands_before_a_question_may_differ(renderer: Renderer, name: str, before: str) -> None:
    found = await chosen(renderer, before + template_of(name))
    assert found.tool_call_parser == name


async def test_a_template_that_shows_no_earlier_calls_is_believed(renderer: Renderer) -> None:
    source = (
        "{% if tools %}To call one, write <|tool_call|> and a JSON list.\n{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>{% endfor %}"
    )
    assert (await chosen(renderer, source)).tool_call_parser == "granite3"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<think></think>", "think"), ("<think></think><answer>", "think_answer"),
        ("<think></think><response>", "think_response"), ("[BEGIN FINAL RESPONSE]", "apriel"),
        ("{{ m.content.split('</think>')[-1] }}", "think"), ("<mm:think></mm:think>", "minimax_m3"),
    ],
)  # fmt: skip
async def test_a_template_shows_its_style_of_reasoning(renderer: Renderer, text: str, name: str) -> None:
    assert (await chosen(renderer, "{% for m in messages %}" + text + "{% endfor %}")).reasoning_parser == name


def test_each_format_has_a_template() -> None:
    files = {"hermes", "harmony", "llama_json", "mistral_json", "deepseek_v3"}
    assert files | set(OWN_STYLES) == set(FORMATS)


async def test_one_changed_mark_gives_tgis_form(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    other = HERMES.replace('"name": "', '"tool": "')
    assert other != HERMES
    with caplog.at_level(logging.WARNING):
        assert (await chosen(renderer, other)).tool_call_parser == "tgi"
    assert "does not write tool calls that are read as hermes" in caplog.text
    assert (await chosen(renderer, other, "hermes")).tool_call_parser == "hermes"


async def test_the_operator_chooses(renderer: Renderer) -> None:
    assert (await chosen(renderer, HERMES, "tgi")).tool_call_parser == "tgi"
    assert (await chosen(renderer, HERMES, "qwen3_coder", "deepseek_r1")).reasoning_parser == "think"
    assert (await chosen(renderer, "", "auto")).tool_call_parser == "tgi"
    for names in (("hermess", "auto"), ("auto", "thinks")):
        with pytest.raises(StartupError, match="is unknown; choose one of auto"):
            await chosen(renderer, HERMES, *names)


def test_the_document_has_every_name() -> None:
    text = (Path(__file__).parents[5] / "docs/tools-and-reasoning.md").read_text()
    names = [*FORMATS, *(style.name for style in STYLES)]
    assert [name for name in names if f"`{name}`" not in text] == []
    assert set(OUTPUTS) == set(FORMATS)
