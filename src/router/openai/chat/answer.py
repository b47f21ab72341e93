"""OpenAI's chat answer as one JSON object: text or a tool call for each choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.generation.collect import GenerationResult
from router.openai.answers import usage
from router.openai.chat.calls import call_message, is_call
from router.openai.chat.chunks import ChatHead, logprob
from router.openai.chat.tools import OfferedTools
from router.openai.stops import FINISH_REASONS, without_stop
from router.request import ValidRequest


def completion(
    head: ChatHead, generations: Sequence[GenerationResult], *, logprobs: bool, tools: OfferedTools | None = None
) -> dict[str, Any]:
    """The JSON answer; the prompt counts once however many choices there are. Raises ToolError."""
    prompt_tokens = prompt_tokens_of([generation.request for generation in generations])
    completion_tokens = sum(generation.generated_tokens for generation in generations)
    choices = [_choice(index, generation, logprobs, tools) for index, generation in enumerate(generations)]
    return head.fields("chat.completion") | {"choices": choices, "usage": usage(prompt_tokens, completion_tokens)}


def prompt_tokens_of(requests: Sequence[ValidRequest]) -> int:
    """The sum of all choices; with tools their prompts may differ, and the longest counts for all."""
    return max(request.input_length for request in requests)


def _choice(index: int, generation: GenerationResult, logprobs: bool, tools: OfferedTools | None) -> dict[str, Any]:
    text = without_stop(generation.text, generation.request.stopping.stop_sequences, generation.finish_reason)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    finish_reason = FINISH_REASONS[generation.finish_reason]
    if tools is not None and is_call(generation.request):
        message, finish_reason = call_message(text, generation.finish_reason, tools.only_name)
    tops = generation.top_tokens or [()] * len(generation.tokens)
    content = [logprob(token, top) for token, top in zip(generation.tokens, tops, strict=True)]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": content} if logprobs else None,
        "finish_reason": finish_reason,
    }
