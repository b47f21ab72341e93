"""What models write in each format, and the message that it is: content, reasoning, calls with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {
            "type": "object",
            "properties": {"k": {"type": "object", "properties": {"l": {"type": "null"}}}},
        },
    },
}
SCHEMAS: dict[str, Any] = {"get_weather": PARAMETERS, "get_time": {"type": "object", "properties": {}}}


# One of each kind: JSON, tags, channels, sections of calls, marks of its own for text.
QUICK = ("hermes", "qwen_xml", "harmony", "kimi_k2", "gemma4")


def served(names: Iterable[str]) -> list[Any]:
    """Formats as parameters of tests that ask a server: those of QUICK, and in long runs all."""
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in names]


@dataclass(frozen=True)
class Output:
    """`calls`: names and arguments; `is_usual`: as templates write it, so that grammars take it, too."""

    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    is_usual: bool = True


WEATHER = ("get_weather", {"city": 'Zürich "x"\n</b> 🙂', "n": 3})
CITY = 'Zürich "x"\n</b> 🙂'
WEATHER = ("get_weather", {"city": CITY, "n": 3})
ALL = ("get_weather", {"city": "Oslo", "n": -1, "tags": ["a", "b"], "deep": {"k": {"l": None}}})
TIME = ("get_time", {})
JSON_WEATHER = '{"city": "Zürich \\"x\\"\\n</b> 🙂", "n": 3}'
JSON_ALL = '{"city": "Oslo", "n": -1, "tags": ["a", "b"], "deep": {"k": {"l": null}}}'
BEGIN, CALL, SEP, CALL_END, END = (
    f"<｜{name}｜>" for name in ("tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end")
)
DSML = "｜DSML｜"
M3 = "]<]minimax[>["
K3_BEGIN, K3_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"


def forms(
    weather: str, everything: str, time: str, *, begin: str = "", between: str = "", end: str = ""
) -> list[Output]:
    """One call, two, text before, none of the arguments. The calls are given as the format writes them."""
    return [
        Output(begin + weather + end, calls=[WEATHER]),
        Output(begin + everything + end, calls=[ALL]),
        Output(begin + time + end, calls=[TIME]),
        Output(begin + weather + between + everything + end, calls=[WEATHER, ALL]),
        Output(f"Let me see. \n{begin}{time}{between}{weather}{end}\n", content="Let me see.", calls=[TIME, WEATHER]),
    ]


def _json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def _typed(form: Callable[..., str], **settings: str) -> list[str]:
    """Three calls of a format with tags."""
    values: list[dict[str, str]] = [TYPED_WEATHER, TYPED_ALL, {}]
    names = ("get_weather", "get_weather", "get_time")
    return [form(name, **settings, **one) for name, one in zip(names, values, strict=True)]


def _hy(name: str, suffix: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key{suffix}>{k}</arg_key{suffix}>\n<arg_value{suffix}>{v}</arg_value{suffix}>\n"
        for k, v in values.items()
    )
    return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{pairs}</tool_call{suffix}>\n"


def _step(name: str, **values: str) -> str:
    inner = "".join(f'<steptml:parameter name="{k}">{v}</steptml:parameter>\n' for k, v in values.items())
    call = f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{inner}'
    return call + "</steptml:invoke><｜tool_call_end｜>"


def _solar(name: str, **values: str) -> str:
    inner = "".join(f"<|tool_arg:start|>{k}<|tool_arg:value|>{v}<|tool_arg:end|>\n" for k, v in values.items())
    return f"<|tool_call:start|>{name}\n{inner}<|tool_call:end|>"


def _minicpm(name: str, **values: str) -> str:
    inner = "".join(f'<param name="{k}">{v}</param>' for k, v in values.items())
    return f'<function name="{name}">{inner}</function>'


def _plamo(name: str, arguments: str) -> str:
    parts = (
        f"begin_tool_request:|begin_tool_name:|{name}|end_tool_name:|begin_tool_arguments:|constrain|json|msg|"
        f"{arguments}|end_tool_arguments:|end_tool_request:"
    )
    marks = [
        part
        if part in (name, "json", arguments)
        else f"<|plamo:{part}plamo|>"
        if part[-1] == ":"
        else f"<|plamo:{part}|>"
        for part in parts.split("|")
    ]
    return "".join(marks)


def _internlm(name: str, arguments: str) -> str:
    return f"<|action_start|><|plugin|>\n{_json(name, arguments, 'parameters')}<|action_end|>"


def _one_call(begin: str) -> list[Output]:
    """Of formats with one call for each answer."""
    return [
        Output(begin + _json("get_weather", JSON_WEATHER), calls=[WEATHER]),
        Output(f"Let me see. \n{begin}{_json('get_time', '{}')}\n", content="Let me see.", calls=[TIME]),
        Output(begin + _json("get_time", "{}"), calls=[TIME]),
        Output(begin + "{}", content=begin + "{}"),
    ]


def _listed(begin: str, end: str) -> list[Output]:
    calls = [_json("get_weather", JSON_WEATHER), _json("get_weather", JSON_ALL), _json("get_time", "{}")]
    return forms(*calls, begin=begin, between=", ", end=end)


def _hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def _qwen(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _kimi_k3(name: str, **values: str) -> str:
    kinds = {"city": "string", "n": "number", "tags": "array", "deep": "object"}
    inner = "".join(
        f'<|open|>argument key="{k}" type="{kinds[k]}"<|sep|>{v}<|close|>argument<|sep|>' for k, v in values.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def _minimax_m3(name: str, **values: str) -> str:
    inner = "".join(f"{M3}<{key}>{value}{M3}</{key}>" for key, value in values.items())
    return f'{M3}<invoke name="{name}">{inner}{M3}</invoke>\n'


def _muse(name: str, **values: str) -> str:
    inner = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())
    return (
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{inner}</atem:invoke>\n'
        "</atem:function_calls>"
    )


def _minimax(name: str, **values: str) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def _glm(name: str, line_end: str, prefix: str = "", **values: str) -> str:
    key, value = f"{prefix}arg_key>", f"{prefix}arg_value>"
    pairs = "".join(f"<{key}{k}</{key}{line_end}<{value}{v}</{value}{line_end}" for k, v in values.items())
    return f"<{prefix}tool_call>{name}{line_end}{pairs}</{prefix}tool_call>"


def _dsml(name: str, **values: tuple[str, str]) -> str:
    inner = "".join(
        f'<{DSML}parameter name="{key}" string="{kind}">{value}</{DSML}parameter>\n'
        for key, (kind, value) in values.items()
    )
    return f'<{DSML}invoke name="{name}">\n{inner}</{DSML}invoke>\n'


def _dsml_forms(around: str) -> list[Output]:
    calls = _dsml("get_weather", **DSML_WEATHER), _dsml("get_weather", **DSML_ALL), _dsml("get_time")
    return forms(*calls, begin=f"<{DSML}{around}>\n", end=f"</{DSML}{around}>")


def _v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def _v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"


def _kimi(name: str, arguments: str, number: int) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _cohere(name: str, arguments: str, number: int) -> str:
    return f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'


TYPED_WEATHER = {"city": CITY, "n": "3"}
TYPED_ALL = {"city": "Oslo", "n": "-1", "tags": '["a", "b"]', "deep": '{"k": {"l": null}}'}
NESTED_ALL = {
    "city": "Oslo",
    "n": "-1",
    "tags": f"{M3}<item>a{M3}</item>{M3}<item>b{M3}</item>",
    "deep": f"{M3}<k>{M3}<l>null{M3}</l>{M3}</k>",
}
DSML_WEATHER: dict[str, tuple[str, str]] = {"city": ("true", CITY), "n": ("false", "3")}
DSML_ALL = {key: ("true" if key == "city" else "false", value) for key, value in TYPED_ALL.items()}
PYTHON_WEATHER = 'get_weather(city="Zürich \\"x\\"\\n</b> 🙂", n=3)'
PYTHON_ALL = "get_weather(city='Oslo', n=-1, tags=['a', \"b\"], deep={'k': {'l': None}})"
Q, E = '<|"|>', "<escape>"
HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"

OUTPUTS: dict[str, list[Output]] = {
    "hermes": [
        *forms(
            _hermes(_json("get_weather", JSON_WEATHER)),
            _hermes(_json("get_weather", JSON_ALL)),
            _hermes(_json("get_time", "{}")),
            between="\n",
        ),
        Output('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', calls=[("f", {"n": 1})]),
        Output('<tool_call>{"name": "f"}</tool_call> and  more ', content="and  more ", calls=[("f", {})]),
        Output("a <tool_call>\nnothing </tool_call> b", content="a <tool_call>\nnothing </tool_call> b"),
        Output('a <tool_call>{"nam', content='a <tool_call>{"nam'),
        Output('<tool_call>{"name": "f", "arguments": {"a": "x', calls=[("f", '{"a": "x')]),
        Output('{"name": "f", "arguments": {}}', content='{"name": "f", "arguments": {}}'),
    ],
    "qwen_xml": [
        *forms(
            _qwen("get_weather", **TYPED_WEATHER), _qwen("get_weather", **TYPED_ALL), _qwen("get_time"), between="\n"
        ),
        Output(
            "<function=get_weather>\n<parameter=city>\n\n5\n\n</parameter>\n</function>",
            calls=[("get_weather", {"city": "\n5\n"})],
        ),
        Output("<tool_call><function=f><parameter=a>5</parameter></function>", calls=[("f", {"a": 5})]),
        Output("<tool_call>\n<function=", content="<tool_call>\n<function="),
    ],
    "llama_json": [
        Output(_json("get_weather", JSON_WEATHER, "parameters"), calls=[WEATHER]),
        Output("<|python_tag|>" + _json("get_weather", JSON_ALL, "parameters"), calls=[ALL]),
        Output(
            _json("get_time", "{}", "parameters") + "; " + _json("get_weather", JSON_ALL, "parameters"),
            calls=[TIME, ALL],
        ),
        Output("<|python_tag|>" + PYTHON_WEATHER.replace("(", ".call("), calls=[WEATHER]),
        Output('{"name": "Anna", "age": 3}', content='{"name": "Anna", "age": 3}'),
        Output(' {"answer": 3}', content=' {"answer": 3}'),
    ],
    "pythonic": [
        Output(f"[{PYTHON_WEATHER}]", calls=[WEATHER]),
        Output(f"[{PYTHON_WEATHER}, {PYTHON_ALL}]", calls=[WEATHER, ALL]),
        Output(f"<|python_start|>[get_time(), {PYTHON_ALL}]<|python_end|>", calls=[TIME, ALL]),
        Output("[1, 2] is a list", content="[1, 2] is a list"),
    ],
    "mistral_json": _listed("[TOOL_CALLS] [", "]"),
    "mistral_args": [
        *forms(
            "[TOOL_CALLS]get_weather[ARGS]" + JSON_WEATHER,
            "[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]" + JSON_ALL,
            "[TOOL_CALLS]get_time[ARGS]{}",
        ),
    ],
    "harmony": [
        Output(HARMONY.format("get_weather", JSON_WEATHER), calls=[WEATHER]),
        Output(
            "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant" + HARMONY.format("get_weather", JSON_ALL),
            reasoning="Hm. ",
            calls=[ALL],
        ),
        Output(" to=functions.get_time<|channel|>commentary json<|message|>{}<|call|>", calls=[TIME]),
        Output(
            "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant" + HARMONY.format("get_time", "{}"),
            content="I ask.",
            calls=[TIME],
        ),
        Output(
            "<|channel|>analysis<|message|>2+2<|end|>"
            "<|start|>assistant<|channel|>final<|message|> It is 4.\n<|return|>",
            reasoning="2+2",
            content=" It is 4.\n",
        ),
        Output("Just text", content="Just text"),
        Output("<|channel|>ana"),
        Output("<|channel|>final Just\ntext<|return|>", content="Just\ntext"),
        Output("<|channel|>Hello, you.<|return|>", content="Hello, you."),
        Output(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant I see <this>.<|end|>",
            reasoning="Hm.",
            content="I see <this>.",
        ),
        Output(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant So it is<|channel|>final<|message|>Yes.",
            reasoning="Hm.",
            content="So it isYes.",
        ),
        Output("<|channel|>analysis Hm.<|end|><|channel|>final<|message|>Yes.", reasoning="Hm.", content="Yes."),
        Output("<|channel|>analysis<|message|>Hm.<|end|>Yes.", reasoning="Hm.", content="Yes."),
        Output(
            "<|channel|>commentary to=functions.get_weather json" + JSON_ALL + "<|call|>", calls=[ALL], is_usual=False
        ),
    ],
    "muse_glimmer": [
        Output(_muse("get_weather", **TYPED_WEATHER), calls=[WEATHER]),
        Output(_muse("get_weather", **TYPED_ALL) + "<|eom|><|start|>assistant" + _muse("get_time"), calls=[ALL, TIME]),
        Output(
            " to=self<|message|>Hm. <atem:function_calls>?<|eom|><|start|>assistant" + _muse("get_time") + "<|eot|>",
            reasoning="Hm. <atem:function_calls>?",
            calls=[TIME],
        ),
        Output(
            " to=user<|message|>I ask.<|eom|><|start|>assistant" + _muse("get_time"), content="I ask.", calls=[TIME]
        ),
        Output(
            " to=self<|message|>2+2<|eom|><|start|>assistant to=user<|message|> It is 4.\n<|eot|>",
            reasoning="2+2",
            content=" It is 4.\n",
        ),
        Output("to=user<|message|>Yes.", content="Yes.", is_usual=False),
        Output("Just text", content="Just text"),
        Output(" to=me and you", content=" to=me and you"),
        Output(" to=sel"),
        Output(" to=self<|message|>Hm.<|eom|><|start|>assist", reasoning="Hm."),
        Output(_muse("get_time.get_time").replace("to=get_time.get_time", "to=get_time"), calls=[TIME], is_usual=False),
        Output(" to=user<|message|>A <atem:function_calls> is one.", content="A <atem:function_calls> is one."),
    ],
    "deepseek_v3": forms(
        _v3("get_weather", JSON_WEATHER),
        _v3("get_weather", JSON_ALL),
        _v3("get_time", "{}"),
        begin=BEGIN,
        between="\n",
        end=END,
    ),
    "deepseek_v31": forms(
        _v31("get_weather", JSON_WEATHER), _v31("get_weather", JSON_ALL), _v31("get_time", "{}"), begin=BEGIN, end=END
    ),
    "deepseek_dsml": [
        *_dsml_forms("function_calls"),
        Output(
            f'<{DSML}tool_calls><{DSML}invoke name="get_weather">{JSON_ALL}</{DSML}invoke></{DSML}tool_calls>',
            calls=[ALL],
            is_usual=False,
        ),
        Output(
            f"<{DSML}function_calls>\n"
            + _dsml("get_weather", n=("true", "42"), deep=("true", '{"k": {}}'), city=("false", "true"))
            + f"</{DSML}function_calls>",
            calls=[("get_weather", {"n": 42, "deep": {"k": {}}, "city": "true"})],
            is_usual=False,
        ),
    ],
    "deepseek_v4": _dsml_forms("tool_calls"),
    "glm": [
        *forms(
            _glm("get_weather", "\n", **TYPED_WEATHER),
            _glm("get_weather", "", **TYPED_ALL),
            _glm("get_time", "\n"),
            between="\n",
        ),
    ],
    "kimi_k2": forms(
        _kimi("get_weather", JSON_WEATHER, 0),
        _kimi("get_weather", JSON_ALL, 1),
        _kimi("get_time", "{}", 0),
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
    "gemma4": forms(
        f"<|tool_call>call:get_weather{{city:{Q}{CITY}{Q},n:3}}<tool_call|>",
        f"<|tool_call>call:get_weather{{city:{Q}Oslo{Q},n:-1,tags:[{Q}a{Q},{Q}b{Q}],deep:{{k:{{l:null}}}}}}<tool_call|>",
        "<|tool_call>call:get_time{}<tool_call|>",
    ),
    "functiongemma": [
        *forms(
            f"<start_function_call>call:get_weather{{city:{E}{CITY}{E},n:3}}<end_function_call>",
            f"<start_function_call>call:get_weather{{city:{E}Oslo{E},n:-1,tags:[{E}a{E},{E}b{E}],deep:{{k:{{l:null}}}}}}"
            "<end_function_call>",
            "<start_function_call>call:get_time{}<end_function_call>",
        ),
        Output(
            f"<start_function_call>call:get_weather{{n:{E}3{E}}}<end_function_call>",
            calls=[("get_weather", {"n": 3})],
            is_usual=False,
        ),
    ],
    "seed_xml": forms(
        *(
            call.replace("tool_call>", "seed:tool_call>")
            for call in (
                _qwen("get_weather", **TYPED_WEATHER),
                _qwen("get_weather", **TYPED_ALL),
                _qwen("get_time"),
            )
        ),
        between="\n",
    ),
    "minimax_m2": forms(
        _minimax("get_weather", **TYPED_WEATHER),
        _minimax("get_weather", **TYPED_ALL),
        _minimax("get_time"),
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
    ),
    "nemotron_nano_v2": _listed("<TOOLCALL>[", "]</TOOLCALL>"),
    "hunyuan_a13b": [
        *_listed("<tool_calls>[", "]</tool_calls>"),
        Output(
            f"<tool_calls>\n{_json('get_time', '{}')}\n{_json('get_weather', JSON_ALL)}\n</tool_calls>",
            calls=[TIME, ALL],
            is_usual=False,
        ),
    ],
    "lfm2": forms(
        PYTHON_WEATHER, PYTHON_ALL, "get_time()", begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"
    ),
    "olmo3": [
        *forms(
            PYTHON_WEATHER, PYTHON_ALL, "get_time()", begin="<function_calls>", between="\n", end="</function_calls>"
        ),
        Output(
            "<function_calls>\nget_weather(n=3, deep={'k': null}, tags=[true])\n</function_calls>",
            calls=[("get_weather", {"n": 3, "deep": {"k": None}, "tags": [True]})],
            is_usual=False,
        ),
        Output("<function_calls>\nnone\n</function_calls>", content="<function_calls>\nnone\n</function_calls>"),
    ],
    "apertus": [
        *forms(
            f'{{"get_weather": {JSON_WEATHER}}}',
            f'{{"get_weather": {JSON_ALL}}}',
            '{"get_time": {}}',
            begin="<|tools_prefix|>[",
            between=", ",
            end="]<|tools_suffix|>",
        ),
        Output('<|tools_prefix|>[{"get_weather": {"n"', calls=[("get_weather", '{"n"')], is_usual=False),
        Output('<|tools_prefix|>["get_weather"]', content='<|tools_prefix|>["get_weather"]'),
    ],
    "gigachat3": _one_call("<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "gigachat31": _one_call("<|function_call|>"),
    "longcat_json": forms(
        *(
            call.replace("tool_call>", "longcat_tool_call>")
            for call in (
                _hermes(_json("get_weather", JSON_WEATHER)),
                _hermes(_json("get_weather", JSON_ALL)),
                _hermes(_json("get_time", "{}")),
            )
        )
    ),
    "longcat_args": forms(*_typed(_glm, line_end="\n", prefix="longcat_"), between="\n"),
    "internlm": [
        *forms(_internlm("get_weather", JSON_WEATHER), _internlm("get_weather", JSON_ALL), _internlm("get_time", "{}")),
        Output("<|action_start|>f()", content="<|action_start|>f()"),
    ],
    "xlam": [
        Output(f"[{_json('get_weather', JSON_WEATHER)}]", calls=[WEATHER]),
        Output(f"[{_json('get_time', '{}')}, {_json('get_weather', JSON_ALL)}]", calls=[TIME, ALL]),
        Output(f"[{_json('get_time', '{}')}]", calls=[TIME]),
        Output(f"See:\n```json\n[{_json('get_time', '{}')}]\n```", content="See:", calls=[TIME], is_usual=False),
        Output('```json\n[{"name": "Anna", "age": 3}]\n```', content='```json\n[{"name": "Anna", "age": 3}]\n```'),
        Output("[1, 2] is a list", content="[1, 2] is a list"),
    ],
    "plamo3": [
        *forms(
            _plamo("get_weather", JSON_WEATHER),
            _plamo("get_weather", JSON_ALL),
            _plamo("get_time", "{}"),
            begin="<|plamo:begin_tool_requests:plamo|>",
            end="<|plamo:end_tool_requests:plamo|>",
        ),
        Output(
            "<|plamo:begin_tool_requests:plamo|>"
            + _plamo("get_time", "{}")
            .replace("<|plamo:constrain|>json", "")
            .replace("<|plamo:end_tool_arguments:plamo|>", ""),
            calls=[TIME],
            is_usual=False,
        ),
    ],
    "solar_open2": [
        *forms(*_typed(_solar), between="\n"),
        Output(
            "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_call:end|>\n"
            + _solar("get_time"),
            calls=[("get_weather", {"city": "Oslo"}), TIME],
            is_usual=False,
        ),
    ],
    "hy_v3": forms(*_typed(_hy, suffix=""), begin="<tool_calls>\n", end="</tool_calls>"),
    "hy_v3_opensource": forms(
        *_typed(_hy, suffix=":opensource"), begin="<tool_calls:opensource>\n", end="</tool_calls:opensource>"
    ),
    "step3": forms(*_typed(_step), begin="<｜tool_calls_begin｜>\n", between="\n", end="<｜tool_calls_end｜>"),
    "minicpm5": [
        *forms(*_typed(_minicpm), between="\n"),
        Output(
            '<function name="get_weather"><param name="city"><![CDATA[</param> & "x"]]></param>'
            '<param name="n"><![CDATA[3]]></param></function>',
            calls=[("get_weather", {"city": '</param> & "x"', "n": 3})],
            is_usual=False,
        ),
        Output('Write <function name="x', content='Write <function name="x'),
    ],
    "kimi_k3": [
        *forms(*_typed(_kimi_k3), begin=K3_BEGIN, end=K3_END),
        Output(
            K3_BEGIN
            + _kimi_k3("get_weather", city="Oslo").replace("<|close|>argument<|sep|><", "<")
            + '<|open|>call tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>{"n": 3}'
            "<|close|>json<|sep|><|close|>call<|sep|>" + K3_END + "<|close|>message<|sep|>",
            calls=[("get_weather", {"city": "Oslo"}), ("get_weather", {"n": 3})],
            is_usual=False,
        ),
        Output(f"{K3_BEGIN}none", content=f"{K3_BEGIN}none"),
    ],
    "minimax_m3": [
        *forms(
            _minimax_m3("get_weather", **TYPED_WEATHER),
            _minimax_m3("get_weather", **NESTED_ALL),
            _minimax_m3("get_time"),
            begin=f"{M3}<tool_call>\n",
            end=f"{M3}</tool_call>",
        ),
        Output(
            f'{M3}<invoke name="get_weather">\n{M3}\n<tags>\n{M3}<item>{M3}x{M3}</item>\n{M3}</tags>'
            f"{M3}<city>a{M3}<b>{M3}<n>3{M3}</n>\n{M3}</invoke>",
            calls=[("get_weather", {"tags": [f"{M3}x"], "city": f"a{M3}<b>", "n": 3})],
            is_usual=False,
        ),
        Output(
            _minimax_m3("get_weather", city="", n=" 3", tags="", deep='{"k": {}}')
            + _minimax_m3("f", a="", b=f"{M3}<c>1{M3}</c>", d=f"{M3}<item>true{M3}</item>"),
            calls=[
                ("get_weather", {"city": "", "n": 3, "tags": [], "deep": {"k": {}}}),
                ("f", {"a": "", "b": {"c": 1}, "d": [True]}),
            ],
            is_usual=False,
        ),
        Output(f'{M3}<invoke name="f">{M3}<a>{M3}<b>1{M3}</a>', calls=[("f", '{"a": {"b": 1}')], is_usual=False),
        Output(f"See {M3}<other>", content=f"See {M3}<other>", is_usual=False),
    ],
    "granite3": _listed("<|tool_call|>[", "]"),
    "phi4_mini": _listed("functools[", "]"),
    "cohere": forms(
        _cohere("get_weather", JSON_WEATHER, 0),
        _cohere("get_weather", JSON_ALL, 1),
        _cohere("get_time", "{}", 0),
        begin="<|START_ACTION|>[\n",
        between=",\n",
        end="\n]<|END_ACTION|>",
    ),
}
