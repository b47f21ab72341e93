"""From Messages bodies to chats."""

from __future__ import annotations

from typing import Any

import orjson

from router.api.chat.prompt import carried, chat_body, check_one_form
from router.api.chat.schema import ChatBody
from router.api.messages.blocks import (
    DocumentBlock,
    ImageBlock,
    SearchResultBlock,
    ServerToolResultBlock,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.messages.schema import CountTokensBody, InputMessage, MessagesBody, MessagesTool, MessagesToolChoice

_BILLING = "x-anthropic-billing-header:"
"""How a line begins that Claude Code puts before its system prompt. It changes with each request, so that the prefix
cache would never find the prompt again."""
_ERROR = "Error: "
_READABLE = ("title", "url", "text", "data", "stdout", "stderr", "tool_name", "error_code")
_Written = TextBlock | SearchResultBlock | ToolReferenceBlock | ServerToolUseBlock | ServerToolResultBlock
_Shown = ImageBlock | DocumentBlock | _Written
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensBody) -> ChatBody:
    """Return the chat, with generation's fields if given."""
    fields: dict[str, Any] = {"model": body.model, "messages": [*_system(body), *_messages(body.messages)]}
    fields["chat_template_kwargs"] = body.chat_template_kwargs
    if isinstance(body, MessagesBody):
        fields |= carried(body)
    if tools := [_tool(tool) for tool in _shown_tools(body)]:
        fields["tools"] = tools
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks} | body.chat_template_kwargs
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if (form := body.output_config.format) is not None:
            check_one_form(fields, "output_config.format")
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "stream": body.stream}
        fields |= {"thinking_token_budget": _budget(body)}
    return chat_body(fields)


def _budget(body: MessagesBody) -> int | None:
    """Return the thinking budget, unless it leaves nothing of `max_tokens`, as clients without a bound ask."""
    budget = None if body.thinking is None or body.thinking.type != "enabled" else body.thinking.budget_tokens
    return None if budget is None or budget + 1 >= body.max_tokens else budget


def _system(body: CountTokensBody) -> list[dict[str, Any]]:
    if body.system is None:
        return []
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
    text = "".join(text for text in texts if not text.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _messages(messages: list[InputMessage]) -> list[dict[str, Any]]:
    return [turn for message in messages for turn in _turns(message)]


def _turns(message: InputMessage) -> list[dict[str, Any]]:
    """Split a message: tool results are turns before its text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning = ""
    for block in message.content:
        if isinstance(block, _Shown):
            parts += _parts(block)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        elif isinstance(block, ThinkingBlock):
            reasoning += block.thinking
    turn: dict[str, Any] = {"role": message.role}
    if parts:
        turn["content"] = parts
    if calls:
        turn["tool_calls"] = calls
    if reasoning:
        turn["reasoning"] = reasoning
    if len(turn) > 1:
        return [*results, turn]
    return results or [{"role": message.role, "content": ""}]


def _parts(block: _Shown) -> list[dict[str, Any]]:
    if isinstance(block, ImageBlock):
        return [_image(block)]
    if not isinstance(block, DocumentBlock):
        return [_text_part(_text(block))]
    source = block.source
    content = source.data if source.type == "text" else source.content
    before = "".join(f"{text}\n" for text in (block.title, block.context) if text)
    if isinstance(content, str):
        return [_text_part(f"{before}{content}\n")]
    blocks = [TextBlock(type="text", text=before), *(content or ()), TextBlock(type="text", text="\n")]
    return [part for one in blocks for part in _parts(one)]


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(block: ImageBlock) -> dict[str, Any]:
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: _Written) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(one.text for one in block.content)]) + "\n"
    if isinstance(block, ToolReferenceBlock):
        return f"{block.tool_name}\n"
    if isinstance(block, ServerToolUseBlock):
        return f"{block.name}: {orjson.dumps(block.input).decode()}\n"
    return "".join(f"{text}\n" for text in _texts_in(block.content))


def _texts_in(content: Any) -> list[str]:
    """Return a result's readable texts."""
    if isinstance(content, list):
        return [text for one in content for text in _texts_in(one)]
    if not isinstance(content, dict):
        return []
    own = [content[name] for name in _READABLE if isinstance(content.get(name), str) and content[name]]
    return own + [text for one in content.values() if isinstance(one, list | dict) for text in _texts_in(one)]


def _result(block: ToolResultBlock) -> str | list[dict[str, Any]]:
    if isinstance(block.content, str):
        return f"{_ERROR}{block.content}" if block.is_error else block.content
    parts = [part for one in block.content for part in _parts(one)]
    return [_text_part(_ERROR), *parts] if block.is_error else parts or ""


def _shown_tools(body: CountTokensBody) -> list[MessagesTool]:
    """Return the client's own tools, but deferred ones that one of them has yet to find."""
    tools = [tool for tool in body.tools or () if tool.type == "custom"]
    is_searched_here = any(tool.type.startswith("tool_search_tool") for tool in body.tools or ())
    if is_searched_here or all(tool.defer_loading for tool in tools):
        return tools
    found = {None if body.tool_choice is None else body.tool_choice.name}
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            inner = block.content if isinstance(block, ToolResultBlock) else ()
            found |= {one.tool_name for one in (block, *inner) if isinstance(one, ToolReferenceBlock)}
    return [tool for tool in tools if not tool.defer_loading or tool.name in found]


def _tool(tool: MessagesTool) -> dict[str, Any]:
    description = tool.description
    if tool.input_examples:
        examples = [orjson.dumps(one).decode() for one in tool.input_examples]
        description = "\n".join([*([description] if description else []), "Examples of its input:", *examples])
    function = {"name": tool.name, "description": description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    asked = named if choice.type == "tool" else _CHOICES[choice.type]
    return {"tool_choice": asked, "parallel_tool_calls": not choice.disable_parallel_tool_use}
