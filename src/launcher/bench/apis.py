"""The streaming routes that can be measured: what is sent, and where the tokens are in what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from launcher.http_stream import BadAnswerError, Connection, reason_of


@dataclass(slots=True)
class Usage:
    """Tokens as the server counts them; None where it does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Api(Protocol):
    """One route."""

    @property
    def path(self) -> str: ...

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        """A streaming request for exactly `num_tokens` tokens, as far as the API can say that."""

    def read(self, event: dict[str, Any], usage: Usage) -> bool:
        """Take note of what an event says of usage; whether it brings text. Raises BadAnswerError for an error."""


@dataclass(frozen=True)
class Sampling:
    """temperature: None for greedy."""

    temperature: float | None
    ignore_eos: bool


class TgiApi:
    """TGI's /generate_stream: one event for each token. `ignore_eos` is our addition; TGI itself passes over it."""

    path = "/generate_stream"

    def __init__(self, sampling: Sampling) -> None:
        self._parameters: dict[str, Any] = {"details": True}
        if sampling.ignore_eos:
            self._parameters["ignore_eos"] = True
        if sampling.temperature:
            self._parameters |= {"do_sample": True, "temperature": sampling.temperature}

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"inputs": prompt, "parameters": {**self._parameters, "max_new_tokens": num_tokens}}

    def read(self, event: dict[str, Any], usage: Usage) -> bool:
        _raise_error(event)
        details = event.get("details")
        if details:
            usage.output_tokens = details.get("generated_tokens")
            usage.prompt_tokens = details.get("input_length")
        return "token" in event


class OpenAiApi:
    """/v1/completions. An event may bring several tokens: the count is the server's usage."""

    path = "/v1/completions"

    def __init__(self, sampling: Sampling, model: str) -> None:
        self._fixed: dict[str, Any] = {
            "model": model,
            "temperature": sampling.temperature or 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.ignore_eos:
            self._fixed["ignore_eos"] = True

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {**self._fixed, "prompt": prompt, "max_tokens": num_tokens}

    def read(self, event: dict[str, Any], usage: Usage) -> bool:
        _raise_error(event)
        counts = event.get("usage")
        if counts:
            usage.prompt_tokens = counts.get("prompt_tokens")
            usage.output_tokens = counts.get("completion_tokens")
        return any(self._has_text(choice) for choice in event.get("choices") or ())

    @staticmethod
    def _has_text(choice: dict[str, Any]) -> bool:
        # A token may be half a character: its text is empty and it is a token all the same; the last event is none.
        return choice.get("finish_reason") is None or bool(choice.get("text"))


class OpenAiChatApi(OpenAiApi):
    """/v1/chat/completions."""

    path = "/v1/chat/completions"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {**self._fixed, "messages": [{"role": "user", "content": prompt}], "max_tokens": num_tokens}

    @staticmethod
    def _has_text(choice: dict[str, Any]) -> bool:
        delta = choice.get("delta") or {}
        # The first event may bring only the role.
        return bool(delta.get("content")) or (choice.get("finish_reason") is None and "role" not in delta)


def _raise_error(event: dict[str, Any]) -> None:
    if event.get("error"):
        raise BadAnswerError(f"an error inside the stream: {event['error']}")


async def choose_api(name: str, connection: Connection, sampling: Sampling, model: str | None) -> Api:
    """The API that `name` means for this server. Raises BadAnswerError, OSError."""
    if name == "auto":
        name = "tgi" if await _speaks_tgi(connection) else "openai"
    if name == "tgi":
        return TgiApi(sampling)
    model = model or await _first_model(connection)
    return OpenAiChatApi(sampling, model) if name == "openai-chat" else OpenAiApi(sampling, model)


async def _speaks_tgi(connection: Connection) -> bool:
    try:
        return "max_concurrent_requests" in orjson.loads(await connection.get("/info"))
    except (BadAnswerError, orjson.JSONDecodeError):
        return False


async def _first_model(connection: Connection) -> str:
    try:
        return str(orjson.loads(await connection.get("/v1/models"))["data"][0]["id"])
    except BadAnswerError as error:
        if error.status != 404:
            raise
    except (orjson.JSONDecodeError, LookupError, TypeError):
        pass
    raise BadAnswerError("/v1/models lists no model; name one with --model")


_REMEDIES = {
    401: "give the server's key with --api-key or the variable API_KEY",
    404: "has the server another --api or --model?",
    429: "send fewer requests at a time, with a lower --concurrency or --rate",
}


def explained(error: Exception) -> str:
    """Why a request failed, and what to do about it where that is known."""
    if isinstance(error, BadAnswerError):
        said = f"{error.message} (status {error.status})" if error.message else str(error)
        remedy = _REMEDIES.get(error.status or 0)
        return f"{said}; {remedy}" if remedy else said
    if isinstance(error, TimeoutError):
        return "no answer in time (--timeout)"
    if isinstance(error, OSError):
        return f"no server answers ({reason_of(error)}); start one, or give another --url"
    return str(error) or type(error).__name__
