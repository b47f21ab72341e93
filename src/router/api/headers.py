"""Response headers of the generation routes. Times in whole milliseconds, except x-compute-time (seconds)."""

from __future__ import annotations

from router.running import Generation, Running


def stream_headers(running: Running, compute_type: str) -> dict[str, str]:
    return {"x-compute-type": compute_type, "x-compute-characters": str(len(running.request.inputs))}


def json_headers(generation: Generation, compute_type: str) -> dict[str, str]:
    timings = generation.timings
    return {
        "x-compute-type": compute_type,
        "x-compute-time": f"{timings.total:.9f}",
        "x-compute-characters": str(len(generation.request.inputs)),
        "x-total-time": _milliseconds(timings.total),
        "x-validation-time": _milliseconds(timings.validation),
        "x-queue-time": _milliseconds(timings.queue),
        "x-inference-time": _milliseconds(timings.inference),
        "x-time-per-token": _milliseconds(timings.per_token),
        "x-prompt-tokens": str(generation.request.input_length),
        "x-generated-tokens": str(generation.generated_tokens),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
