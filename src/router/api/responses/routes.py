"""`/v1/responses`, OpenAI's Responses API, with whole or stored conversations."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, get_args

import orjson
from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, state_of
from router.api.chat.answering import answer, as_chat
from router.api.chat.prompt import model_name
from router.api.chat.routes import prompt_tokens
from router.api.chat.schema import ChatBody
from router.api.errors import RENAMED, NotServedError
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.faults import clean
from router.api.json_out import JsonResponse
from router.api.openai.pages import page_of
from router.api.response_store import OwnResponses, StoredResponse, has_id
from router.api.responses.conversation import chat_of, with_encrypted
from router.api.responses.history import Conversation, History
from router.api.responses.input_items import ENCRYPTED, LOGPROBS, Included
from router.api.responses.schema import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
)
from router.api.responses.tools import ADDING, ServedTools, count
from router.api.responses.writer import Keep, ResponseWriter
from router.api.routes import Routes
from router.errors import ValidationError
from router.generation.api_rules import RESPONSES
from router.schemas.errors import OpenAIError
from router.tracing import entered

routes = Routes("Responses", is_fast=True)

_ONE = "/v1/responses/{response_id}"
_INCLUDE = re.compile(r"include(\[\d*\])?")
_PAGE, _LARGEST_PAGE = 20, 100
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": OpenAIError, "description": "The request lacks the server's API key"},
    404: {"model": OpenAIError, "description": "No such response is stored"},
}


@routes.answers("/v1/responses", ResponsesBody, ResponseObject, span="responses", event=ResponseEvent, stream="named")
async def responses(request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API; with `stream`, as its named events."""
    state = state_of(request)
    body = await state.read(request, ResponsesBody)
    chat, tools, conversation = await _chat(state, body)
    request.scope[RENAMED]["reasoning_effort"] = "reasoning.effort"
    if body.response_format is None:
        request.scope[RENAMED]["response_format"] = "text.format"
    keep = _keep(state, body, conversation)
    name = model_name(body.model, state.model_names[0])
    writer = ResponseWriter(body, tools, name, keep, defaults=state.sampling_defaults)
    return await answer(request, state, chat, writer, RESPONSES)


@routes.answers(
    "/v1/responses/input_tokens", ResponsesBody, InputTokens, span="response_input_tokens", generates=False
)  # fmt: skip
async def input_tokens(request: Request) -> Response:
    """Count the tokens of a response's prompt."""
    state = state_of(request)
    body = await state.read(request, ResponsesBody)
    chat, _, _ = await _chat(state, body)
    count = await cancel_on_disconnect(request.receive, prompt_tokens(state, chat, RESPONSES))
    return JsonResponse(InputTokens(input_tokens=count).model_dump())


@routes.get(_ONE, response_model=ResponseObject, responses=_REFUSALS)
async def stored_response(request: Request, response_id: str) -> Response:
    """A response that is stored; query: `include`."""
    for name in ("stream", "starting_after"):
        if request.query_params.get(name, "false").lower() != "false":
            text = f"a stored response is not streamed: leave `{name}` out"
            raise ValidationError(text, param=name, reason="unsupported")
    included, response = _included(request), _stored(request, response_id).response
    if included.isdisjoint((ENCRYPTED, LOGPROBS)):
        return Response(response, media_type="application/json")
    whole = orjson.loads(response)
    if LOGPROBS in included and any(_lacks_logprobs(item) for item in whole["output"]):
        text = f"`{LOGPROBS}` is kept if the request for the response includes it, and this one did not"
        raise ValidationError(text, param="include", reason="unsupported")
    if ENCRYPTED not in included:
        return Response(response, media_type="application/json")
    return JsonResponse(whole | {"output": [with_encrypted(item) for item in whole["output"]]})


@routes.delete(_ONE, response_model=DeletedResponse, responses=_REFUSALS)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response. Those that continue it stay."""
    _stored(request, response_id)
    store = _own(state_of(request))
    assert store is not None
    store.delete(response_id)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@routes.get(_ONE + "/input_items", response_model=InputItems, responses=_REFUSALS)
async def input_items(request: Request, response_id: str) -> Response:
    """The conversation before a stored response, the last item first; query: `limit`, `after`, `order`, `include`."""
    is_encrypted, asked = ENCRYPTED in _included(request), _stored(request, response_id).asked

    def shown(item: bytes) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(item)
        return with_encrypted(fields) if is_encrypted else fields

    page = page_of(request.query_params, asked, has_id, shown, usual=_PAGE, most=_LARGEST_PAGE)
    return JsonResponse(page)


async def _refuse(request: Request) -> Response:
    raise NotServedError("not served here: POST /v1/responses, and GET and DELETE of a stored response by its id")


routes.add_api_route("/v1/responses/{rest:path}", _refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _included(request: Request) -> set[str]:
    """Return what the query includes, in the spellings of OpenAI's clients."""
    asked = {text for name, text in request.query_params.multi_items() if _INCLUDE.fullmatch(name)}
    if unknown := asked - set(get_args(Included)):
        known = ", ".join(get_args(Included))
        text = f"`include` must be of {known}, not {clean(min(unknown))!r}"
        raise ValidationError(text, param="include", reason="invalid_value")
    return asked


def _lacks_logprobs(item: dict[str, Any]) -> bool:
    return item["type"] == "message" and any(part["text"] and not part["logprobs"] for part in item["content"])


def _own(state: AppState) -> OwnResponses | None:
    """Return the responses of the request's API key, if any are stored here."""
    asked = entered()
    account = None if asked is None else asked.account
    return None if state.responses is None else state.responses.of("" if account is None else account.key.name)


async def _chat(state: AppState, body: ResponsesBody) -> tuple[ChatBody, ServedTools, Conversation]:
    """Return the chat that asks for the same, its tools, and what of it is stored."""
    history = History(body, _own(state), most_bytes=state.config.payload_limit)
    items = [] if isinstance(body.input, str) else body.input
    num_items = len(items) + count(body.tools) + sum(count(item.tools) for item in items if isinstance(item, ADDING))
    make = partial(_read, body, history)
    return await as_chat(state, num_items, make, num_bytes=history.cost)


def _read(body: ResponsesBody, history: History) -> tuple[ChatBody, ServedTools, Conversation]:
    conversation = history.conversation()
    tools = ServedTools.of(body.tools, conversation.items)
    return chat_of(body, tools, conversation.items), tools, conversation


def _keep(state: AppState, body: ResponsesBody, conversation: Conversation) -> Keep | None:
    """Return what stores the ended response, if anything."""
    store = _own(state)
    if store is None or not body.store:
        return None
    return lambda whole: store.put(whole, conversation.written, conversation.new_ids)


def _stored(request: Request, response_id: str) -> StoredResponse:
    """Raises NotServedError."""
    store = _own(state_of(request))
    if store is None:
        raise NotServedError(
            "responses are not stored here: send the whole conversation to /v1/responses, or start the server with "
            "`--response-store`",
            reason="unknown_response",
        )
    if (stored := store.get(response_id)) is None:
        text = f"no response {response_id[:100]} is stored here, or not any more"
        raise NotServedError(text, reason="unknown_response")
    return stored
