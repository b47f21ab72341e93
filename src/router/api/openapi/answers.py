"""Refusals, headers and key in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _header(description: str, kind: str = "integer") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


@dataclass(frozen=True)
class Refusal:
    """A status, its `error_type`s, and an example of each."""

    description: str
    texts: dict[str, str]
    headers: dict[str, Any] = field(default_factory=dict)

    @property
    def examples(self) -> dict[str, Any]:
        return {kind: {"value": {"error": text, "error_type": kind}} for kind, text in self.texts.items()}


ERRORS: dict[int, Refusal] = {
    400: Refusal("The body is not JSON", {"bad_request": "Failed to parse the request body as JSON: Expecting value"}),
    401: Refusal(
        "The request lacks the server's API key",
        {"unauthorized": "invalid or missing API key"},
        {"www-authenticate": _header("`Bearer`", "string")},
    ),
    403: Refusal(
        "The API key of `--keys-file` is not for this",
        {"forbidden": "this API key has no scope `inference`"},
    ),
    413: Refusal(
        "The body is larger than `--payload-limit`",
        {"payload_too_large": "The body must not exceed 2000000 bytes"},
    ),
    415: Refusal(
        "The content type is not JSON",
        {"unsupported_media_type": "Expected request with `Content-Type: application/json`"},
    ),
    422: Refusal(
        "The request is invalid",
        {
            "validation": "Input validation error: `temperature` must be > 0",
            "template_error": "Template error: template not found",
            "tool_error": "Tool error: `tool_choice` asks for a tool, but `tools` is empty",
            "batch size exceeded": "Input validation error: `prompt` supports up to 4 prompts. Given: 5",
            "suffix not supported": "Input validation error: `suffix` is not supported",
        },
    ),
    424: Refusal("Generation failed", {"generation": "Request failed during generation: Server error: out of memory"}),
    429: Refusal(
        "The server already serves as many requests as it accepts",
        {"overloaded": "Model is overloaded"},
        {"retry-after": _header("Seconds after which a place is likely to be free")},
    ),
    500: Refusal("The generation ended without a last token", {"incomplete_generation": "Incomplete generation"}),
    503: Refusal("Too many connections, or the server is stopping", {"healthcheck": "unhealthy"}),
}
GENERATING = (424, 500)
"""Statuses of failures that only a route that generates has."""
OTHER_APIS = {400: "The body is not JSON, or the request is invalid", 500: "Generation failed"}
"""Descriptions of statuses on the routes of OpenAI and Anthropic, which have neither 422 nor 424."""

REQUEST_ID = {"x-request-id": _header("As in the request, or a new one", "string")}
STREAM_HEADERS = {
    "x-compute-type": _header("Device on which the answer was computed", "string"),
    "x-compute-characters": _header("Characters of the prompt"),
}
JSON_HEADERS = STREAM_HEADERS | {
    "x-compute-time": _header("Seconds in total, of several choices those of the longest", "number"),
    "x-total-time": _header("Milliseconds in total. These and the tokens are sums of all choices and prompts"),
    "x-validation-time": _header("Milliseconds until the request was queued"),
    "x-queue-time": _header("Milliseconds in the queue"),
    "x-inference-time": _header("Milliseconds from the queue to the last token"),
    "x-time-per-token": _header("Milliseconds of inference for each generated token"),
    "x-prompt-tokens": _header("Tokens of the prompt"),
    "x-generated-tokens": _header("Tokens generated"),
}
SUMMED_HEADERS = tuple(name for name in JSON_HEADERS if name != "x-compute-time")
"""Of several prompts; as TGI's, without the time in seconds."""
AUTHORIZATION = {
    "type": "http",
    "scheme": "bearer",
    "description": "Required for every POST, and for all that is kept for clients, if the server has an `--api-key`.",
}

StreamForm = Literal["done", "ends", "named"]
"""How a stream ends: by `[DONE]`, by its last event, or by one whose name says so."""
_EVENTS = (
    "Server-sent events: each is one line `data: ` with a JSON object, and an empty line. After 15 s of silence comes "
    "a comment, the line `:`."
)
_FAILED = " An error after the first event is an event with `error` and `error_type`"
STREAMS: dict[StreamForm, str] = {
    "done": f"{_EVENTS} The last one is `data: [DONE]`.{_FAILED}.",
    "ends": f"{_EVENTS}{_FAILED}; nothing follows it.",
    "named": (
        "Server-sent events: each is a line `event: ` with the type, a line `data: ` with a JSON object, and an empty "
        "line. After 15 s of silence comes a comment, the line `:`. An error after the first event is an event `error`."
    ),
}
"""What the document says of each form."""
