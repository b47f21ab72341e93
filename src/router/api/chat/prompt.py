"""From a chat body to template turns and a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pydantic

from router.answers.formats.format import IdKind
from router.api.chat.schema import ChatBody, ImagePart, ImageUrl, Message, RefusalPart, ToolCall
from router.api.openai import parameters
from router.errors import StartupError, TemplateError, ValidationError
from router.generation.api_rules import CHAT, ApiRules
from router.generation.asked import GenerateRequest
from router.grammar.checker import AskedGrammar
from router.images.asked import AskedImage, split_markers
from router.images.prompt import ImagePrompts
from router.schemas.guided import Constrained
from router.schemas.openai import OpenAIParameters, TextPart
from router.template.messages import PromptEnding, Turn
from wire.text import chat_options

BASE_MODEL = "tgi"
"""The `model` that clients of TGI send when they mean "whatever you serve"."""

TAKEN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "bos_token",
     "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now",
     "namespace", "dict", "range", "lipsum", "cycler", "joiner"}
)  # fmt: skip
"""Variables and functions of every template."""

_CARRIED = frozenset({*OpenAIParameters.model_fields, *Constrained.model_fields})


def turns_of(body: ChatBody, images: ImagePrompts | None, field: str) -> list[Turn]:
    """Return the template's turns.

    Args:
        images: None: text only.
        field: The client's name of the messages.
    """
    return [_turn(message, images, field) for message in body.messages]


def with_counted_ids(turns: list[Turn]) -> list[Turn]:
    """Put names into call ids, numbered in the chat, for models that expect it."""
    renamed: dict[str, str] = {}
    number, found = 0, []
    for turn in turns:
        calls = []
        for call in turn.tool_calls or ():
            given = call.get("id")
            if given is None or not IdKind.COUNTED.accepts(given):
                call = {**call, "id": IdKind.COUNTED.new(call["function"]["name"], number)}
            if given is not None:
                renamed[given] = call["id"]
            calls.append(call)
            number += 1
        answered = None if turn.tool_call_id is None else renamed.get(turn.tool_call_id, turn.tool_call_id)
        found.append(replace(turn, tool_calls=calls or turn.tool_calls, tool_call_id=answered))
    return found


def with_marked_images(body: ChatBody, most: int) -> ChatBody:
    """Turn TGI's markers in texts into image parts, at most `most`."""
    messages = [_with_marked_images(message, most) for message in body.messages]
    return body.model_copy(update={"messages": messages})


def _with_marked_images(message: Message, most: int) -> Message:
    content = message.content
    if content is None:
        return message
    parts: list[TextPart | ImagePart] = []
    for part in [TextPart(type="text", text=content)] if isinstance(content, str) else content:
        if isinstance(part, ImagePart):
            parts.append(part)
            continue
        texts, urls = split_markers(part.text, most)
        parts.append(TextPart(type="text", text=texts[0]))
        for url, text in zip(urls, texts[1:], strict=True):
            parts.append(ImagePart(type="image_url", image_url=ImageUrl(url=url)))
            parts.append(TextPart(type="text", text=text))
    if len(parts) == 1 and isinstance(content, str):
        return message
    return message.model_copy(update={"content": parts})


def images_of(body: ChatBody) -> tuple[AskedImage, ...]:
    """The images of all messages, in order."""
    return tuple(
        AskedImage(part.image_url.url, part.image_url.detail or "auto")
        for message in body.messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ImagePart)
    )


def request_of(
    body: ChatBody, prompt: str, grammar: AskedGrammar | None, images: tuple[AskedImage, ...], api: ApiRules
) -> GenerateRequest:
    """Return a chat's generation."""
    if api is CHAT and body.max_completion_tokens is not None:
        api = replace(api, max_new_tokens="max_completion_tokens")
    return parameters.request_of(
        body,
        api=api,
        inputs=prompt,
        add_special_tokens=False,
        max_new_tokens=parameters.most_tokens(
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        ),
        top_n_tokens=body.top_logprobs,
        grammar=grammar,
        images=images,
    )


def variables_of(body: ChatBody) -> dict[str, Any]:
    """Return the client's template variables, if allowed."""
    variables = dict(body.chat_template_kwargs)
    if taken := variables.keys() & TAKEN_NAMES:
        text = f"`chat_template_kwargs` cannot set `{min(taken)}`"
        raise ValidationError(text, param="chat_template_kwargs")
    effort = body.effort
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        text = "`reasoning_effort` is given twice, with two values"
        raise ValidationError(text, param="reasoning_effort", reason="conflict")
    enabled = None if body.reasoning is None else body.reasoning.enabled
    return _with_switches(variables, enabled=enabled)


def default_variables(text: str | None) -> dict[str, Any]:
    """Read `--default-chat-template-kwargs`."""
    variables = chat_options.default_variables(text, StartupError)
    if taken := variables.keys() & TAKEN_NAMES:
        raise StartupError(f"{chat_options.DEFAULT_VARIABLES} cannot set `{min(taken)}`")
    return _with_switches(variables, enabled=None)


def _with_switches(variables: dict[str, Any], *, enabled: bool | None) -> dict[str, Any]:
    """Set templates' thinking switches by effort or `enabled`."""
    is_on = False if variables.get("reasoning_effort") == "none" else enabled
    if is_on is not None:
        for switch in ("enable_thinking", "thinking"):
            variables.setdefault(switch, is_on)
    return variables


def ending_of(body: ChatBody) -> PromptEnding:
    """How the prompt ends."""
    if body.continue_final_message:
        return "continued"
    if body.add_generation_prompt is None and body.continue_final_message is None:
        return "usual"
    return "closed" if body.add_generation_prompt is False else "prompted"


def begun_of(body: ChatBody, images: ImagePrompts | None) -> str:
    """Return what the client has written of the answer."""
    if body.messages[-1].role != "assistant" or ending_of(body) not in ("usual", "continued"):
        return ""
    last = _turn(body.messages[-1], images, "messages")
    return last.text if last.is_open else ""


async def answered(render: Callable[..., Awaitable[str]], turns: Sequence[Turn], prompt: str) -> str | None:
    """Return the prompt's end from the first answer to the last user message on, or None, if that is unknown.

    Args:
        render: Renders turns in the way of `prompt`, with an `ending`.
    """
    last = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=None)
    if last is None or last == len(turns) - 1:
        return None if last is None else ""
    try:
        before = await render(turns[: last + 1], ending="prompted")
    except TemplateError:
        return None
    return prompt[len(before) :] if prompt.startswith(before) else None


def model_name(asked: str | None, served: str) -> str:
    """Return an answer's `model`: as asked, unless the base model."""
    return served if asked is None or asked == BASE_MODEL else asked


def _turn(message: Message, images: ImagePrompts | None, field: str) -> Turn:
    content = message.refusal if message.content is None else message.content
    parts: str | list[dict[str, Any]] | None = content if content is None or isinstance(content, str) else []
    if isinstance(content, list):
        parts = [_part(part, images, field) for part in content]
    elif content is not None and images is not None:
        images.check_text(content, field)
    return Turn(
        role=message.role,
        parts=parts,
        tool_calls=[_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
    )


def _part(part: TextPart | ImagePart | RefusalPart, images: ImagePrompts | None, field: str) -> dict[str, Any]:
    if not isinstance(part, ImagePart):
        if images is not None:
            images.check_text(part.text, field)
        return {"type": "text", "text": part.text}
    if images is None:
        text = "`image_url` is not supported: the model reads text only"
        raise ValidationError(text, param=field, reason="unsupported")
    return {"type": "image", "marker": images.family.marker}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    given = function.parameters if function.arguments is None else function.arguments
    fields = {"type": call.type, "function": {"name": function.name, "arguments": _arguments(given)}}
    return fields if call.id is None else {"id": call.id, **fields}


def _arguments(given: Any) -> Any:
    """Return arguments as an object, which templates print; other text stays."""
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    try:
        parsed = orjson.loads(given or "{}")
    except orjson.JSONDecodeError:
        return given
    return parsed if isinstance(parsed, dict) else given


def carried(body: OpenAIParameters) -> dict[str, Any]:
    """Copy another API's equally named fields."""
    return {name: getattr(body, name) for name in body.model_fields_set & _CARRIED}


def check_one_form(fields: Mapping[str, Any], name: str) -> None:
    """Refuse `response_format` beside its synonym `name`."""
    if fields.get("response_format") is not None:
        text = f"`response_format` and `{name}` are two names of one field: give one of them"
        raise ValidationError(text, param="response_format", reason="conflict")


def chat_body(fields: dict[str, Any]) -> ChatBody:
    """Validate another API's body as a chat."""
    try:
        return ChatBody.model_validate(fields)
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    where, said = f" in `{place}`" if place else "", fault["msg"].removeprefix("Value error, ")
    raise ValidationError(f"as a chat, the request has a fault{where}: {said}")
