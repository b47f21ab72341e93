"""`/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, request_id_of, state_of
from router.api.errors import openai_event_body, public_error
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import json_headers, stream_headers
from router.api.json_out import JsonResponse, dumps
from router.api.openapi.answers import JSON_HEADERS
from router.api.routes import Routes
from router.errors import RouterError, ValidationError
from router.events import Finished, Prefilled
from router.generation.asked import GenerateRequest
from router.generation.collect import GenerationResult, collect_all, interleaved, start_all
from router.generation.permits import HeldPermits
from router.generation.running import Run, Running
from router.grammar.checker import AskedGrammar
from router.openai.chat.answer import completion, prompt_tokens_of
from router.openai.chat.calls import CallStream, is_call
from router.openai.chat.chunks import ChatHead, ChoiceStream, usage_chunk
from router.openai.chat.prompt import model_name, request_of, turns_of, variables_of
from router.openai.chat.tools import OfferedTools, offered_tools
from router.openai.chat.two_passes import TwoPasses, permits_of_one_pass
from router.openai.parameters import choices_of
from router.openai.template.messages import Turn
from router.schemas.chat import ChatBody, ChatChunk, ChatCompletion

routes = Routes("Chat", is_fast=True)

_MANY_MESSAGES = 500
_BYTES_OF_A_MESSAGE = 100  # at least, and what takes time is their number


@routes.answers(
    "/v1/chat/completions",
    ChatBody,
    ChatCompletion,
    span="chat_completions",
    event=ChatChunk,
    headers=tuple(JSON_HEADERS),
)
async def chat_completions(request: Request) -> Response:
    """Answer a chat; with `stream`, as server-sent events that end with `[DONE]`."""
    state = state_of(request)
    return await answer(request, state, await state.read(request, ChatBody))


async def answer(request: Request, state: AppState, body: ChatBody) -> Response:
    """The answer to a chat body, whichever route it came by."""
    state.count_request()
    chat = Chat(state, body)
    head = ChatHead.new("chatcmpl", model_name(body.model, state.model_id))
    with state.inference.take_permits(chat.number, request_id=request_id_of(request)) as permits:
        if body.stream:
            running = await cancel_on_disconnect(request.receive, chat.start(permits))
            return _stream(chat, head, running)
        generations = await cancel_on_disconnect(request.receive, chat.generate(permits))
    whole = completion(head, generations, logprobs=body.logprobs, tools=chat.tools)
    return JsonResponse(whole, headers=json_headers(generations[0], state.config.compute_type))


async def first_request(state: AppState, body: ChatBody) -> GenerateRequest:
    """The generation of one choice; its `inputs` are the rendered chat. With tools it is the call of one."""
    return await Chat(state, body).request()


class Chat:
    """A chat body on its way to its generations. Raises RouterError for what can be refused before there are any."""

    def __init__(self, state: AppState, body: ChatBody) -> None:
        self._inference = state.inference
        self._template = state.chat_template
        self.state = state
        self.body = body
        try:
            self.number = _number_of_choices(state, body)
            self.tools = offered_tools(body)
        except RouterError as error:
            raise state.inference.refused(error) from None

    async def request(self) -> GenerateRequest:
        """The message of one choice: the call of a tool if there are any."""
        return await self._request(self.tools)

    async def start(self, permits: HeldPermits) -> list[Run]:
        """Queues the generations of all choices, or none."""
        requests = choices_of(await self.request(), self.number)
        return await start_all(
            partial(self.start_choice, request, index, permits) for index, request in enumerate(requests)
        )

    async def generate(self, permits: HeldPermits) -> list[GenerationResult]:
        """The generations of all choices, to their ends."""
        return await collect_all(await self.start(permits))

    async def start_choice(self, request: GenerateRequest, index: int, permits: HeldPermits) -> Run:
        """Queues one choice; it takes one permit, also where it comes in two passes."""
        if self.tools is None or not self.tools.or_none:
            return await self._inference.start(request, permits)

        async def as_text(permits: HeldPermits) -> Running:
            plain = choices_of(await self._request(None), self.number)[index]
            return await self._inference.start(plain, permits)

        decision = await self._inference.start(request, permits_of_one_pass(permits))
        return TwoPasses(decision, as_text, permits)

    async def _request(self, tools: OfferedTools | None) -> GenerateRequest:
        body = self.body
        try:
            # Schemas and long chats may take a tenth of a second to go through.
            if tools is not None or len(body.messages) > _MANY_MESSAGES:
                work = partial(_prepared, body, tools)
                turns, listed, grammar = await self.state.bodies.run(_cost(body), work)
            else:
                turns, listed, grammar = _prepared(body, tools)
            prompt = await self._template.render(
                turns, listed, tool_prompt=body.tool_prompt, variables=variables_of(body)
            )
        except RouterError as error:
            raise self._inference.refused(error) from None
        return request_of(body, prompt, grammar)


def _cost(body: ChatBody) -> int:
    """About the bytes that `_prepared` goes through."""
    schemas = (tool.function.schema_of_parameters for tool in body.tools or ())
    return len(body.messages) * _BYTES_OF_A_MESSAGE + sum(len(dumps(schema)) for schema in schemas)


def _prepared(
    body: ChatBody, tools: OfferedTools | None
) -> tuple[list[Turn], list[dict[str, Any]] | None, AskedGrammar | None]:
    """What goes into the template, and the grammar of the answer."""
    turns = turns_of(body)
    if tools is not None:
        return turns, tools.for_template(), tools.grammar()
    return turns, None, None if body.response_format is None else body.response_format.asked


def _number_of_choices(state: AppState, body: ChatBody) -> int:
    number, limit = 1 if body.n is None else body.n, state.inference.limits.max_client_batch_size
    if not 1 <= number <= limit:
        raise ValidationError(f"`n` must be > 0 and <= {limit}. Given: {number}")
    return number


def _stream(chat: Chat, head: ChatHead, running: Sequence[Run]) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(chat, head, running),
        headers=stream_headers(running[0], compute_type=chat.state.config.compute_type),
        close=close,
        stalled_s=chat.state.config.stalled_client_seconds,
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
        yield sse.frame(openai_event_body(public_error(error, running[0].request_id))) + sse.DONE


def _choice(chat: Chat, head: ChatHead, index: int, running: Run) -> ChoiceStream | CallStream:
    """What its first event turns out to belong to: text or a call."""
    stops, logprobs = running.request.stopping.stop_sequences, chat.body.logprobs
    if chat.tools is not None and is_call(running.request):
        return CallStream(head, index, stops, logprobs=logprobs, only_name=chat.tools.only_name)
    return ChoiceStream(head, index, stops, logprobs=logprobs)
