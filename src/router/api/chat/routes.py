"""`/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, StreamFailure, request_id_of, state_of, stream_failure
from router.api.chat.answer import completion, prompt_tokens_of, reasoning_tokens_of
from router.api.chat.calls import CallStream
from router.api.chat.chat import Chat
from router.api.chat.chunks import ChatHead, ChoiceStream, usage_chunk
from router.api.chat.prompt import model_name
from router.api.chat.read_stream import ReadStream
from router.api.chat.schema import ChatBody, ChatChunk, ChatCompletion
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import chat_headers, stream_headers
from router.api.json_out import JsonResponse
from router.api.openai.answers import usage
from router.api.openapi.answers import JSON_HEADERS
from router.api.routes import Routes
from router.events import Finished, Predicted, Prefilled
from router.generation.api_rules import CHAT, ApiRules
from router.generation.asked import GenerateRequest
from router.generation.collect import GenerationResult, end_all, interleaved
from router.generation.running import Run
from router.tracing import name_response

AnyStream = ChoiceStream | CallStream | ReadStream

routes = Routes("Chat", is_fast=True)


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
    """Answer a chat body of any route."""
    chat = Chat(state, body)
    head = ChatHead.new("chatcmpl", model_name(body.model, state.model_names[0]))
    name_response(head.id)
    with state.inference.take_permits(chat.number, request_id=request_id_of(request)) as permits:
        if body.stream:
            running = await cancel_on_disconnect(request.receive, chat.start(permits))
            return _stream(chat, head.served(running[0].request, body.service_tier), running, stream_failure(request))
        generations = await cancel_on_disconnect(request.receive, chat.generate(permits))
    return JsonResponse(whole(chat, generations, head), headers=chat_headers(generations, state.config.compute_type))


def whole(chat: Chat, generations: Sequence[GenerationResult], head: ChatHead | None = None) -> dict[str, Any]:
    """Return the answer to a chat that is not streamed."""
    head = head or ChatHead.new("chatcmpl", model_name(chat.body.model, chat.state.model_names[0]))
    return completion(
        head.served(generations[0].request, chat.body.service_tier),
        generations,
        chat.reading_of,
        logprobs=chat.names,
        tools=chat.tools,
        keeps_stop=chat.body.include_stop_str_in_output,
    )


async def first_request(state: AppState, body: ChatBody, api: ApiRules = CHAT) -> GenerateRequest:
    """Return one choice's generation, with tools its call; `inputs` is the rendered chat."""
    return await Chat(state, body, api).request()


async def prompt_tokens(state: AppState, body: ChatBody, api: ApiRules = CHAT) -> int:
    """Count the tokens of a chat's prompt."""
    prompt = await state.inference.prompt_of(await first_request(state, body, api))
    tokenizer = state.inference.tokenizer
    return len(await tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens, truncate=None))


def _stream(chat: Chat, head: ChatHead, running: Sequence[Run], failure: StreamFailure) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(chat, head, running, failure),
        headers=stream_headers(running[0], compute_type=chat.state.config.compute_type),
        close=close,
        stalled_s=chat.state.config.stalled_client_seconds,
    )


async def _events(
    chat: Chat, head: ChatHead, running: Sequence[Run], failure: StreamFailure
) -> AsyncGenerator[bytes, None]:
    choices: dict[int, AnyStream] = {}
    num_unfinished, num_tokens = len(running), 0
    cached: list[int] = []
    predicted: list[Predicted | None] = []
    options = chat.body.stream_options
    try:
        async with aclosing(interleaved(running)) as events:
            async for index, event in events:
                if isinstance(event, Prefilled):
                    continue
                choice = choices.get(index) or choices.setdefault(
                    index, choice_stream(chat, head, index, running[index])
                )
                chunks = choice.chunks(event)
                num_tokens += 1
                # Of the answers: a decision that has led to one may have had another prompt.
                num_read = prompt_tokens_of([one.request for one in running])
                if options.continuous_usage_stats:
                    used = usage(num_read, num_tokens, _reasoning_tokens(choices), cached_tokens=None)
                    chunks = [chunk | {"usage": used} for chunk in chunks]
                piece = b"".join([sse.event(chunk) for chunk in chunks])
                if isinstance(event, Finished):
                    num_unfinished -= 1
                    cached.append(event.cached_tokens)
                    predicted.append(event.predicted)
                    if not num_unfinished:
                        if options.include_usage:
                            reasoning = _reasoning_tokens(choices)
                            used_at_end = usage_chunk(head, num_read, num_tokens, reasoning, min(cached), predicted)
                            piece += sse.event(used_at_end)
                        piece += sse.DONE
                if piece:
                    yield piece
    except Exception as error:
        end_all(running, error)
        yield sse.frame(failure(error)) + sse.DONE


def _reasoning_tokens(choices: Mapping[int, AnyStream]) -> int | None:
    return reasoning_tokens_of([one.reader for one in choices.values() if isinstance(one, ReadStream)])


def choice_stream(chat: Chat, head: ChatHead, index: int, running: Run, *, are_joined: bool = True) -> AnyStream:
    """Return a text or call stream, by its first event."""
    keeps_stop, logprobs = chat.body.include_stop_str_in_output, chat.names
    if chat.tools is not None and running.request.answer == "call":
        return CallStream(
            head, index, running.request, keeps_stop=keeps_stop, logprobs=logprobs, only_name=chat.tools.only_name
        )
    if (reading := chat.reading_of(running.request)) is not None:
        return ReadStream(head, index, *reading, logprobs=logprobs, are_joined=are_joined)
    return ChoiceStream(head, index, running.request, keeps_stop=keeps_stop, logprobs=logprobs)
