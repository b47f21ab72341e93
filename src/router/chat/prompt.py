"""From an OpenAI chat body to the turns of a template and a generate request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from router.chat.template import Turn
from router.errors import ToolError, ValidationError
from router.schemas.chat import ChatBody, Message, NamedToolChoice, ToolCall
from router.validation import GenerateRequest

BASE_MODEL = "tgi"
"""The `model` that clients of TGI send when they mean "whatever you serve"."""


def check_served(body: ChatBody) -> None:
    """Refuses what changes the answer and is not served yet. Raises ToolError or ValidationError."""
    if body.response_format is not None and body.tools is not None:
        raise ToolError("Grammar and tools are mutually exclusive")
    if body.tools and body.tool_choice != "none":
        raise ValidationError('`tools` are not supported yet; `tool_choice` "none" is')
    if not body.tools and (isinstance(body.tool_choice, NamedToolChoice) or body.tool_choice == "required"):
        raise ToolError("`tool_choice` asks for a tool, but `tools` is empty")


def turns_of(body: ChatBody) -> list[Turn]:
    """The messages as the template module takes them."""
    return [_turn(message) for message in body.messages]


def request_of(body: ChatBody, prompt: str) -> GenerateRequest:
    """The generation that a chat body asks for; temperature 0 is greedy, everything else samples, as in TGI."""
    greedy = body.temperature == 0
    return GenerateRequest(
        inputs=prompt,
        add_special_tokens=False,
        temperature=None if greedy else body.temperature,
        do_sample=not greedy,
        repetition_penalty=body.repetition_penalty,
        absolute_frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=logit_bias_of(body.logit_bias),
        top_k=body.top_k,
        top_p=body.top_p,
        typical_p=body.typical_p,
        min_p=body.min_p,
        max_new_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        ignore_eos=body.ignore_eos,
        stop=stops_of(body.stop),
        seed=body.seed,
        top_n_tokens=body.top_logprobs,
        grammar=None if body.response_format is None else body.response_format.asked,
    )


def choices_of(request: GenerateRequest, number: int) -> list[GenerateRequest]:
    """The requests of `n` choices; a seed is counted on, or all choices would be the same."""
    if request.seed is None:
        return [request] * number
    return [replace(request, seed=(request.seed + index) % 2**64) for index in range(number)]


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def model_name(asked: str | None, served: str) -> str:
    """The `model` of an answer: what the client asked for, unless it meant the base model."""
    return served if asked is None or asked == BASE_MODEL else asked


def _turn(message: Message) -> Turn:
    content = message.content
    parts = content if content is None or isinstance(content, str) else [part.model_dump() for part in content]
    return Turn(
        role=message.role,
        parts=parts,
        tool_calls=[_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    given = function.parameters if function.arguments is None else function.arguments
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": function.name, "arguments": _arguments(given)},
    }


def _arguments(given: Any) -> Any:
    """Arguments as an object: that is what templates print as JSON. Text that is no JSON stays text."""
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    try:
        return orjson.loads(given)
    except orjson.JSONDecodeError:
        return given


def logit_bias_of(bias: dict[str, float] | list[float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's map of token ids to biases, as pairs. Raises ValidationError."""
    if not bias:
        return ()
    if isinstance(bias, list):
        raise ValidationError("`logit_bias` must be an object of token ids and biases")
    try:
        # Ten digits hold every token id; more would be a number to parse for its own sake.
        return tuple((int(token_id[:11]), value) for token_id, value in bias.items())
    except ValueError:
        raise ValidationError("`logit_bias` must be an object of token ids and biases") from None
