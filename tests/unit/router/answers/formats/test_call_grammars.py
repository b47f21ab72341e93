"""What any model writes under the grammar of a format is read as calls that fit their schemas."""

from __future__ import annotations

import json

import jsonschema
import pytest
from call_trials import (
    END,
    FORMS,
    MANY_TOKENS,
    MAX_TOKENS,
    SCHEMAS,
    THINKS,
    check_calls,
    matcher_of,
    read,
    tokenizer_of,
    written,
)
from support.format_outputs import OUTPUTS
from support.format_outputs import SCHEMAS as WRITTEN_SCHEMAS
from tokenizers import Tokenizer

from model_server.text.watch import TextWatch
from router.answers.formats.events import Content, Reasoning
from router.answers.formats.format import INDEX, SAME_NAME, Format
from router.answers.formats.grammar import (
    Thinking,
    answer_behind,
    calls_or_answer,
    forced_calls,
    free_calls,
    is_suitable,
)
from router.answers.formats.markers import Markers
from router.answers.formats.table import FORMATS
from wire.grammar import TextTrigger, trigger_of

OPENED_BY_TEXT = (
    "llama_json", "phi4_mini", "harmony", "pythonic", "hunyuan_a13b", "hy_v3", "minicpm5", "plamo3", "xlam", "kimi_k3",
    "muse_glimmer",
)  # fmt: skip
FEW_SAMPLES = pytest.mark.parametrize(
    "num_samples", [4, pytest.param(10, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.weekly)]
)


@FEW_SAMPLES
@pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
def test_demanded_calls_fit_their_schemas(format: Format, num_samples: int) -> None:
    _, _, markers = tokenizer_of(format.name)
    opens, closes = (format.form and format.form.thinks) or ("", "")
    thinking = Thinking(opens=opens or THINKS[0], closes=closes or THINKS[1], budget=20)
    matcher = matcher_of(format.name, forced_calls(format, markers, SCHEMAS, thinking, is_one=format.is_one))
    style = None if opens else "think"
    numbers = []
    for seed in range(num_samples):
        ids = written(format.name, matcher, seed, likely=(closes or THINKS[1], END), max_tokens=MANY_TOKENS)
        assert len(ids) < MANY_TOKENS
        events = read(format.name, ids, style=style)
        assert not any(isinstance(event, Content) for event in events)
        numbers.append(check_calls(events))
    assert min(numbers) >= 1


@pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
def test_several_calls_follow_each_other_and_text_follows_them(format: Format) -> None:
    """Freely, unless one call is asked for; white space and text may be between them, too."""
    tokenizer, _, markers = tokenizer_of(format.name)
    opener = format.openers[0] if format.openers else ""
    usual = [one for one in OUTPUTS[format.name] if one.is_usual and len(one.calls) > 1]
    texts = [one.text for one in usual if one.text.startswith((opener, "["))]
    if format.name in OPENED_BY_TEXT:
        texts = [text.removeprefix("<|python_start|>") for text in texts]
    for is_one in (False, True):
        grammar = free_calls(format, markers, WRITTEN_SCHEMAS, is_one=is_one)
        assert grammar is not None
        for text in texts:
            for behind in ("", "\n", "\nDone.\n\n"):
                ids = tokenizer.encode(text + behind, add_special_tokens=False).ids
                matcher = matcher_of(format.name, grammar)
                assert (matcher.validate_tokens(ids) == len(ids)) is not is_one, (text, behind)


@FEW_SAMPLES
@pytest.mark.parametrize("format", FORMS, ids=lambda format: format.name)
def test_under_noise_no_mark_is_content(format: Format, num_samples: int) -> None:
    _, _, markers = tokenizer_of(format.name)
    grammar = free_calls(format, markers, SCHEMAS, is_one=False)
    assert grammar is not None
    if format.name in (*OPENED_BY_TEXT, "deepseek_dsml", "deepseek_v4", "gigachat3", "minimax_m3"):
        return  # the token that opens calls is but a part of their mark
    matcher = matcher_of(format.name, grammar)
    num_calls = 0
    for seed in range(num_samples):
        ids = written(format.name, matcher, seed, likely=(*format.openers, END))
        events = read(format.name, ids)
        content = "".join(event.text for event in events if isinstance(event, Content))
        opener = markers.visible(markers.encoded(format.openers[0]))
        # A call that the most tokens cut before its name is complete is content, as it is written.
        assert opener not in content or len(ids) == MAX_TOKENS
        num_calls += check_calls(events) if len(ids) < MAX_TOKENS else 0
    assert num_calls > num_samples / 10


@FEW_SAMPLES
@pytest.mark.parametrize("name", OPENED_BY_TEXT)
def test_a_text_opens_calls_that_fit_their_schemas(name: str, num_samples: int) -> None:
    tokenizer, vocabulary, markers = tokenizer_of(name)
    form = FORMATS[name].form
    grammar = free_calls(FORMATS[name], markers, SCHEMAS, is_one=FORMATS[name].is_one)
    assert form is not None and grammar is not None
    trigger, start = trigger_of("lark", grammar), matcher_of(name, grammar)
    assert isinstance(trigger, TextTrigger)
    numbers = []
    for seed in range(num_samples):
        function, more = list(SCHEMAS)[seed % 3], "{" if form.arguments is None and seed % 2 else ""
        before = "" if trigger.behind else "Well. "
        behind = form.behind_name.replace(INDEX, "1").replace(SAME_NAME, function)
        opening = before + form.begin + form.before_name + function + behind + more
        ids = tokenizer.encode(opening, add_special_tokens=False).ids
        watch = TextWatch(trigger, vocabulary)
        found = [watch.add(one) for one in ids]
        place = next(number for number, tokens in enumerate(found) if tokens)
        matcher = start.deep_copy()
        assert matcher.consume_tokens([*found[place], *ids[place + 1 :]]), matcher.get_error()
        ids += written(name, matcher, seed, likely=(END,))
        assert len(ids) < MAX_TOKENS
        numbers.append(check_calls(read(name, ids)))
    assert min(numbers) >= 1


@pytest.mark.parametrize("is_open", [True, False])
def test_an_answer_behind_thinking_fits_its_schema(is_open: bool) -> None:
    _, _, markers = tokenizer_of("hermes")
    thinking = Thinking(opens=THINKS[0], closes=THINKS[1], is_open=is_open, budget=5)
    matcher = matcher_of("hermes", answer_behind(thinking, markers, {"json_schema": SCHEMAS["get_weather"]}))
    for seed in range(20):
        events = read("hermes", written("hermes", matcher, seed), style="think", is_open=is_open)
        jsonschema.validate(
            json.loads("".join(event.text for event in events if isinstance(event, Content))), SCHEMAS["get_weather"]
        )
        assert sum(isinstance(event, Reasoning) for event in events) <= 6


def test_a_budget_ends_thinking() -> None:
    tokenizer, _, markers = tokenizer_of("hermes")
    thinking = Thinking(opens=THINKS[0], closes=THINKS[1], is_open=True, budget=3)
    matcher = matcher_of("hermes", forced_calls(FORMATS["hermes"], markers, SCHEMAS, thinking, is_one=True))
    for _ in range(3):
        assert matcher.consume_token(tokenizer.token_to_id("."))
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert mask == 1 << tokenizer.token_to_id(THINKS[1])


def test_thinking_between_marks_that_are_no_tokens() -> None:
    """Which end where their text does, wherever the borders of tokens lie."""
    tokenizer, _, _ = tokenizer_of("hermes")
    markers, thinking = Markers((), {}), Thinking(opens="[t]", closes="[/t]", is_open=True)
    start = matcher_of("hermes", forced_calls(FORMATS["hermes"], markers, SCHEMAS, thinking, is_one=True))
    good = 'So <b> it is. [/t]<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text, fits in ((good, True), (good.replace("[/t]", "[/t] more"), False)):
        matcher = start.deep_copy()
        ids = Tokenizer.from_str(_plain(tokenizer)).encode(text, add_special_tokens=False).ids
        assert (matcher.validate_tokens(ids) == len(ids)) is fits


def _plain(tokenizer: Tokenizer) -> str:
    """Without tokens for the marks."""
    read = json.loads(tokenizer.to_str())
    read["added_tokens"] = []
    return json.dumps(read)


def test_a_token_that_does_not_fit_is_refused() -> None:
    tokenizer, _, markers = tokenizer_of("hermes")
    start = matcher_of("hermes", forced_calls(FORMATS["hermes"], markers, SCHEMAS, Thinking(), is_one=False))
    good = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": []}}\n</tool_call>'
    ids = tokenizer.encode(good, add_special_tokens=False).ids
    assert start.deep_copy().validate_tokens(ids) == len(ids)
    for wrong in (
        good.replace("get_weather", "get_other"), good.replace('"city"', '"town"'), good.replace('"Rome"', "3"),
        good.replace('"Rome"', '"a long name"'), good.replace("arguments", "parameters"), "Hello" + good,
    ):  # fmt: skip
        ids = tokenizer.encode(wrong, add_special_tokens=False).ids
        assert start.deep_copy().validate_tokens(ids) < len(ids)


def test_names_that_no_frame_can_hold() -> None:
    assert is_suitable(["get_weather", "mcp__a.b/c-1", "名前"])
    for name in ('a"b', "a b", "<|x|>", "a\\b", "a(b)", ""):
        assert not is_suitable([name])


@pytest.mark.parametrize("name", [format.name for format in FORMS if format.name not in ("llama_json", "pythonic")])
def test_calls_or_an_answer_of_a_form(name: str) -> None:
    """What is written is one or the other, and both come."""
    _, _, markers = tokenizer_of(name)
    form = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    own = FORMATS[name].form
    answers = own.answers if own is not None and FORMATS[name].turn is not None else ""
    grammar = calls_or_answer(FORMATS[name], markers, SCHEMAS, Thinking(), form, is_one=True, answers=answers)
    matcher, kinds = matcher_of(name, grammar), set()
    for seed in range(20):
        events = read(name, written(name, matcher, seed, likely=(*FORMATS[name].openers, "{")))
        content = "".join(event.text for event in events if isinstance(event, Content))
        num_calls = check_calls(events)
        kinds.add(num_calls)
        assert num_calls or set(json.loads(content)) == {"a"}
        assert not num_calls or not content.strip()
    assert kinds == {0, 1}
