"""`/tokenize` and `/chat_tokenize`: how the model cuts a text or a chat into tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.app_state import Served, served_of
from router.api.chat import first_request
from router.api.http.body import read_body
from router.api.http.json_out import JsonResponse
from router.api.openapi.answers import READS_ONLY
from router.api.openapi.openapi import documented
from router.errors import ValidationError
from router.schemas.chat import ChatBody
from router.schemas.generate import ChatTokenizeResponse, TokenizeBody, TokenSpan

routes = APIRouter(tags=["Tokenization"])


@routes.post("/tokenize", **documented(TokenizeBody, list[TokenSpan], errors=READS_ONLY))
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, special tokens included, with byte offsets. The parameters are ignored."""
    served = served_of(request)
    body = await read_body(request, TokenizeBody, limit=served.config.payload_limit)
    if not body.inputs:
        raise ValidationError("`inputs` cannot be empty")
    return JsonResponse(await _spans(served, body.inputs, add_special_tokens=True))


@routes.post("/chat_tokenize", **documented(ChatBody, ChatTokenizeResponse, errors=READS_ONLY))
async def chat_tokenize(request: Request) -> Response:
    """The chat as the template renders it, and its tokens. What only sampling needs is ignored."""
    served = served_of(request)
    body = await read_body(request, ChatBody, limit=served.config.payload_limit)
    served.inference.metrics.count("tgi_request_count")
    prompt = (await first_request(served, body)).inputs
    spans = await _spans(served, prompt, add_special_tokens=False)
    return JsonResponse({"tokenize_response": spans, "templated_text": prompt})


async def _spans(served: Served, text: str, *, add_special_tokens: bool) -> list[dict[str, Any]]:
    try:
        spans = await served.inference.tokenizer.spans(text, add_special_tokens=add_special_tokens)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValidationError(f"tokenizer error: {error}") from None
    return [{"id": span.id, "text": span.text, "start": span.start, "stop": span.stop} for span in spans]
