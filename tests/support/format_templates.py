"""Chat templates of our own, one in the style of each format that the files of other tests do not have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = Path(__file__).parents[1] / "unit/router/template/templates"
FILES = {
    "hermes": "qwen2_5_tools", "harmony": "harmony", "llama_json": "llama3_1_tools",
    "mistral_json": "mistral_nemo_tools", "deepseek_v3": "deepseek_v3",
}  # fmt: skip
"""The formats that the templates of other tests have."""
_NAME = "{{ c.function.name }}"
_M3 = "]<]minimax[>["
_JSON = "{{ c.function.arguments | tojson }}"
_VALUE = "{{ v if v is string else v | tojson }}"


def _each(body: str, between: str = "") -> str:
    """A part for each argument: `k` and `v`."""
    then = "{% if not loop.first %}" + between + "{% endif %}" if between else ""
    return "{% for k, v in c.function.arguments.items() %}" + then + body + "{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a template writes calls. `wrong`: a mark, and another that the format does not have."""

    call: str
    begin: str = ""
    between: str = ""
    end: str = ""
    wrong: tuple[str, str]

    @property
    def template(self) -> str:
        then = "{% if not loop.first %}" + self.between + "{% endif %}"
        calls = self.begin + "{% for c in m.tool_calls %}" + then + self.call + "{% endfor %}" + self.end
        return (
            "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.parameters | tojson }}\n{% endfor %}"
            "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content or '' }}"
            "{% if m.tool_calls %}" + calls + "{% endif %}\n{% endfor %}"
            "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
        )


def _dsml(around: str) -> Style:
    return Style(
        begin=f"<｜DSML｜{around}>\n",
        call=f'<｜DSML｜invoke name="{_NAME}">\n'
        + _each(
            '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
            + _VALUE
            + "</｜DSML｜parameter>\n"
        )
        + "</｜DSML｜invoke>\n",
        end=f"</｜DSML｜{around}>",
        wrong=(' string="', ' text="'),
    )


def _tagged(call: str, argument: str, close: str, **settings: Any) -> Style:
    return Style(call=call + _each(argument) + close, **settings)


def _hy(suffix: str) -> Style:
    return _tagged(
        f"<tool_call{suffix}>{_NAME}<tool_sep{suffix}>\n",
        f"<arg_key{suffix}>{{{{ k }}}}</arg_key{suffix}>\n<arg_value{suffix}>{_VALUE}</arg_value{suffix}>\n",
        f"</tool_call{suffix}>\n",
        begin=f"<tool_calls{suffix}>\n",
        end=f"</tool_calls{suffix}>",
        wrong=("<arg_value", "<value"),
    )


STYLES: dict[str, Style] = {
    "olmo3": Style(
        begin="<function_calls>",
        call=_NAME + "(" + _each("{{ k }}={{ v | tojson }}", ", ") + ")",
        between="\n",
        end="</function_calls>",
        wrong=("={{ v", ":{{ v"),
    ),
    "apertus": Style(
        begin="<|tools_prefix|>[",
        call=f'{{"{_NAME}": {_JSON}}}',
        between=", ",
        end="]<|tools_suffix|>",
        wrong=('": {{', '", {{'),
    ),
    "gigachat3": Style(
        begin="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        wrong=('{"name"', '{"function"'),
    ),
    "gigachat31": Style(
        begin="<|function_call|>",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        wrong=('{"name"', '{"function"'),
    ),
    "longcat_json": Style(
        call=f'<longcat_tool_call>\n{{"name": "{_NAME}", "arguments": {_JSON}}}\n</longcat_tool_call>',
        wrong=('{"name"', '{"function"'),
    ),
    "longcat_args": _tagged(
        f"<longcat_tool_call>{_NAME}\n",
        "<longcat_arg_key>{{ k }}</longcat_arg_key>\n<longcat_arg_value>" + _VALUE + "</longcat_arg_value>\n",
        "</longcat_tool_call>",
        between="\n",
        wrong=("<longcat_arg_value>", "<longcat_value>"),
    ),
    "internlm": Style(
        call=f'<|action_start|><|plugin|>\n{{"name": "{_NAME}", "parameters": {_JSON}}}<|action_end|>',
        wrong=("<|plugin|>", "<|tool|>"),
    ),
    "xlam": Style(
        begin='{# [{"name": "tool_call_name", "arguments": {}}] #}[',
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        between=", ",
        end="]",
        wrong=('{"name": "{{', '{"function": "{{'),
    ),
    "plamo3": Style(
        begin="<|plamo:begin_tool_requests:plamo|>",
        call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        + _NAME
        + "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        + _JSON
        + "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        end="<|plamo:end_tool_requests:plamo|>",
        wrong=("begin_tool_name", "begin_name"),
    ),
    "solar_open2": _tagged(
        f"<|tool_call:start|>{_NAME}\n",
        "<|tool_arg:start|>{{ k }}<|tool_arg:value|>" + _VALUE + "<|tool_arg:end|>\n",
        "<|tool_call:end|>",
        between="\n",
        wrong=("<|tool_arg:value|>", "<|tool_value|>"),
    ),
    "hy_v3": _hy(""),
    "hy_v3_opensource": _hy(":opensource"),
    "step3": _tagged(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{_NAME}">\n',
        '<steptml:parameter name="{{ k }}">' + _VALUE + "</steptml:parameter>\n",
        "</steptml:invoke><｜tool_call_end｜>",
        begin="<｜tool_calls_begin｜>\n",
        between="\n",
        end="<｜tool_calls_end｜>",
        wrong=("<｜tool_sep｜>", "<｜sep｜>"),
    ),
    "minicpm5": _tagged(
        f'<function name="{_NAME}">',
        '<param name="{{ k }}">' + _VALUE + "</param>",
        "</function>",
        between="\n",
        wrong=("</param>", "</parameter>"),
    ),
    "kimi_k3": _tagged(
        f'<|open|>call tool="{_NAME}" index="{{{{ loop.index }}}}"<|sep|>',
        '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>'
        + _VALUE
        + "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        wrong=("<|open|>argument", "<|open|>parameter"),
    ),
    "muse_glimmer": Style(
        call=f' to={_NAME}<|message|><atem:function_calls>\n<atem:invoke name="{_NAME}">\n'
        + _each('<atem:parameter name="{{ k }}">' + _VALUE + "</atem:parameter>\n")
        + "</atem:invoke>\n</atem:function_calls>",
        between="<|eom|><|start|>assistant",
        end="<|eom|>",
        wrong=("</atem:parameter>", "</atem:param>"),
    ),
    "minimax_m3": _tagged(
        f'{_M3}<invoke name="{_NAME}">',
        f"{_M3}<{{{{ k }}}}>{_VALUE}{_M3}</{{{{ k }}}}>",
        f"{_M3}</invoke>\n",
        begin=f"{_M3}<tool_call>\n",
        end=f"{_M3}</tool_call>",
        wrong=("</invoke>", "</call>"),
    ),
    "qwen_xml": Style(
        call=f"<tool_call>\n<function={_NAME}>\n"
        + _each("<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>",
        between="\n",
        wrong=("</parameter>", "</param>"),
    ),
    "seed_xml": Style(
        call=f"<seed:tool_call>\n<function={_NAME}>\n"
        + _each("<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n")
        + "</function>\n</seed:tool_call>",
        between="\n",
        wrong=("</parameter>", "</param>"),
    ),
    "minimax_m2": Style(
        begin="<minimax:tool_call>\n",
        call=f'<invoke name="{_NAME}">\n'
        + _each('<parameter name="{{ k }}">' + _VALUE + "</parameter>\n")
        + "</invoke>\n",
        end="</minimax:tool_call>",
        wrong=("</parameter>", "</param>"),
    ),
    "nemotron_nano_v2": Style(
        begin="<TOOLCALL>[",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        between=", ",
        end="]</TOOLCALL>",
        wrong=('{"name"', '{"function"'),
    ),
    "hunyuan_a13b": Style(
        begin="<tool_calls>[",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        between=", ",
        end="]</tool_calls>",
        wrong=('{"name"', '{"function"'),
    ),
    "lfm2": Style(
        begin="<|tool_call_start|>[",
        call=_NAME + "(" + _each("{{ k }}={{ v | tojson }}", ", ") + ")",
        between=", ",
        end="]<|tool_call_end|>",
        wrong=("={{ v", ":{{ v"),
    ),
    "pythonic": Style(
        begin="<|python_start|>[",
        call=_NAME + "(" + _each("{{ k }}={{ v | tojson }}", ", ") + ")",
        between=", ",
        end="]<|python_end|>",
        wrong=("={{ v", ":{{ v"),
    ),
    "mistral_args": Style(call=f"[TOOL_CALLS]{_NAME}[ARGS]{_JSON}", wrong=("[TOOL_CALLS]", "[CALLS]")),
    "deepseek_v31": Style(
        begin="<｜tool▁calls▁begin｜>",
        call=f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        wrong=("<｜tool▁call▁begin｜>", "<｜tool▁call▁start｜>"),
    ),
    "deepseek_dsml": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "glm": Style(
        call=f"<tool_call>{_NAME}\n"
        + _each("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n")
        + "</tool_call>",
        between="\n",
        wrong=("<arg_value>", "<value>"),
    ),
    "kimi_k2": Style(
        begin="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + _JSON + "<|tool_call_end|>",
        end="<|tool_calls_section_end|>",
        wrong=("<|tool_call_argument_begin|>", "<|arguments|>"),
    ),
    "gemma4": Style(
        call=f"<|tool_call>call:{_NAME}{{{{ '{{' }}}}"
        + _each("{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v | tojson }}", ",")
        + "{{ '}' }}<tool_call|>",
        wrong=("call:", "func:"),
    ),
    "functiongemma": Style(
        call=f"<start_function_call>call:{_NAME}{{{{ '{{' }}}}"
        + _each("{{ k }}:<escape>" + _VALUE + "<escape>", ",")
        + "{{ '}' }}<end_function_call>",
        wrong=("<escape>", "<quote>"),
    ),
    "granite3": Style(
        begin="<|tool_call|>[",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        between=", ",
        end="]",
        wrong=('{"name"', '{"function"'),
    ),
    "phi4_mini": Style(
        begin="functools[",
        call=f'{{"name": "{_NAME}", "arguments": {_JSON}}}',
        between=", ",
        end="]",
        wrong=("functools[", "functools("),
    ),
    "cohere": Style(
        begin="<|START_ACTION|>[\n",
        call=f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{_NAME}", "parameters": {_JSON}}}',
        between=",\n",
        end="\n]<|END_ACTION|>",
        wrong=('"tool_name"', '"name"'),
    ),
}


def template_of(name: str) -> str:
    """A chat template that writes calls in this format."""
    return STYLES[name].template if name in STYLES else (_FILES / f"{FILES[name]}.jinja").read_text()
