"""Answers a chat in another API's words, whole or as named events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from router.answers.stops import Ending, stop_of
from router.answers.tgi_form.two_passes import TwoPasses
from router.api.app_state import AppState, errors_of, request_id_of
from router.api.chat.chat import Chat
from router.api.chat.chunks import ChatHead
from router.api.chat.read_stream import ReadStream
from router.api.chat.routes import AnyStream, choice_stream
from router.api.chat.schema import ChatBody
from router.api.errors import ErrorAnswers, Family, body_of, family_of
from router.api.http import sse
from router.api.http.disconnect import cancel_on_disconnect
from router.api.http.headers import stream_headers
from router.api.json_out import JsonResponse, dumps
from router.api.openai.answers import tier_of
from router.events import Finished, Prefilled
from router.generation.api_rules import ApiRules
from router.generation.collect import interleaved
from router.generation.permits import HeldPermits
from router.generation.running import Run
from router.tracing import name_response

_MANY_ITEMS = 200
_BYTES_OF_AN_ITEM = 100  # at least, and what takes time is their number

T = TypeVar("T")
Event = tuple[str, dict[str, Any]]
"""Its name and its data."""


class Writer(Protocol):
    """Turns a chat's deltas into an API's events, and their sum."""

    @property
    def whole(self) -> dict[str, Any]: ...

    def start(self, input_tokens: int) -> list[Event]: ...

    def push(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]: ...

    def end(self, ending: Ending) -> list[Event]: ...

    def fail(self, body: dict[str, Any]) -> list[Event]: ...


async def as_chat(state: AppState, num_items: int, make: Callable[[], T], *, num_bytes: int = 0) -> T:
    """Run `make`, off the event loop for many items or stored bytes."""
    cost = num_items * _BYTES_OF_AN_ITEM + num_bytes
    return make() if cost <= _MANY_ITEMS * _BYTES_OF_AN_ITEM else await state.bodies.run(cost, make)


async def answer(request: Request, state: AppState, body: ChatBody, writer: Writer, api: ApiRules) -> Response:
    """Answer `body`, as a stream if asked.

    Args:
        api: The rules of the API it came by.
    """
    chat = Chat(state, body, api)
    name_response(writer.whole["id"])
    with state.inference.take_permits(1, request_id=request_id_of(request)) as permits:
        if not body.stream:
            await cancel_on_disconnect(request.receive, _read(chat, permits, writer))
            return JsonResponse(writer.whole)
        (running,) = await cancel_on_disconnect(request.receive, chat.start(permits))
    return sse.EventStream(
        _stream(chat, running, writer, errors_of(request), family_of(request.url.path)),
        headers=stream_headers(running, compute_type=state.config.compute_type),
        close=running.close,
        stalled_s=state.config.stalled_client_seconds,
    )


async def _read(chat: Chat, permits: HeldPermits, writer: Writer) -> None:
    (running,) = await chat.start(permits)
    try:
        async with aclosing(_events(chat, running, writer)) as events:
            async for _ in events:
                pass
    finally:
        running.close()


async def _stream(
    chat: Chat, running: Run, writer: Writer, errors: ErrorAnswers, family: Family
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(_events(chat, running, writer)) as events:
            async for some in events:
                yield _framed(some)
    except Exception as error:
        failure = body_of(errors.of_stream(error, running.request_id), family, running.request_id)
        yield _framed(writer.fail(failure))


async def _events(chat: Chat, running: Run, writer: Writer) -> AsyncGenerator[list[Event], None]:
    """Yield each token's events; raise what ends the generation."""
    has_begun = not isinstance(running, TwoPasses)  # else its prompt is known with its first event
    if has_begun:
        yield writer.start(running.request.input_length)
    choice: AnyStream | None = None
    head = ChatHead.new("chatcmpl", "")
    try:
        async with aclosing(interleaved([running])) as arrived:
            async for _, event in arrived:
                if isinstance(event, Prefilled):
                    continue
                if not has_begun:
                    has_begun = True
                    yield writer.start(running.request.input_length)
                choice = choice or choice_stream(chat, head, 0, running, are_joined=False)
                choices = [chunk["choices"][0] for chunk in choice.chunks(event)]
                events = [one for each in choices for one in writer.push(each["delta"], _logprobs_of(each))]
                if isinstance(event, Finished):
                    events += writer.end(_ending(event, running, choice, choices[-1]["finish_reason"]))
                if events:
                    yield events
    except Exception:
        if not has_begun:
            yield writer.start(running.request.input_length)
        raise


def _logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs: dict[str, list[dict[str, Any]]] | None = choice["logprobs"]
    return [] if logprobs is None else logprobs["content"]


def _ending(event: Finished, running: Run, choice: AnyStream, finish_reason: str) -> Ending:
    reader = choice.reader if isinstance(choice, ReadStream) else None
    return Ending(
        finish_reason=finish_reason,
        stop=reader.stop
        if reader
        else stop_of(event.text, running.request.stopping.stop_sequences, event.finish_reason),
        output_tokens=event.generated_tokens,
        cached_tokens=event.cached_tokens,
        service_tier=tier_of(running.request),
        reasoning_tokens=reader.reasoning_tokens if reader else 0,
    )


def _framed(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: %s\n%s" % (name.encode(), sse.frame(dumps(data))) for name, data in events)
