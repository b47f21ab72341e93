"""Answers of a server that speaks OpenAI's chat API, piece by piece; its refusals in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from launcher.chat.conversation import Message
from launcher.http_stream import BadAnswerError, Connection, event_object, message_of, reason_of, server_url

_GREETING_TIMEOUT_S = 30.0
_NO_TEMPLATE = "Template error: template not found"
"""What TGI answers."""
_NAMELESS = "tgi"
"""The model's name for a server that lists none, as TGI's clients have it."""


class ChatError(Exception):
    """There is no answer; the text says why, and what to do."""


class ChatClient:
    """Opens a connection for each request, so that one that is given up ends on the server, too."""

    def __init__(self, url: str, api_key: str | None, model: str | None, sampling: Mapping[str, float]) -> None:
        """url: the server's, with `http://` before it and `/v1` at its end or without. Raises ChatError if it is
        not a URL."""
        self.url = server_url(url)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._sampling = sampling
        self._model = model
        self.was_cut = False
        """Whether the last answer ended because it was as long as it may be."""
        try:
            self._connect()
        except ValueError as error:
            raise ChatError(f"--url {error}") from None

    async def greet(self) -> str:
        """The model that will answer. Raises ChatError if the server does not."""
        if self._model is None:
            connection = self._connect()
            try:
                async with asyncio.timeout(_GREETING_TIMEOUT_S):
                    listed = orjson.loads(await connection.get("/v1/models"))
                self._model = str(listed["data"][0]["id"])
            except BadAnswerError as error:
                if error.status != 404:
                    raise ChatError(self._explained(error)) from None
                self._model = _NAMELESS
            except (orjson.JSONDecodeError, LookupError, TypeError):
                self._model = _NAMELESS
            except OSError as error:
                raise ChatError(self._unreachable(error)) from None
            finally:
                connection.close()
        return self._model

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[str, None]:
        """Pieces of the answer as they come. Raises ChatError."""
        model = await self.greet()
        body = {"model": model, "messages": messages, "stream": True, **self._sampling}
        self.was_cut = False
        connection = self._connect()
        try:
            async with aclosing(connection.events("/v1/chat/completions", orjson.dumps(body))) as parts:
                async for events in parts:
                    for data in events:
                        if text := self._text_of(event_object(data)):
                            yield text
        except BadAnswerError as error:
            raise ChatError(self._explained(error)) from None
        except OSError as error:
            raise ChatError(self._unreachable(error)) from None
        finally:
            connection.close()

    def _connect(self) -> Connection:
        return Connection(self.url, self._headers)

    def _text_of(self, event: dict[str, Any]) -> str:
        if event.get("error"):
            raise BadAnswerError(message_of(event))
        text = ""
        for choice in event.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
            self.was_cut = self.was_cut or choice.get("finish_reason") == "length"
        return text

    def _explained(self, error: BadAnswerError) -> str:
        if error.status == 401:
            refused = "does not accept this API key" if self._headers else "demands an API key"
            return f"{self.url} {refused}; give its key with --api-key or the variable API_KEY"
        if error.status == 404:
            return f"{self.url} has no OpenAI chat API: {error}"
        if error.message == _NO_TEMPLATE:
            return (
                f"{self._model} has no chat template: take a model made for chats, or ask this one with POST /generate"
            )
        return error.message or f"{self.url}: {error}"

    def _unreachable(self, error: OSError) -> str:
        remedy = "give another --url, or a model to serve: launcher chat demo"
        return f"no server answers at {self.url} ({reason_of(error)}); {remedy}"
