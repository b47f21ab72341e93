"""Headers of generation routes, in whole milliseconds, except x-compute-time in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from router.generation.collect import GenerationResult
from router.generation.running import Run

_OF_PROMPT = ("x-compute-characters", "x-prompt-tokens")


def stream_headers(*running: Run, compute_type: str) -> dict[str, str]:
    """`running` has one generation for each prompt."""
    num_characters = sum(one.request.num_characters for one in running)
    return {"x-compute-type": compute_type, "x-compute-characters": str(num_characters)}


def json_headers(generation: GenerationResult, compute_type: str) -> dict[str, str]:
    timings = generation.timings
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{timings.total:.9f}",
        "x-compute-characters": str(generation.request.num_characters),
        "x-total-time": _milliseconds(timings.total),
        "x-validation-time": _milliseconds(timings.validation),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.inference),
        "x-time-per-token": _milliseconds(timings.per_token),
        "x-prompt-tokens": str(generation.request.input_length),
        "x-generated-tokens": str(generation.generated_tokens),
    }


def chat_headers(generations: Sequence[GenerationResult], compute_type: str) -> dict[str, str]:
    """Return the headers of all choices; the seconds are those of the longest."""
    longest = max(generations, key=lambda one: one.timings.total)
    headers = json_headers(longest, compute_type)
    return headers if len(generations) == 1 else headers | summed_headers([generations], compute_type)


def summed_headers(groups: Sequence[Sequence[GenerationResult]], compute_type: str) -> dict[str, str]:
    """Sum several prompts' headers, each once, without x-compute-time, as TGI; the time per token is that of all."""
    prompts = [json_headers(group[0], compute_type) for group in groups]
    all_headers = [json_headers(generation, compute_type) for group in groups for generation in group]
    summed = {
        name: str(sum(int(headers[name]) for headers in (prompts if name in _OF_PROMPT else all_headers)))
        for name in prompts[0]
        if name not in ("x-compute-type", "x-compute-time")
    }
    timings = [generation.timings for group in groups for generation in group]
    per_token = sum(one.inference for one in timings) / max(sum(one.num_tokens for one in timings), 1)
    return {"x-compute-type": compute_type} | summed | {"x-time-per-token": _milliseconds(per_token)}


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
