"""`/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.app_state import Served, request_id_of, served_of
from router.api.errors import openai_event_body, said_to_client
from router.api.http import sse
from router.api.http.body import read_body
from router.api.http.disconnect import unless_left
from router.api.http.headers import json_headers, stream_headers
from router.api.http.json_out import JsonResponse
from router.api.openapi.answers import JSON_HEADERS
from router.api.openapi.openapi import documented
from router.config import TGI_VERSION
from router.errors import RouterError, ValidationError
from router.events import Finished, Prefilled
from router.generation.asked import GenerateRequest
from router.generation.running import Admission, Generation, Run, Running, collect_all, interleaved, start_all
from router.grammar.checker import AskedGrammar
from router.openai.chat.answer import completion, prompt_tokens_of
from router.openai.chat.calls import CallStream, is_call
from router.openai.chat.chunks import ChatHead, ChoiceStream, usage_chunk
from router.openai.chat.prompt import model_name, request_of, turns_of, variables_of
from router.openai.chat.tools import OfferedTools, offered_tools
from router.openai.chat.two_passes import TwoPasses, turn
from router.openai.parameters import choices_of
from router.openai.template.messages import Turn
from router.schemas.chat import ChatBody, ChatChunk, ChatCompletion

routes = APIRouter(tags=["Chat"])
_HEADERS = tuple(JSON_HEADERS)

_MANY_MESSAGES = 500


@routes.post("/v1/chat/completions", **documented(ChatBody, ChatCompletion, event=ChatChunk, headers=_HEADERS))
async def chat_completions(request: Request) -> Response:
    """Answer a chat; with `stream`, as server-sent events that end with `[DONE]`."""
    served = served_of(request)
    return await answer(request, served, await read_body(request, ChatBody, limit=served.config.payload_limit))


async def answer(request: Request, served: Served, body: ChatBody) -> Response:
    """The answer to a chat body, whichever route it came by."""
    served.inference.metrics.count("tgi_request_count")
    chat = Chat(served, body)
    head = ChatHead(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model_name(body.model, served.model_id),
        system_fingerprint=f"{TGI_VERSION}-native",
    )
    with served.inference.admit(chat.number, request_id=request_id_of(request)) as admission:
        if body.stream:
            running = await unless_left(request.receive, chat.start(admission))
            return _stream(chat, head, running)
        generations = await unless_left(request.receive, chat.generate(admission))
    whole = completion(head, generations, logprobs=body.logprobs, tools=chat.tools)
    return JsonResponse(whole, headers=json_headers(generations[0], served.config.compute_type))


async def first_request(served: Served, body: ChatBody) -> GenerateRequest:
    """The generation of one choice; its `inputs` are the rendered chat. With tools it is the call of one."""
    return await Chat(served, body).request()


class Chat:
    """A chat body on its way to its generations. Raises RouterError for what can be refused before there are any."""

    def __init__(self, served: Served, body: ChatBody) -> None:
        self._inference = served.inference
        self._template = served.chat_template
        self.served = served
        self.body = body
        try:
            self.number = _number_of_choices(served, body)
            self.tools = offered_tools(body)
        except RouterError as error:
            raise served.inference.refused(error) from None

    async def request(self) -> GenerateRequest:
        """Of one choice: the call of a tool if there are any."""
        return await self._request(self.tools)

    async def start(self, admission: Admission) -> list[Run]:
        """Queues the generations of all choices, or none."""
        requests = choices_of(await self.request(), self.number)
        return await start_all(
            partial(self.start_choice, request, index, admission) for index, request in enumerate(requests)
        )

    async def generate(self, admission: Admission) -> list[Generation]:
        """The generations of all choices, to their ends."""
        return await collect_all(await self.start(admission))

    async def start_choice(self, request: GenerateRequest, index: int, admission: Admission) -> Run:
        """Queues one choice; it takes one permit, also where it comes in two passes."""
        if self.tools is None or not self.tools.or_none:
            return await self._inference.start(request, admission)

        async def in_words(admission: Admission) -> Running:
            plain = choices_of(await self._request(None), self.number)[index]
            return await self._inference.start(plain, admission)

        decision = await self._inference.start(request, turn(admission))
        return TwoPasses(decision, in_words, admission)

    async def _request(self, tools: OfferedTools | None) -> GenerateRequest:
        body = self.body
        try:
            # Schemas and long chats may take a tenth of a second to go through.
            if tools is not None or len(body.messages) > _MANY_MESSAGES:
                turns, listed, grammar = await asyncio.to_thread(_prepared, body, tools)
            else:
                turns, listed, grammar = _prepared(body, tools)
            prompt = await self._template.render(
                turns, listed, tool_prompt=body.tool_prompt, variables=variables_of(body)
            )
        except RouterError as error:
            raise self._inference.refused(error) from None
        return request_of(body, prompt, grammar)


def _prepared(
    body: ChatBody, tools: OfferedTools | None
) -> tuple[list[Turn], list[dict[str, Any]] | None, AskedGrammar | None]:
    """What goes into the template, and the grammar of the answer."""
    turns = turns_of(body)
    if tools is not None:
        return turns, tools.for_template(), tools.grammar()
    return turns, None, None if body.response_format is None else body.response_format.asked


def _number_of_choices(served: Served, body: ChatBody) -> int:
    number, limit = 1 if body.n is None else body.n, served.inference.limits.max_client_batch_size
    if not 1 <= number <= limit:
        raise ValidationError(f"`n` must be > 0 and <= {limit}. Given: {number}")
    return number


def _stream(chat: Chat, head: ChatHead, running: Sequence[Run]) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(chat, head, running),
        headers=stream_headers(running[0], compute_type=chat.served.config.compute_type),
        close=close,
        stalled_s=chat.served.config.stalled_client_seconds,
    )


async def _events(chat: Chat, head: ChatHead, running: Sequence[Run]) -> AsyncGenerator[bytes, None]:
    choices: dict[int, ChoiceStream | CallStream] = {}
    num_unfinished, num_tokens = len(running), 0
    try:
        async with aclosing(interleaved(running)) as events:
            async for index, event in events:
                if isinstance(event, Prefilled):
                    continue
                choice = choices.get(index) or choices.setdefault(index, _choice(chat, head, index, running[index]))
                piece = b"".join([sse.event(chunk) for chunk in choice.chunks(event)])
                if isinstance(event, Finished):
                    num_unfinished -= 1
                    num_tokens += event.generated_tokens
                    if not num_unfinished:
                        if chat.body.stream_options.include_usage:
                            num_read = prompt_tokens_of([one.request for one in running])
                            piece += sse.event(usage_chunk(head, num_read, num_tokens))
                        piece += sse.DONE
                if piece:
                    yield piece
    except Exception as error:
        yield sse.frame(openai_event_body(said_to_client(error, running[0].request_id))) + sse.DONE


def _choice(chat: Chat, head: ChatHead, index: int, running: Run) -> ChoiceStream | CallStream:
    """What its first event turns out to belong to: text or a call."""
    stops, logprobs = running.request.stopping.stop_sequences, chat.body.logprobs
    if chat.tools is not None and is_call(running.request):
        return CallStream(head, index, stops, logprobs=logprobs, only_name=chat.tools.only_name)
    return ChoiceStream(head, index, stops, logprobs=logprobs)
