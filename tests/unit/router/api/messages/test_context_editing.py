"""`context_management` of `/v1/messages`: what the model reads, what the answer says, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, says

from router.api.messages.context import CLEARED

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}"
)
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def turn(number: int, tool: str = "look") -> list[dict[str, Any]]:
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": f"t{number}", "signature": "x"},
                {"type": "tool_use", "id": f"toolu_{number}", "name": tool, "input": {"n": number}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "long " * 9}],
        },
    ]


CHAT = [
    {"role": "user", "content": "Go"}, *turn(1), *turn(2, "memory"), {"role": "assistant", "content": "Done"},
    {"role": "user", "content": "More"}, *turn(3), *turn(4),
]  # fmt: skip


def body(*edits: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tgi", "max_tokens": 5, "messages": CHAT, "context_management": {"edits": list(edits)}} | fields


@pytest.fixture
def router(make_router: Callable[..., Router]) -> Router:
    return make_router(lambda request: says("Fine"), templates={"default": TEMPLATE})


def tools(value: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": value}


def tokens(value: int) -> dict[str, Any]:
    return {"type": "input_tokens", "value": value}


AT_ONCE = {"type": USES, "trigger": tokens(1), "keep": tools(1)}


@pytest.mark.parametrize(
    ("edits", "cleared", "thoughts", "done"),
    [
        ([], [], [1, 2, 3, 4], []),
        ([{"type": USES}], [], [1, 2, 3, 4], []),
        ([{"type": USES, "trigger": tools(4)}], [], [1, 2, 3, 4], []),
        ([{"type": USES, "trigger": tools(3)}], [1], [1, 2, 3, 4], [{"cleared_tool_uses": 1}]),
        ([AT_ONCE], [1, 2, 3], [1, 2, 3, 4], [{"cleared_tool_uses": 3}]),
        ([AT_ONCE | {"keep": tools(0)}], [1, 2, 3, 4], [1, 2, 3, 4], [{"cleared_tool_uses": 4}]),
        ([AT_ONCE | {"exclude_tools": ["memory"]}], [1, 3], [1, 2, 3, 4], [{"cleared_tool_uses": 2}]),
        ([AT_ONCE | {"clear_at_least": tokens(10_000)}], [], [1, 2, 3, 4], []),
        ([AT_ONCE | {"clear_at_least": tokens(2)}], [1, 2, 3], [1, 2, 3, 4], [{"cleared_tool_uses": 3}]),
        ([{"type": THINKING, "keep": "all"}], [], [1, 2, 3, 4], []),
        ([{"type": THINKING, "keep": {"type": "all"}}], [], [1, 2, 3, 4], []),
        ([{"type": THINKING}], [], [3, 4], [{"cleared_thinking_turns": 1}]),
        ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}], [], [1, 2, 3, 4], []),
        ([{"type": THINKING}, AT_ONCE], [1, 2, 3], [3, 4], [{"cleared_thinking_turns": 1}, {"cleared_tool_uses": 3}]),
    ],
)
async def test_what_the_model_reads_and_the_answer_says(
    router: Router, edits: list[Any], cleared: list[int], thoughts: list[int], done: list[dict[str, int]]
) -> None:
    answer = (await router.post(PATH, body(*edits))).json()
    prompt = router.scheduler.last.inputs
    results = prompt.split("<tool>")[1:]
    assert [number for number in (1, 2, 3, 4) if results[number - 1].startswith(CLEARED)] == cleared
    assert [number for number in (1, 2, 3, 4) if f"(t{number})" in prompt] == thoughts
    assert all(f"{{'n': {number}}}" in prompt for number in (1, 2, 3, 4))
    applied = answer["context_management"]["applied_edits"]
    saved = [edit.pop("cleared_input_tokens") for edit in applied]
    assert [{name: edit[name] for name in edit if name != "type"} for edit in applied] == done
    counted = (await router.post(COUNT, body(*edits))).json()
    whole = (await router.post(COUNT, body())).json()["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": whole}
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] == whole - sum(saved)


async def test_arguments_are_cleared_where_it_is_asked(router: Router) -> None:
    for asked, left in ((True, [4]), (["memory"], [1, 3, 4]), (None, [1, 2, 3, 4])):
        await router.post(PATH, body(AT_ONCE | {"clear_tool_inputs": asked}))
        prompt = router.scheduler.last.inputs
        assert [number for number in (1, 2, 3, 4) if f"{{'n': {number}}}" in prompt] == left


async def test_a_stream_says_it_too_and_without_the_field_nothing_does(router: Router) -> None:
    stream = (await router.post(PATH, body(AT_ONCE, stream=True))).text
    assert (
        '"applied_edits":[{"type":"clear_tool_uses_20250919","cleared_tool_uses":3' in stream.split("message_delta")[-1]
    )
    plain = body()
    del plain["context_management"]
    assert "context_management" not in (await router.post(PATH, plain)).json()
    assert set((await router.post(COUNT, plain)).json()) == {"input_tokens"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"type": "compact_20260112"}, "context_management.edits: `compact_20260112` is not served"),
        ({"type": "clear_everything"}, "clear_everything"),
        ({"type": USES, "trigger": {"type": "words", "value": 3}}, "trigger"),
        ({"type": THINKING, "keep": {"type": "thinking_turns"}}, "`thinking_turns` needs `value`"),
    ],
)
async def test_other_edits_are_refused_by_name(router: Router, edit: dict[str, Any], said: str) -> None:
    answer = await router.post(PATH, body(edit))
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said in message and message.count(": context_management") == 0
