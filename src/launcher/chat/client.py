"""Answers of a server that speaks OpenAI's chat API, piece by piece; its refusals in one sentence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from launcher.chat.conversation import Message
from launcher.http_stream import BadAnswerError, Connection, event_object, message_of, reason_of, server_url

_GREETING_TIMEOUT_S = 30.0
_NO_TEMPLATE = "template not found"
"""What TGI answers where a model has no chat template."""
_NAMELESS = "tgi"
"""The model's name for a server that lists none, as TGI's clients have it."""


class ChatError(Exception):
    """There is no answer; the text says why, and what to do."""


class Piece(NamedTuple):
    """A part of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


@dataclass
class Figures:
    """What is known of an answer while it comes, and at its end."""

    started: float = 0.0  # seconds of `time.monotonic`
    first: float | None = None  # as `started`, of the first piece
    last: float = 0.0  # as `started`, of the last piece
    pieces: int = 0
    tokens: int | None = None  # as the server says
    was_cut: bool = False  # it is as long as it may be

    def see(self, text: str) -> None:
        """Take note of a piece."""
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.pieces += bool(text)

    def __str__(self) -> str:
        count = self.pieces if self.tokens is None else self.tokens
        if self.first is None or not count:
            return ""
        said = [f"{count} {'token' if count == 1 else 'tokens'}"]
        if count > 1 and self.last > self.first:
            said.append(f"{(count - 1) / (self.last - self.first):.1f} tokens/s")
        return ", ".join([*said, f"first after {self.first - self.started:.2f} s"])


class ChatClient:
    """Opens a connection for each request, so that one that is given up ends on the server, too."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        """Take a server's URL, with `/v1` at its end or without.

        Raises:
            ChatError: It is not a URL.
        """
        self.url = server_url(url)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._model = model
        self.figures = Figures()
        """Of the last answer."""
        self.info: dict[str, Any] = {}
        """What /info answers; empty for a server without it."""
        try:
            self._connect()
        except ValueError as error:
            raise ChatError(f"--url {error}") from None

    async def greet(self) -> str:
        """Return the model that will answer.

        Raises:
            ChatError: The server does not answer, or its model does not chat.
        """
        if self._model is None:
            names, several = await self._listed()
            self._model = names[0] if names else _NAMELESS
            info = await self._get(f"/info?model={quote(self._model)}" if several else "/info")
            self.info = info if isinstance(info, dict) else {}
            if self.info.get("has_chat_template") is False:
                raise ChatError(self._has_no_template())
        return self._model

    async def switch(self, name: str) -> str:
        """Choose another model for the next answers, and return what there is to say.

        Args:
            name: Empty to list them.

        Raises:
            ChatError: The server does not answer.
        """
        names, _ = await self._listed()
        if not name or name not in names:
            unknown = f"no model {name}; " if name else ""
            return (
                f"{unknown}{self._model or _NAMELESS} answers; the server has {', '.join(names) or 'no list of models'}"
            )
        self._model = name
        return f"{name} answers from now on."

    async def _listed(self) -> tuple[list[str], bool]:
        """Return the names of models that chat, loaded ones first, and whether the server has several models."""
        listed = await self._get("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        known = [card for card in cards if isinstance(card, dict) and "id" in card] if isinstance(cards, list) else []
        several = any(isinstance(card.get("status"), dict) for card in known)
        if several:
            known = [card for card in known if card.get("task") == "generate"]
            known.sort(key=lambda card: card["status"].get("value") != "loaded")
        return [str(card["id"]) for card in known], several

    async def _get(self, path: str) -> Any:
        """GET a route's JSON; None if there is no such route or no JSON."""
        connection = self._connect()
        try:
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                return orjson.loads(await connection.get(path))
        except BadAnswerError as error:
            if error.status != 404:
                raise ChatError(self._explained(error)) from None
        except orjson.JSONDecodeError:
            pass
        except OSError as error:
            raise ChatError(self._unreachable(error)) from None
        finally:
            connection.close()
        return None

    async def answer(
        self, messages: Sequence[Message], sampling: Mapping[str, Any] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they come. Raises ChatError."""
        model = await self.greet()
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        self.figures = Figures(started=time.monotonic())
        connection = self._connect()
        try:
            data = orjson.dumps({**body, **(sampling or {})})
            async with aclosing(connection.events("/v1/chat/completions", data)) as parts:
                async for events in parts:
                    for event in events:
                        for piece in self._pieces_of(event_object(event)):
                            yield piece
        except BadAnswerError as error:
            raise ChatError(self._explained(error)) from None
        except OSError as error:
            raise ChatError(self._unreachable(error)) from None
        finally:
            connection.close()

    def _connect(self) -> Connection:
        return Connection(self.url, self._headers)

    def _pieces_of(self, event: dict[str, Any]) -> list[Piece]:
        if event.get("error"):
            raise BadAnswerError(message_of(event))
        pieces = []
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            pieces.append(Piece(delta.get("reasoning") or delta.get("reasoning_content") or "", is_reasoning=True))
            pieces.append(Piece(delta.get("content") or ""))
            self.figures.was_cut = self.figures.was_cut or choice.get("finish_reason") == "length"
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.figures.tokens = usage["completion_tokens"]
        found = [piece for piece in pieces if piece.text]
        if found:
            self.figures.see("".join(piece.text for piece in found))
        return found

    def _explained(self, error: BadAnswerError) -> str:
        if error.status == 401:
            refused = "does not accept this API key" if self._headers else "demands an API key"
            return f"{self.url} {refused}; give its key with --api-key or the variable API_KEY"
        if error.status == 404:
            return f"{self.url} has no OpenAI chat API: {error.message or error}"
        if _NO_TEMPLATE in error.message:
            return self._has_no_template()
        return error.message or f"{self.url}: {error}"

    def _has_no_template(self) -> str:
        return no_template(str(self._model), "ask this one with POST /generate")

    def _unreachable(self, error: OSError) -> str:
        remedy = "give another --url, or a model to serve: launcher chat demo"
        return f"no server answers at {self.url} ({reason_of(error)}); {remedy}"


def no_template(model: str, otherwise: str) -> str:
    """The refusal of a model that continues texts and does not chat."""
    return f"{model} has no chat template: take a model made for chats (-Instruct, -it, -chat), or {otherwise}"
