"""`/tokenize` and `/chat_tokenize`: how the model cuts a text or a chat into tokens."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.app_state import AppState, state_of
from router.api.chat import first_request
from router.api.json_out import JsonResponse
from router.api.openapi.answers import READS_ONLY
from router.api.routes import Routes
from router.errors import ValidationError
from router.schemas.chat import ChatBody
from router.schemas.generate import ChatTokenizeResponse, TokenizeBody, TokenSpan

routes = Routes("Tokenization", is_fast=True)


@routes.answers("/tokenize", TokenizeBody, list[TokenSpan], span="tokenize", errors=READS_ONLY)
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, special tokens included, with byte offsets. The parameters are ignored."""
    state = state_of(request)
    body = await state.read(request, TokenizeBody)
    if not body.inputs:
        raise ValidationError("`inputs` cannot be empty")
    return JsonResponse(await _spans(state, body.inputs, add_special_tokens=True))


@routes.answers("/chat_tokenize", ChatBody, ChatTokenizeResponse, span="chat_tokenize", errors=READS_ONLY)
async def chat_tokenize(request: Request) -> Response:
    """The chat as the template renders it, and its tokens. What only sampling needs is ignored."""
    state = state_of(request)
    body = await state.read(request, ChatBody)
    state.count_request()
    prompt = (await first_request(state, body)).inputs
    spans = await _spans(state, prompt, add_special_tokens=False)
    return JsonResponse({"tokenize_response": spans, "templated_text": prompt})


async def _spans(state: AppState, text: str, *, add_special_tokens: bool) -> list[dict[str, Any]]:
    try:
        spans = await state.inference.tokenizer.spans(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValidationError(f"tokenizer error: {error}") from None
    return [{"id": span.id, "text": span.text, "start": span.start, "stop": span.stop} for span in spans]
