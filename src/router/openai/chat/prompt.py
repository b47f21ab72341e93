"""From an OpenAI chat body to the turns of a template and a generate request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from router.errors import ValidationError
from router.generation.validation import GenerateRequest
from router.grammar.checker import AskedGrammar
from router.openai.template.messages import Turn
from router.schemas.chat import ChatBody, Message, ToolCall

BASE_MODEL = "tgi"
"""The `model` that clients of TGI send when they mean "whatever you serve"."""

TAKEN_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "bos_token",
     "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now",
     "namespace", "dict", "range", "lipsum", "cycler", "joiner"}
)  # fmt: skip
"""Variables and functions of every template."""


def turns_of(body: ChatBody) -> list[Turn]:
    """The messages as the template module takes them."""
    return [_turn(message) for message in body.messages]


def request_of(body: ChatBody, prompt: str, grammar: AskedGrammar | None) -> GenerateRequest:
    """The generation that a chat body asks for; temperature 0 is greedy, everything else samples, as in TGI."""
    greedy = body.temperature == 0
    return GenerateRequest(
        inputs=prompt,
        add_special_tokens=False,
        temperature=None if greedy else body.temperature,
        do_sample=not greedy,
        greedy=greedy,
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
        grammar=grammar,
    )


def variables_of(body: ChatBody) -> dict[str, Any]:
    """What the client gives the template by name. Raises ValidationError for names that are not its to give."""
    variables = dict(body.chat_template_kwargs)
    if taken := variables.keys() & TAKEN_NAMES:
        raise ValidationError(f"`chat_template_kwargs` cannot set `{min(taken)}`")
    effort = body.reasoning_effort
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise ValidationError("`reasoning_effort` is given twice, with two values")
    return variables


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
    if isinstance(content, list) and any(part.type == "image_url" for part in content):
        raise ValidationError("`image_url` is not supported: the model reads text only")
    parts = content if content is None or isinstance(content, str) else [part.model_dump() for part in content]
    return Turn(
        role=message.role,
        parts=parts,
        tool_calls=[_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = call.function
    given = function.parameters if function.arguments is None else function.arguments
    fields = {"type": call.type, "function": {"name": function.name, "arguments": _arguments(given)}}
    return fields if call.id is None else {"id": call.id, **fields}


def _arguments(given: Any) -> Any:
    """Arguments as an object: that is what templates print as JSON. Text that holds none stays text."""
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    try:
        parsed = orjson.loads(given or "{}")
    except orjson.JSONDecodeError:
        return given
    return parsed if isinstance(parsed, dict) else given


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
