"""Anthropic's context editing: earlier tool results and thinking are cleared before the model reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from router.api.messages.blocks import ThinkingBlock, ToolResultBlock, ToolUseBlock
from router.api.messages.edits import ClearThinking, ClearToolUses
from router.api.messages.schema import CountTokensBody, InputMessage

CLEARED = "[This result was cleared.]"
"""What the model reads instead of a result."""

Conversation = TypeVar("Conversation", bound=CountTokensBody)
Count = Callable[[Conversation], Awaitable[int]]
Applied = list[dict[str, Any]]


async def edited(body: Conversation, count: Count[Conversation]) -> tuple[Conversation, Applied, int | None]:
    """Apply the edits of a body in their order.

    Args:
        count: How many tokens the prompt of a body has.

    Returns:
        The body, what was done, and how many tokens the prompt had before, where that was counted.
    """
    applied: Applied = []
    first = before = None
    for edit in () if body.context_management is None else body.context_management.edits:
        if isinstance(edit, ClearThinking):
            name, (messages, number) = "cleared_thinking_turns", _without_thinking(body.messages, edit)
        else:
            name, (messages, number) = "cleared_tool_uses", _without_results(body.messages, edit)
        if not number:
            continue
        if before is None:
            first = before = await count(body)
        if isinstance(edit, ClearToolUses) and not _is_reached(edit, before, body.messages):
            continue
        changed = body.model_copy(update={"messages": messages})
        after = await count(changed)
        saved = before - after
        if isinstance(edit, ClearToolUses) and edit.clear_at_least is not None and saved < edit.clear_at_least.value:
            continue
        body, before = changed, after
        applied.append({"type": edit.type, name: number, "cleared_input_tokens": saved})
    return body, applied, first


def _is_reached(edit: ClearToolUses, num_tokens: int, messages: list[InputMessage]) -> bool:
    trigger = edit.trigger
    reached = num_tokens if trigger.type == "input_tokens" else sum(1 for _ in _calls(messages))
    return reached > trigger.value


def _calls(messages: list[InputMessage]) -> Iterator[ToolUseBlock]:
    for message in messages:
        if isinstance(message.content, list):
            yield from (block for block in message.content if isinstance(block, ToolUseBlock))


def _without_results(messages: list[InputMessage], edit: ClearToolUses) -> tuple[list[InputMessage], int]:
    """Clear the results of all calls but the last ones, and how many they were."""
    calls = list(_calls(messages))
    old = calls[: len(calls) - edit.keep.value] if edit.keep.value else calls
    ids = {call.id for call in old if call.name not in edit.exclude_tools}
    found, cleared = [], set()
    for message in messages:
        blocks = message.content
        if isinstance(blocks, list):
            changed = [_cleared(block, ids, edit) for block in blocks]
            cleared |= {block.tool_use_id for block in blocks if isinstance(block, ToolResultBlock)} & ids
            message = message.model_copy(update={"content": changed})
        found.append(message)
    return found, len(cleared)


def _cleared(block: Any, ids: set[str], edit: ClearToolUses) -> Any:
    if isinstance(block, ToolResultBlock) and block.tool_use_id in ids:
        return block.model_copy(update={"content": CLEARED, "is_error": False})
    if isinstance(block, ToolUseBlock) and block.id in ids and edit.clears_input_of(block.name):
        return block.model_copy(update={"input": {}})
    return block


def _without_thinking(messages: list[InputMessage], edit: ClearThinking) -> tuple[list[InputMessage], int]:
    """Leave out the thinking of all turns of the assistant but the last ones, and how many they were."""
    turns: list[list[int]] = []
    has_ended = True
    for place, message in enumerate(messages):
        if message.role != "assistant":
            has_ended = has_ended or not _is_of_results(message)
            continue
        if has_ended:
            turns.append([])
        has_ended = False
        turns[-1].append(place)
    thinking = [turn for turn in turns if any(_thinks(messages[place]) for place in turn)]
    keep = edit.kept_turns
    old = [] if keep is None else thinking[: len(thinking) - keep] if keep else thinking
    places = {place for turn in old for place in turn}
    found = [_plain(message) if place in places else message for place, message in enumerate(messages)]
    return found, len(old)


def _is_of_results(message: InputMessage) -> bool:
    return isinstance(message.content, list) and all(isinstance(block, ToolResultBlock) for block in message.content)


def _thinks(message: InputMessage) -> bool:
    return isinstance(message.content, list) and any(isinstance(block, ThinkingBlock) for block in message.content)


def _plain(message: InputMessage) -> InputMessage:
    if not isinstance(message.content, list):
        return message
    kept = [block for block in message.content if not isinstance(block, ThinkingBlock)]
    return message.model_copy(update={"content": kept})
