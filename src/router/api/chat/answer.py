"""OpenAI's chat answer as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.answers.reading import CallIds, ChoiceReader
from router.answers.reading import message as read_message
from router.answers.stops import FINISH_REASONS, openai_reason, stops_left_out, without_stop
from router.api.chat.calls import call_message
from router.api.chat.chunks import ChatHead
from router.api.chat.tools import OfferedTools
from router.api.openai.answers import usage
from router.api.openai.logprobs import TokenNames, chat_logprob
from router.generation.collect import GenerationResult
from router.request import ValidRequest

ReadingOf = Callable[[ValidRequest], tuple[ChoiceReader, CallIds] | None]
"""What reads a generation's tokens; None: its text is the answer, or a call under the tool grammar."""


def completion(
    head: ChatHead,
    generations: Sequence[GenerationResult],
    reading_of: ReadingOf,
    *,
    logprobs: TokenNames | None,
    tools: OfferedTools | None = None,
    keeps_stop: bool = False,
) -> dict[str, Any]:
    """Return the answer; the prompt counts once; `keeps_stop` shows stop texts."""
    prompt_tokens = prompt_tokens_of([generation.request for generation in generations])
    completion_tokens = sum(generation.generated_tokens for generation in generations)
    readings = [reading_of(generation.request) for generation in generations]
    choices = [
        _choice(index, generation, reading, logprobs, tools, keeps_stop)
        for index, (generation, reading) in enumerate(zip(generations, readings, strict=True))
    ]
    reasoning_tokens = reasoning_tokens_of([each[0] for each in readings if each])
    # Of a prompt that counts once: what no choice has computed.
    cached_tokens = min(generation.cached_tokens for generation in generations)
    predicted = [generation.predicted for generation in generations]
    used = usage(prompt_tokens, completion_tokens, reasoning_tokens, cached_tokens=cached_tokens, predicted=predicted)
    return head.fields("chat.completion") | {"choices": choices, "usage": used}


def reasoning_tokens_of(readers: Sequence[ChoiceReader]) -> int | None:
    """Sum all choices, if read."""
    return sum(reader.reasoning_tokens for reader in readers) if readers else None


def prompt_tokens_of(requests: Sequence[ValidRequest]) -> int:
    """Return the longest prompt, which counts for all choices."""
    return max(request.input_length for request in requests)


def _choice(
    index: int,
    generation: GenerationResult,
    reading: tuple[ChoiceReader, CallIds] | None,
    logprobs: TokenNames | None,
    tools: OfferedTools | None,
    keeps_stop: bool,
) -> dict[str, Any]:
    if reading is not None:
        message, finish_reason = _read(generation, *reading)
    else:
        text = without_stop(
            generation.text, stops_left_out(generation.request, keeps_stop=keeps_stop), generation.finish_reason
        )
        reason = openai_reason(generation.text, generation.request, generation.finish_reason)
        message, finish_reason = {"role": "assistant", "content": text}, FINISH_REASONS[reason]
        if tools is not None and generation.request.answer == "call":
            message, finish_reason = call_message(text, reason, tools.only_name)
    tops = generation.top_tokens or [()] * len(generation.tokens)
    content = [
        chat_logprob(logprobs, token, top)
        for token, top in zip(generation.tokens, tops, strict=True)
        if logprobs is not None
    ]
    return {
        "index": index,
        "message": {"role": message.pop("role"), "content": message.pop("content"), "refusal": None, **message},
        "logprobs": None if logprobs is None else {"content": content, "refusal": None},
        "finish_reason": finish_reason,
    }


def _read(generation: GenerationResult, reader: ChoiceReader, ids: CallIds) -> tuple[dict[str, Any], str]:
    *tokens, last = generation.tokens
    events = [event for token in tokens for event in reader.push(token)]
    events += reader.finish(last)
    return read_message(events, ids), reader.finish_reason(generation.finish_reason)
