"""`/tokenize` and `/chat_tokenize`: a text's or chat's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from itertools import islice

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from router.api.app_state import AppState, state_of
from router.api.chat import first_request
from router.api.http.disconnect import cancel_on_disconnect
from router.api.json_out import JsonResponse, dumps
from router.api.routes import Routes
from router.errors import ValidationError
from router.generation import parsed_bodies
from router.generation.asked import GenerateRequest
from router.schemas.chat import ChatBody
from router.schemas.generate import ChatTokenizeResponse, TokenizeBody, TokenSpan
from router.text.spans import TokenSpan as Span
from router.text.spans import TokenSpans

routes = Routes("Tokenization", is_fast=True)

# Tokens of an answer that are written in one go. The answer to a long text is fifty times as long.
_PIECE = 1000


@routes.answers("/tokenize", TokenizeBody, list[TokenSpan], span="tokenize", generates=False)
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, special tokens included, with byte offsets. The parameters are ignored.

    Offsets are into the text that the model reads: in it each image is written out as its tokens.
    """
    state = state_of(request)
    body = await state.read(request, TokenizeBody, counts=False)
    if not body.inputs:
        raise ValidationError("`inputs` cannot be empty", param="inputs", reason="prompt_empty")
    asked = GenerateRequest(inputs=body.inputs)
    _, spans = await cancel_on_disconnect(request.receive, _spans(state, asked))
    if len(spans) <= _PIECE:
        return JsonResponse(_listed(spans))
    return StreamingResponse(_pieces(state, spans), media_type="application/json")


@routes.answers("/chat_tokenize", ChatBody, ChatTokenizeResponse, span="chat_tokenize", generates=False)
async def chat_tokenize(request: Request) -> Response:
    """The chat as the template renders it, images written out as their tokens, and its tokens.

    What only sampling needs is ignored.
    """
    state = state_of(request)
    body = await state.read(request, ChatBody)
    prompt, spans = await cancel_on_disconnect(request.receive, _chat_spans(state, body))
    if len(spans) <= _PIECE:
        return JsonResponse({"tokenize_response": _listed(spans), "templated_text": prompt})
    before, after = b'{"tokenize_response":', b',"templated_text":' + dumps(prompt) + b"}"
    return StreamingResponse(_pieces(state, spans, before, after), media_type="application/json")


async def _chat_spans(state: AppState, body: ChatBody) -> tuple[str, TokenSpans]:
    return await _spans(state, await first_request(state, body))


async def _spans(state: AppState, asked: GenerateRequest) -> tuple[str, TokenSpans]:
    """Return the text as the model reads it, and its tokens."""
    asked = await state.inference.prompt_of(asked)
    spans = await state.inference.tokenizer.spans(asked.text, add_special_tokens=asked.add_special_tokens)
    parsed_bodies.release()  # the client may take its time to read them
    return asked.text, spans


def _listed(spans: Iterable[Span]) -> list[dict[str, int | str]]:
    return [{"id": span.id, "text": span.text, "start": span.start, "stop": span.stop} for span in spans]


async def _pieces(
    state: AppState, spans: TokenSpans, before: bytes = b"", after: bytes = b""
) -> AsyncGenerator[bytes, None]:
    """Yield the list as JSON, a piece in a turn of the event loop over all answers."""
    rest, separator = iter(spans), before + b"["
    while True:
        async with state.long_answers:
            await asyncio.sleep(0)
            piece = _listed(islice(rest, _PIECE))
        if not piece:
            break
        yield separator + dumps(piece)[1:-1]
        separator = b","
    yield b"]" + after
