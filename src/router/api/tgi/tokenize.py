"""Between texts and tokens: TGI's `/tokenize` and `/chat_tokenize`, and what vLLM and llama.cpp have instead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from router.api.app_state import AppState, state_of
from router.api.chat.routes import first_request
from router.api.chat.schema import ChatBody
from router.api.http.disconnect import cancel_on_disconnect
from router.api.json_out import JsonResponse, dumps
from router.api.routes import Routes
from router.api.tgi.tokenize_schema import (
    ChatTokenizeResponse,
    DetokenizeBody,
    DetokenizeResponse,
    TemplateResponse,
    TokenIds,
    TokenizeBody,
    TokenizeChatBody,
    TokenizeContentBody,
    TokenizePromptBody,
    TokenizeResponse,
    TokenPieces,
)
from router.errors import ValidationError
from router.generation import parsed_bodies
from router.generation.asked import GenerateRequest
from router.text.spans import TokenSpans

routes = Routes("Tokenization", is_fast=True)

# Tokens of an answer that are written in one go. The answer to a long text is fifty times as long.
_PIECE = 1000


@routes.answers(
    "/tokenize",
    (TokenizeBody, TokenizePromptBody, TokenizeChatBody, TokenizeContentBody),
    TokenizeResponse | TokenIds | TokenPieces,
    span="tokenize",
    generates=False,
)
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, special tokens included, with byte offsets. The parameters are ignored.

    Offsets are into the text that the model reads: in it each image is written out as its tokens. A `prompt` or
    `messages` are answered as by vLLM, `content` as by llama.cpp.
    """
    state = state_of(request)
    body = await state.read_one_of(
        request, TokenizeBody, TokenizePromptBody, TokenizeChatBody, TokenizeContentBody, counts=False
    )
    if isinstance(body, TokenizeBody):
        return await _answer_inputs(request, state, body)
    if isinstance(body, TokenizeContentBody):
        return await _answer_content(request, state, body)
    assert isinstance(body, TokenizePromptBody | TokenizeChatBody)
    ids = await cancel_on_disconnect(request.receive, _ids(state, body))
    counts = {"count": len(ids), "max_model_len": state.inference.limits.max_total_tokens}
    names = {"token_strs": map(state.inference.tokenizer.name_of, ids)} if body.return_token_strs else {}
    return _answer(state, len(ids), counts | {"tokens": iter(ids)} | names)


@routes.answers("/chat_tokenize", ChatBody, ChatTokenizeResponse, span="chat_tokenize", generates=False)
async def chat_tokenize(request: Request) -> Response:
    """The chat as the template renders it, images written out as their tokens, and its tokens.

    What only sampling needs is ignored.
    """
    state = state_of(request)
    body = await state.read(request, ChatBody)
    prompt, spans = await cancel_on_disconnect(request.receive, _chat_spans(state, body))
    return _answer(state, len(spans), {"tokenize_response": _listed(spans), "templated_text": prompt})


@routes.answers("/detokenize", DetokenizeBody, DetokenizeResponse, span="detokenize", generates=False)
async def detokenize(request: Request) -> Response:
    """The text of tokens, special tokens included."""
    state = state_of(request)
    body = await state.read(request, DetokenizeBody, counts=False)
    tokenizer = state.inference.tokenizer
    if (unknown := tokenizer.first_unknown(body.tokens)) is not None:
        raise ValidationError(f"`tokens` names token {unknown}, which is not in the vocabulary", param="tokens")
    text = await cancel_on_disconnect(request.receive, tokenizer.text_of(body.tokens))
    return JsonResponse({"prompt": text, "content": text})


@routes.answers("/apply-template", ChatBody, TemplateResponse, span="apply_template", generates=False)
async def apply_template(request: Request) -> Response:
    """The chat as the template renders it, images written out as their tokens."""
    state = state_of(request)
    body = await state.read(request, ChatBody, counts=False)
    asked = await cancel_on_disconnect(request.receive, _rendered(state, body))
    return JsonResponse({"prompt": asked.text})


async def _answer_inputs(request: Request, state: AppState, body: TokenizeBody) -> Response:
    if not body.inputs:
        raise ValidationError("`inputs` cannot be empty", param="inputs", reason="prompt_empty")
    asked = await cancel_on_disconnect(request.receive, state.inference.prompt_of(GenerateRequest(inputs=body.inputs)))
    spans = await cancel_on_disconnect(request.receive, _spans(state, asked))
    return _answer(state, len(spans), _listed(spans))


async def _answer_content(request: Request, state: AppState, body: TokenizeContentBody) -> Response:
    tokenizer = state.inference.tokenizer
    encoding = tokenizer.encode(
        body.content, add_special_tokens=body.add_special, truncate=None, parse_special=body.parse_special
    )
    ids = await cancel_on_disconnect(request.receive, encoding)
    pieces = ({"id": one, "piece": _piece(tokenizer.token_bytes[one])} for one in ids)
    return _answer(state, len(ids), {"tokens": pieces if body.with_pieces else iter(ids)})


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _ids(state: AppState, body: TokenizePromptBody | TokenizeChatBody) -> list[int]:
    text = body.prompt if isinstance(body, TokenizePromptBody) else (await _rendered(state, body)).text
    return await state.inference.tokenizer.encode(text, add_special_tokens=body.add_special_tokens, truncate=None)


async def _rendered(state: AppState, body: ChatBody) -> GenerateRequest:
    return await state.inference.prompt_of(await first_request(state, body))


async def _chat_spans(state: AppState, body: ChatBody) -> tuple[str, TokenSpans]:
    """Return the text as the model reads it, and its tokens."""
    asked = await _rendered(state, body)
    return asked.text, await _spans(state, asked)


async def _spans(state: AppState, asked: GenerateRequest) -> TokenSpans:
    return await state.inference.tokenizer.spans(asked.text, add_special_tokens=asked.add_special_tokens)


def _listed(spans: TokenSpans) -> Iterator[dict[str, int | str]]:
    return ({"id": span.id, "text": span.text, "start": span.start, "stop": span.stop} for span in spans)


def _answer(state: AppState, number: int, value: Iterator[Any] | dict[str, Any]) -> Response:
    """Answer with a list of `number` items, or an object that has some."""
    parsed_bodies.release()  # the client may take its time to read them
    if number > _PIECE:
        return StreamingResponse(_pieces(state, value), media_type="application/json")
    if isinstance(value, dict):
        return JsonResponse({name: list(one) if isinstance(one, Iterator) else one for name, one in value.items()})
    return JsonResponse(list(value))


async def _pieces(state: AppState, value: Iterator[Any] | dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yield the answer as JSON, a piece in a turn of the event loop over all answers."""
    members = value.items() if isinstance(value, dict) else [("", value)]
    for number, (name, one) in enumerate(members):
        if name:
            yield (b"," if number else b"{") + dumps(name) + b":"
        if not isinstance(one, Iterator):
            yield dumps(one)
            continue
        separator = b"["
        while True:
            async with state.long_answers:
                await asyncio.sleep(0)
                piece = list(islice(one, _PIECE))
            if not piece:
                break
            yield separator + dumps(piece)[1:-1]
            separator = b","
        yield b"]"
    if isinstance(value, dict):
        yield b"}"
