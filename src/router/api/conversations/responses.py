"""`/v1/responses`, OpenAI's Responses API. Nothing is stored: each request brings its whole conversation."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import state_of
from router.api.conversations.answering import answer, as_chat
from router.api.errors import NotServedError, responses_error
from router.api.routes import Routes
from router.errors import RouterError
from router.openai.chat.prompt import model_name
from router.responses.conversation import chat_of
from router.responses.tools import ServedTools
from router.responses.writer import ResponseWriter
from router.schemas.conversations.responses import ResponseEvent, ResponseObject, ResponsesBody, ResponsesError

routes = Routes("Responses", is_fast=True)


@routes.answers(
    "/v1/responses", ResponsesBody, ResponseObject, span="responses", event=ResponseEvent,
    errors=(400, 401, 413, 415, 429, 500, 503), refusal=ResponsesError,
)  # fmt: skip
async def responses(request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API; with `stream`, as its named events."""
    state = state_of(request)
    body = await state.read(request, ResponsesBody)
    tools = ServedTools.of(body.tools)
    chat = await as_chat(state, 0 if isinstance(body.input, str) else len(body.input), partial(chat_of, body, tools))
    writer = ResponseWriter(body, tools, model_name(body.model, state.model_names[0]))
    return await answer(request, state, chat, writer, _error_body)


async def _refuse(request: Request) -> Response:
    raise NotServedError("responses are not stored here: send the whole conversation to /v1/responses")


routes.add_api_route("/v1/responses/{rest:path}", _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _error_body(error: RouterError, request_id: str) -> dict[str, Any]:
    return responses_error(error)
