"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API."""

from __future__ import annotations

import uuid
from functools import partial

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, state_of
from router.api.chat.answering import answer, as_chat
from router.api.chat.prompt import model_name
from router.api.chat.routes import prompt_tokens
from router.api.errors import RENAMED
from router.api.http.disconnect import cancel_on_disconnect
from router.api.json_out import JsonResponse
from router.api.messages.context import edited
from router.api.messages.conversation import chat_of
from router.api.messages.schema import (
    AnsweredMessage,
    CountTokensBody,
    MessageEvent,
    MessagesBody,
    TokenCount,
)
from router.api.messages.writer import MessageWriter
from router.api.routes import Routes
from router.generation.api_rules import MESSAGES

routes = Routes("Messages", is_fast=True)

_NAMES = {"thinking_token_budget": "thinking.budget_tokens", "reasoning_effort": "output_config.effort"}
"""Of a chat's fields, this API's names."""


@routes.answers("/v1/messages", MessagesBody, AnsweredMessage, span="messages", event=MessageEvent, stream="named")
async def messages(request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API; with `stream`, as its named events."""
    state = state_of(request)
    body = await state.read(request, MessagesBody)
    body, applied, _ = await cancel_on_disconnect(request.receive, edited(body, partial(_count, state)))
    asked_for = body.context_management is not None
    writer = MessageWriter(
        f"msg_{uuid.uuid4().hex}",
        model_name(body.model, state.model_names[0]),
        applied if asked_for else None,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
    )
    chat = await as_chat(state, len(body.messages), partial(chat_of, body))
    request.scope[RENAMED] |= _NAMES
    if body.response_format is None:
        request.scope[RENAMED]["response_format"] = "output_config.format"
    return await answer(request, state, chat, writer, MESSAGES)


@routes.answers("/v1/messages/count_tokens", CountTokensBody, TokenCount, span="count_tokens", generates=False)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    state = state_of(request)
    body = await state.read(request, CountTokensBody)
    asked_for = body.context_management is not None
    body, _, original = await cancel_on_disconnect(request.receive, edited(body, partial(_count, state)))
    count = await cancel_on_disconnect(request.receive, _count(state, body))
    managed = {"context_management": {"original_input_tokens": count if original is None else original}}
    return JsonResponse({"input_tokens": count} | (managed if asked_for else {}))


async def _count(state: AppState, body: CountTokensBody) -> int:
    chat = await as_chat(state, len(body.messages), partial(chat_of, body))
    return await prompt_tokens(state, chat, MESSAGES)
