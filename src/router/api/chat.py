"""`/v1/chat/completions`, at once and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api import sse
from router.api.body import read_body
from router.api.disconnect import unless_left
from router.api.errors import openai_event_body, said_to_client
from router.api.headers import json_headers, stream_headers
from router.api.json_out import JsonResponse
from router.api.openapi import documented
from router.api.served import Served, request_id_of, served_of
from router.chat.chunks import ChatHead, ChoiceStream, completion, usage_chunk
from router.chat.prompt import check_served, choices_of, model_name, request_of, turns_of
from router.config import TGI_VERSION
from router.errors import RouterError, ValidationError
from router.events import Finished, Prefilled
from router.running import Admission, Generation, Running, interleaved
from router.schemas.chat import ChatBody, ChatChunk, ChatCompletion
from router.validation import GenerateRequest

routes = APIRouter(tags=["Chat"])


@routes.post("/v1/chat/completions", **documented(ChatBody, ChatCompletion, event=ChatChunk))
async def chat_completions(request: Request) -> Response:
    """Answer a chat; with `stream`, as server-sent events that end with `[DONE]`."""
    served = served_of(request)
    return await answer(request, served, await read_body(request, ChatBody, limit=served.config.payload_limit))


async def answer(request: Request, served: Served, body: ChatBody) -> Response:
    """The answer to a chat body, whichever route it came by."""
    served.inference.metrics.count("tgi_request_count")
    number = _number_of_choices(served, body)
    head = ChatHead(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model_name(body.model, served.model_id),
        system_fingerprint=f"{TGI_VERSION}-native",
    )
    with served.inference.admit(number, request_id=request_id_of(request)) as admission:
        if body.stream:
            running = await unless_left(request.receive, _start(served, body, number, admission))
            return _stream(served, body, head, running)
        generations = await unless_left(request.receive, _generate(served, body, number, admission))
    whole = completion(head, generations, logprobs=body.logprobs)
    return JsonResponse(whole, headers=json_headers(generations[0], served.config.compute_type))


def _number_of_choices(served: Served, body: ChatBody) -> int:
    number, limit = 1 if body.n is None else body.n, served.inference.limits.max_client_batch_size
    if not 1 <= number <= limit:
        raise served.inference.refused(ValidationError(f"`n` must be > 0 and <= {limit}. Given: {number}"))
    return number


async def first_request(served: Served, body: ChatBody) -> GenerateRequest:
    """The generation of one choice; its `inputs` are the rendered chat."""
    try:
        check_served(body)
        prompt = await served.chat_template.render(turns_of(body))
        return request_of(body, prompt)
    except RouterError as error:
        raise served.inference.refused(error) from None


async def _requests(served: Served, body: ChatBody, number: int) -> list[GenerateRequest]:
    """One request per choice."""
    return choices_of(await first_request(served, body), number)


async def _generate(served: Served, body: ChatBody, number: int, admission: Admission) -> list[Generation]:
    requests = await _requests(served, body, number)
    if number == 1:
        return [await served.inference.generate(requests[0], admission)]
    return await served.inference.generate_many(requests, admission)


async def _start(served: Served, body: ChatBody, number: int, admission: Admission) -> list[Running]:
    return await served.inference.start_many(await _requests(served, body, number), admission)


def _stream(served: Served, body: ChatBody, head: ChatHead, running: Sequence[Running]) -> Response:
    def close() -> None:
        for one in running:
            one.close()

    return sse.EventStream(
        _events(head, running, logprobs=body.logprobs, include_usage=body.stream_options.include_usage),
        headers=stream_headers(running[0], compute_type=served.config.compute_type),
        close=close,
        stalled_s=served.config.stalled_client_seconds,
    )


async def _events(
    head: ChatHead, running: Sequence[Running], *, logprobs: bool, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    stops = running[0].request.stopping.stop_sequences
    choices = [ChoiceStream(head, index, stops, logprobs=logprobs) for index in range(len(running))]
    num_unfinished, num_tokens = len(running), 0
    try:
        async with aclosing(interleaved(running)) as events:
            async for index, event in events:
                if isinstance(event, Prefilled):
                    continue
                piece = sse.event(choices[index].chunk(event))
                if isinstance(event, Finished):
                    num_unfinished -= 1
                    num_tokens += event.generated_tokens
                    if not num_unfinished:
                        if include_usage:
                            piece += sse.event(usage_chunk(head, running[0].request.input_length, num_tokens))
                        piece += sse.DONE
                yield piece
    except Exception as error:
        yield sse.frame(openai_event_body(said_to_client(error, running[0].request_id))) + sse.DONE
